"""Folders of save_pretrained with small random models, and runs that read and write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp import config as configuration
from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh
from fsdp.run.build import maybe_folder
from fsdp.run.job import prepare, trained_model
from fsdp.shard.materialize import materialize
from fsdp.shard.shard import shard_model
from tests.models import small_hf

TEXTS = "--data.name tests.models.small_hf:texts --data.args.kind"
DATA = {
    "llama": f"{TEXTS} causal",
    "tied": f"{TEXTS} causal",
    "qwen3": f"{TEXTS} causal",
    "gpt2": f"{TEXTS} causal",
    "bert": f"{TEXTS} masked",
    "t5": f"{TEXTS} seq2seq",
    "vit": "--data.name tests.models.small_hf:pictures",
    "mixtral": f"{TEXTS} causal",
}
FORWARD = {
    "bert": {"input_ids": torch.arange(1, 19).view(2, 9)},
    "t5": {"input_ids": torch.arange(1, 19).view(2, 9), "decoder_input_ids": torch.arange(1, 11).view(2, 5)},
    "vit": {"pixel_values": torch.arange(128.0, dtype=torch.float64).view(2, 1, 8, 8) / 128},
}


def write_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Every bias and scale differs from its initial constant, so that a tensor in a wrong place is found."""
    torch.manual_seed(0)
    model: Any = _model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return folder


def _model(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if name == "tied":
        return LlamaForCausalLM(
            LlamaConfig(**small_hf.SIZES, num_key_value_heads=1, tie_word_embeddings=True)
        )
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**small_hf.SIZES, num_key_value_heads=1, head_dim=12))
    return getattr(small_hf, name)()


def logits_of(name: str, model: Any) -> Tensor:
    """In float64, without dropout."""
    inputs = FORWARD.get(name, FORWARD["bert"])
    with torch.no_grad():
        found: Tensor = model.double().eval()(**inputs).logits
    return found


def reference(folder: Path, cls: str) -> Any:
    import transformers

    model: Any = getattr(transformers, cls).from_pretrained(folder, dtype=torch.float32)
    return model


def pretrained(folder: str) -> Any:
    """A factory of --model.name that reads weights."""
    return reference(Path(folder), "LlamaForCausalLM")


def pretrained_on_cpu(folder: str) -> Any:
    with torch.device("cpu"):
        return pretrained(folder)


@dataclass(frozen=True)
class LoadedRank:
    parameters: dict[str, Tensor]
    logits: Tensor
    nbytes: int
    shard_nbytes: int


def load_on_a_rank(env: DistEnv, cases: list[tuple[str, str, str]], words: str) -> list[LoadedRank]:
    return [_load(env, name, folder, words) for name, folder, _ in cases]


def _load(env: DistEnv, name: str, folder: str, words: str) -> LoadedRank:
    flags = f"--model.name hf:{folder} {DATA[name]} {words} --precision.master fp64"
    if name == "mixtral":
        flags += " --model.args.experts_implementation eager"
    config = configuration.load(flags.split())
    job = prepare(config, world_size=env.world_size, num_nodes=1, device=env.device)
    mesh = build_mesh(job.sizes, env.device, 60.0)
    sharded = shard_model(trained_model(config, job), job.sharding, mesh)
    opening = maybe_folder(config, job.spec)
    assert opening is not None
    opened = opening()
    materialize(sharded, spec=job.spec, seed=0, init="shard", rank=env.rank, pretrained=lambda: opened)
    parts = [local_tensor(p) for p in sharded.root.parameters()]
    return LoadedRank(
        parameters={n: _full(p).float() for n, p in sharded.root.named_parameters()},
        logits=logits_of(name, sharded.root),
        nbytes=opened.nbytes,
        shard_nbytes=sum(part.numel() * 4 for part in parts),
    )


def _full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()

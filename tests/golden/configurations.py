"""The 20 pinned configurations, and the text and the Llama that some train on."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INPUTS = Path(__file__).parent / "inputs"
"""On PYTHONPATH of every run."""


@dataclass(frozen=True)
class Configuration:
    name: str
    ranks: int
    flags: str
    """{run} is the run's own folder, {data} that of `write_data`."""
    others: tuple[tuple[int, str], ...] = ()
    """Ranks and flags with which some starts of a killed run continue it, within 1e-12."""

    @property
    def anywhere(self) -> bool:
        """Its values are fp64 and hold on any processor; Muon orthogonalizes in bf16."""
        return FP64 in self.flags and "muon" not in self.flags

    @property
    def hugging_face(self) -> bool:
        return "hf:" in self.flags

    def words(self, run: Path, data: Path) -> list[str]:
        return self.flags.format(run=run, data=data).split()


FP64 = "--precision.master fp64"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
MLP = "--model.name mlp --data.name digits --model.args.hidden 96"
TEXT = "--model.name transformer --model.args.width 32 --data.seq_len 48"
MIXTURE = f"{TEXT} --data.sources {{data}}/mixture.toml --model.args.dropout 0.1"
STORIES = f"{TEXT} --data.name {{data}}/stories.jsonl"
STREAM = "--model.name transformer --model.args.width 32 --data.name golden_stream:stream"
HF = (
    "--model.name hf:{data}/llama --checkpoint.export_format both"
    " --data.name synthetic --data.args.kind tokens --data.seq_len 16 --data.args.vocab_size 64"
)
LAYOUTS = ((3, "--mesh.strategy fsdp"), (2, "--mesh.strategy ddp"), (4, HSDP), (1, "--mesh.strategy fsdp"))

CONFIGURATIONS = (
    Configuration("mlp", 2, f"{MLP} {FP64} --optim.schedule wsd --optim.warmup_steps 2"),
    Configuration("ddp-ema", 3, f"{MLP} {FP64} --mesh.strategy ddp --optim.ema 0.9"),
    Configuration(
        "hsdp-micro-batches", 4, f"{MLP} {FP64} {HSDP} --train.micro_batch 1 --mesh.accumulate shard"
    ),
    Configuration("sgd", 2, f"{MLP} {FP64} --optim.name sgd --optim.lr 0.01", LAYOUTS),
    Configuration(
        "vit-recomputed",
        2,
        f"--model.name vit --model.args.layers 2 --data.name digits {FP64} --mesh.wrap every:2"
        " --memory.activation_checkpointing full --train.micro_batch 3",
    ),
    Configuration("mixture", 2, f"{MIXTURE} {FP64} --data.workers 3 --train.eval_every_steps 3"),
    Configuration("mixture-muon-ema", 4, f"{MIXTURE} {FP64} {HSDP} --optim.name muon --optim.ema 0.9"),
    Configuration(
        "mixture-lora", 2, f"{MIXTURE} {FP64} --mesh.strategy ddp --lora.rank 4 --lora.dropout 0.1"
    ),
    Configuration("stream", 3, f"{STREAM} {FP64} --train.micro_batch 2"),
    Configuration("hf", 2, f"{HF} {FP64} --mesh.reshard_after_forward step --train.micro_batch 2"),
    Configuration("hf-lora", 3, f"{HF} {FP64} --lora.rank 2 --lora.targets *q_proj"),
    Configuration(
        "loss-in-chunks", 2, f"{STORIES} {FP64} --memory.loss_chunk 32 --train.z_loss 1e-4 --mesh.wrap root"
    ),
    Configuration("one-rank", 1, f"{STORIES} --data.args.rows packed {FP64} --optim.name torch.optim:NAdam"),
    Configuration("states-in-files", 2, f"{STORIES} {FP64} --memory.nvme all --memory.nvme_dir {{run}}/nvme"),
    Configuration(
        "bf16", 2, f"{MIXTURE} --precision.param bf16 --train.micro_batch 2 --mesh.accumulate every"
    ),
    Configuration("fp16", 3, f"{MLP} --precision.param fp16 --precision.loss_scale 1e9"),
    Configuration("bf16-masters", 2, f"{STORIES} --precision.master bf16 --mesh.unsharded *norm.weight"),
    Configuration("8-bit-states", 2, f"{MLP} --optim.state 8bit --optim.schedule linear"),
    Configuration(
        "bf16-states", 2, f"{MLP} --optim.state bf16 --memory.nvme optimizer --memory.nvme_dir {{run}}/nvme"
    ),
    Configuration("fp32-hsdp", 4, f"{STORIES} {HSDP} --train.clip_grad_norm 0.5 --run.seed 3"),
)

SOURCE = """
[[data.sources]]
name = "{folder}/{label}.jsonl"
label = "{label}"
weight = {weight}
args = {{rows = "packed", heldout = 0.05}}
"""
LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False,
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Text of two kinds with the table that mixes it, and a small Llama: the same at every call."""
    draw = random.Random(15)
    folder.mkdir(parents=True)
    tables = []
    for label, weight, longest in (("stories", 2, 40), ("notes", 1, 8)):
        texts = [_words(draw, draw.randrange(3, longest)) for _ in range(400)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{label}.jsonl").write_text(lines)
        tables.append(SOURCE.format(folder=folder, label=label, weight=weight))
    (folder / "mixture.toml").write_text("".join(tables))
    if importlib.util.find_spec("transformers"):
        _write_llama(folder / "llama")


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randrange(1, 9))) for _ in range(count))


def _write_llama(folder: Path) -> None:
    """Its weights come of exact divisions: drawn ones differ between processors in their last bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    with torch.no_grad():
        for nth, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel()) * (nth + 7) % 89 - 44
            parameter.copy_((numbers / 256).view_as(parameter) + (parameter.dim() == 1))
    model.save_pretrained(folder)

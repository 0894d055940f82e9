"""--mesh.tensor against one process: the same numbers, and what would train wrong is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import WatchSection
from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.models.init import Constant, Init
from fsdp.models.transformer import Transformer, TransformerSizes
from fsdp.run import build
from fsdp.run.job import prepare, trained_model
from fsdp.shard.shard import Sharded
from fsdp.shard.tensor import TensorGradients, check_transformers
from fsdp.watch.replica_checks import ReplicaChecks
from tests.support.marks import quick_are, sample_are
from tests.support.runs import Finished, failures, run, settings
from tests.support.world import run_world

DATA = (
    "--data.name synthetic --data.args.kind tokens --data.args.vocab_size 32 --data.seq_len 16 "
    "--train.global_batch 8 --train.steps 4 --precision.master fp64 --train.clip_grad_norm 0.5 "
)
HERE = f"--model.name {__name__}"
TIED = (
    "--model.name transformer --model.args.width 32 --model.args.heads 4 --model.args.kv_heads 2 "
    "--model.args.ffn 48 --model.args.tied true"
)
SHAPES = {
    "tensor": (2, "--mesh.tensor 2 --train.micro_batch 4"),
    "shard": (4, "--mesh.tensor 2 --train.micro_batch 2"),
    "replicate": (4, "--mesh.tensor 2 --mesh.strategy hsdp --mesh.replicate 2 --watch.divergence 1"),
}
SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


class Norm(nn.Module):
    """transformers' own computes in float32."""

    def __init__(self, width: int, shift: float) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(1 - shift + 0.1 * torch.randn(width)), shift

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.shift)


def model(family: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    made: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config(**(SIZES | more)))
    for name, module in list(made.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            weight: Any = module.weight
            made.set_submodule(name, Norm(weight.numel(), float(family == "Gemma3")))
    return made


llama = functools.partial(model, "Llama")
qwen3 = functools.partial(model, "Qwen3", tie_word_embeddings=True)
mistral = functools.partial(model, "Mistral", sliding_window=5)
gemma3 = functools.partial(model, "Gemma3", sliding_window=5)
apertus = functools.partial(model, "Apertus")
dropping = functools.partial(model, "Llama", attention_dropout=0.1)
mixtral = functools.partial(model, "Mixtral", num_local_experts=2)


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=32, n_head=4, n_layer=1)
    )


class Scaled(Transformer):
    """With a parameter without a dimension, which FSDP does not shard."""

    def __init__(self) -> None:
        super().__init__(TransformerSizes(vocab_size=32, width=32, kv_heads=2, tied=True))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, *args: Any, **more: Any) -> Tensor:
        return super().forward(*args, **more) * self.temperature

    def param_inits(self) -> dict[str, Init]:
        return {**super().param_inits(), "temperature": Constant(1.5)}


FAMILIES = {name: f"{HERE}:{name}" for name in ("llama", "qwen3", "mistral", "gemma3")}
MODELS = {"tied": TIED, "scaled": f"{HERE}:Scaled", **FAMILIES}
CASES = [(model, shape) for model in MODELS for shape in SHAPES]
SAMPLE = [("scaled", "replicate")]


def check_same(done: Finished, expected: Finished, bound: float = 1e-10) -> None:
    for name, value in expected.parameters.items():
        assert (done.parameters[name] - value).abs().max() <= bound, name
    for record, other in zip(done.records, expected.records, strict=True):
        for name in ("loss", "grad_norm", "tokens", "eval_loss", "eval_accuracy"):
            assert record.get(name, 0) == pytest.approx(other.get(name, 0), rel=bound), name


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("name", "shape"), quick_are([("tied", "tensor")], CASES, SAMPLE))
def test_trains_as_one_process(tmp_path: Path, name: str, shape: str) -> None:
    ranks, mesh = SHAPES[shape]
    expected = run(1, tmp_path / "one", DATA, MODELS[name])
    check_same(run(ranks, tmp_path / "run", DATA, MODELS[name], mesh), expected)


SHARDED, DIVIDED = "--mesh.shard 2", "--mesh.tensor 2"
CHANGES = [(DIVIDED, DIVIDED), (DIVIDED, SHARDED), (SHARDED, DIVIDED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    sample_are([], CHANGES),
)
def test_a_stopped_run_resumes_at_any_shape(tmp_path: Path, before: str, after: str) -> None:
    """With dropout at the same shape: to the bit."""
    same = before == after
    words = f"{DATA} {TIED} --model.args.dropout {0.1 if same else 0}"
    expected = run(2, tmp_path / "whole", words, before)
    stop = f"{words} {before} --train.stop_after 2"
    assert failures(2, tmp_path / "run", stop) == [None, None]
    check_same(run(2, tmp_path / "run", words, after), expected, 0.0 if same else 1e-9)


REFUSED = [
    ("apertus", "--mesh.tensor 2", "different gradients of model.layers.0.mlp.act_fn.alpha"),
    ("dropping", "--mesh.tensor 2", "attention_dropout 0.1"),
    ("mixtral", "--mesh.tensor 2", "experts.gate_up_proj as packed_colwise"),
    ("gpt2", "--mesh.tensor 2", "GPT2LMHeadModel has no plan"),
    ("llama", "--mesh.tensor 4", "does not divide model.layers.0.self_attn.k_proj.weight, 2 heads"),
]


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("name", "mesh", "fault"), quick_are(REFUSED[::4], REFUSED))
def test_what_would_train_wrong_is_refused(tmp_path: Path, name: str, mesh: str, fault: str) -> None:
    for error in failures(int(mesh[-1]), tmp_path, DATA, f"{HERE}:{name} {mesh}"):
        assert error is not None
        assert fault in error
        assert "HINT: --mesh.tensor" in error or "HINT: --model.args.attention_dropout 0" in error


def sharded(env: DistEnv, words: str) -> Sharded:
    config = settings(words)
    job = prepare(config, world_size=env.world_size, num_nodes=1, device=env.device, rank=env.rank)
    made = build.sharded(config, env, job.sharding, trained_model(config, job))
    build.real_weights(config, env, made, job.spec)
    return made


def gradients_of_ranks(env: DistEnv) -> tuple[list[float], int, bool]:
    """Gradients of 1 on rank 0 and of 3 on rank 1, reduced; copies in which rank 1 has drifted; memory."""
    made = sharded(env, f"{DATA} {TIED} --mesh.tensor 2 --watch.divergence 1 --mesh.strategy fsdp")
    named = dict(made.root.named_parameters())
    assert made.tensor is not None
    made.tensor = TensorGradients(made.root, made.mesh.get_group("tensor"), frozenset({"norm.weight"}))
    made.tensor.checked = True
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * env.rank)
    made.tensor.reduce()
    names = ("norm.weight", "blocks.0.ffn_norm.weight", "blocks.0.ffn.up.weight")
    reduced = [float(local_tensor(named[name].grad).max()) for name in names]  # type: ignore[arg-type]
    check = ReplicaChecks(WatchSection(divergence=1), made)
    check.compare(1)
    root: Any = made.root
    tied = root.head.weight is root.embedding.weight
    with torch.no_grad():
        local_tensor(named["norm.weight"]).add_(env.rank)
    held = sum(local_tensor(p).numel() for p in named.values())
    with pytest.raises(TrainingError, match="replicas differ in 1 of"):
        check.compare(2)
    return reduced, held, tied


@mock.patch("importlib.metadata.version", mock.Mock(return_value="5.17.0"))
def test_an_older_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"5\.17\.0 is installed"):
        check_transformers("--mesh.tensor 2")


def test_gradients_of_copies_are_averaged_or_summed_and_drift_is_found() -> None:
    whole = 16_544
    for rank, (reduced, held, tied) in enumerate(run_world(2, gradients_of_ranks)):
        assert reduced == [4.0, 2.0, 1.0 + 2 * rank]
        assert held == (whole + 5 * 32) / 2  # but for the norms
        assert tied

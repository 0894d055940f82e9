"""--mesh.tensor against one process: the same numbers, and what would train wrong is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.torch_private import prepare_torchvision
from fsdp.models.init import Constant, Init
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.support.marks import quick_are
from tests.support.runs import Finished, run

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
    prepare_torchvision()
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
SAMPLE = [("gemma3", "shard"), ("llama", "replicate"), ("scaled", "replicate"), ("mistral", "tensor")]


def check_same(done: Finished, expected: Finished, bound: float = 1e-10) -> None:
    for name, value in expected.parameters.items():
        assert (done.parameters[name] - value).abs().max() <= bound, name
    for record, other in zip(done.records, expected.records, strict=True):
        for name in ("loss", "grad_norm", "tokens", "eval_loss", "eval_accuracy"):
            assert record.get(name, 0) == pytest.approx(other.get(name, 0), rel=bound), name


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "shape"), quick_are([("tied", "tensor"), ("qwen3", "shard")], CASES, SAMPLE)
)
def test_trains_as_one_process(tmp_path: Path, name: str, shape: str) -> None:
    ranks, mesh = SHAPES[shape]
    expected = run(1, tmp_path / "one", DATA, MODELS[name])
    check_same(run(ranks, tmp_path / "run", DATA, MODELS[name], mesh), expected)

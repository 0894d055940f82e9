"""Attention within documents of packed rows: the built-in model, models of transformers, and the check."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.base.errors import ConfigError
from fsdp.models import attention
from fsdp.models.attention import Rows, check_documents_apart
from fsdp.models.hf import attend_documents, select_experts_kernel
from fsdp.models.loss import read_output
from fsdp.models.registry import check_model
from fsdp.models.transformer import Transformer, TransformerSizes
from tests.models import small_hf

LENGTHS = ([3, 1, 5], [9], [1, 1, 7])
VOCABULARY = 31


def transformer(**sizes: Any) -> Transformer:
    torch.manual_seed(0)
    given = {"vocab_size": VOCABULARY, "width": 16, "heads": 4, "kv_heads": 2, "max_seq_len": 9, **sizes}
    model = Transformer(TransformerSizes(**given)).double()
    with torch.no_grad():  # the initial weights' attention is close to uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    return tokens, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def alone(model: nn.Module, tokens: Tensor) -> Tensor:
    """Every document of `rows` by itself."""
    found = []
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        found.append(torch.cat([logits(model(part[None]))[0] for part in row.split(lengths)]))
    return torch.stack(found)


def logits(output: Any) -> Tensor:
    found = read_output(output).logits
    assert found is not None
    return found


def test_packed_documents_are_as_alone() -> None:
    model, (tokens, positions) = transformer(), rows()
    weights = torch.randn(3, 9, VOCABULARY, dtype=torch.float64)
    gradients = []
    for made in (model(tokens, positions), alone(model, tokens)):
        gradients.append(torch.autograd.grad((made * weights).sum(), list(model.parameters())))
    assert torch.allclose(model(tokens, positions), alone(model, tokens), rtol=0, atol=1e-12)
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(*gradients, strict=True))


# ---------------------------------------------------------------- varlen


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, __: int, *,
    window_size: tuple[int, int], scale: float | None,
) -> Tensor:  # fmt: skip
    """A CPU's stand-in for the kernel: [tokens, heads, head_dim], document by document."""
    before, after = window_size
    assert after == 0
    ends = bounds.tolist()
    assert longest >= max(end - begin for begin, end in itertools.pairwise(ends))
    parts = []
    for begin, end in itertools.pairwise(ends):
        one = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        scores = (one[0] @ one[1].mT) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        blocked = (distance < 0) | ((distance > before) if before >= 0 else False)
        parts.append((scores.masked_fill(blocked, -torch.inf).softmax(-1) @ one[2]).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_kernel", lambda: plain_varlen)
    monkeypatch.setattr(attention, "uses_varlen", lambda *_: True)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_is_as_the_mask(kv_heads: int, request: pytest.FixtureRequest) -> None:
    model, (tokens, positions) = transformer(kv_heads=kv_heads), rows()
    masked = model(tokens, positions)
    request.getfixturevalue("varlen")
    given = Rows(torch.float64, [4]).read(positions)
    assert not given.masks
    assert torch.allclose(model(tokens, positions), masked, rtol=0, atol=1e-12)
    # Positions of one document, and rows that know of several
    alone, positions[:] = positions, torch.arange(9)
    assert not torch.allclose(model(tokens, alone), model(tokens, alone, given), rtol=0, atol=1e-6)


# ---------------------------------------------------------------- models of transformers

DEEP: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"] * 2
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 4, "n_routed_experts": 2, "n_group": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {"sliding_window": 8, "layer_types": LAYERS},
    "DeepseekV3": LATENT,  # values have smaller heads than keys
}
LONGER = ([13, 12, 15], [40], [1, 21, 1, 17])


def of_transformers(kind: str, **more: Any) -> Any:
    """The same weights in each call."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**DEEP | KINDS.get(kind, {}) | more)
    torch.manual_seed(2)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def outputs(model: nn.Module) -> tuple[Tensor, ...]:
    tokens = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LONGER])
    made = logits(model(tokens, position_ids=positions))
    weights = torch.randn(made.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return made.detach(), *torch.autograd.grad((made * weights).sum(), list(model.parameters()))


class Shapes(TorchDispatchMode):
    """Whether an operator returned a tensor of [length, length]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape[-2:] == (40, 40) and len(made) == 3:
            self.masks = True
        return made


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("how", ["mask", "varlen"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_attention_is_replaced_exactly(kind: str, how: str, request: Any) -> None:
    """Against transformers' sdpa with its own mask: outputs and gradients; windows on all layers, or some."""
    expected = outputs(of_transformers(kind))
    model = of_transformers(kind)
    attend_documents(model, torch.float64)
    assert model.config._attn_implementation == "shardrun"
    if how == "varlen":
        request.getfixturevalue("varlen")
    with Shapes() as shapes:
        found = outputs(model)
    assert hasattr(shapes, "masks") == (how == "mask")
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("Gemma2", {"sliding_window": 8}, "it has softcap"),
        ("GptOss", {"num_local_experts": 4}, "it has s_aux"),
        ("Llama", {"attention_dropout": 0.1}, "it has dropout"),
        ("Llama", {"attn_implementation": "eager"}, "it is not transformers' sdpa"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "its mask or shapes"),
        ("OPT", {"num_key_value_heads": 4}, "its mask or shapes"),
    ],
)
def test_other_attention_is_kept(kind: str, more: dict[str, Any], why: str) -> None:
    model = of_transformers(kind, **more)
    before = model.config._attn_implementation
    assert attend_documents(model, torch.float64).startswith(why)
    assert model.config._attn_implementation == before


# ---------------------------------------------------------------- the check


class Crossing(nn.Module):
    """Takes positions, and lets documents see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformer()

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens)
        return found


def check(model: nn.Module) -> None:
    with torch.no_grad():
        check_documents_apart(
            lambda tokens, positions: logits(model(tokens, position_ids=positions)), rows()[0], model, "a"
        )


def test_a_model_whose_documents_see_each_other_is_refused() -> None:
    check(transformer())
    with pytest.raises(
        ConfigError,
        match=r"--model.name a takes position_ids, but its attention crosses .* HINT: --data.args",
    ):
        check(Crossing())


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"forward of Linear has no parameter position_ids, .* HINT: --data.args"
    ):
        check_model(nn.Linear(2, 2), "a", {"packed": True})
    check_model(nn.Linear(2, 2), "a", {})
    check_model(transformer(), "a", {"packed": True})


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mixtral"])
def test_documents_are_apart_in_transformers(kind: str, kernel: str) -> None:
    torch.manual_seed(0)
    model = getattr(small_hf, kind)().double().eval()
    model.set_attn_implementation(kernel)
    select_experts_kernel(model, torch.float64)
    tokens, positions = rows()
    check(model)
    packed = model(tokens, position_ids=positions).logits
    assert torch.allclose(packed, alone(model, tokens), rtol=0, atol=1e-9)

"""Attention within documents of packed rows: the built-in model, models of transformers, and the check."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import prepare_torchvision
from fsdp.models import packed
from fsdp.models.hf import select_experts_kernel
from fsdp.models.loss import read_output
from fsdp.models.packed import check_documents_apart, documents_of
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
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, __: int, *, is_causal: bool
) -> Tensor:
    """[tokens, heads, head_dim], document by document."""
    assert is_causal
    ends = bounds.tolist()
    assert longest >= max(end - begin for begin, end in itertools.pairwise(ends))
    parts = []
    for begin, end in itertools.pairwise(ends):
        one = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        scores = (one[0] @ one[1].mT) / q.shape[-1] ** 0.5
        blocked = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        parts.append((scores.masked_fill(blocked, -torch.inf).softmax(-1) @ one[2]).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_is_as_the_mask(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, positions) = transformer(kv_heads=kv_heads), rows()
    masked = model(tokens, positions)
    monkeypatch.setattr(packed, "varlen_kernel", lambda: plain_varlen)
    monkeypatch.setattr(packed, "uses_varlen", lambda *_: True)
    assert documents_of(positions, masked, 4).mask is None
    assert torch.allclose(model(tokens, positions), masked, rtol=0, atol=1e-12)


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
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mixtral"])
def test_documents_are_apart_in_transformers(kind: str, attention: str) -> None:
    prepare_torchvision()
    torch.manual_seed(0)
    model = getattr(small_hf, kind)().double().eval()
    model.set_attn_implementation(attention)
    select_experts_kernel(model, torch.float64)
    tokens, positions = rows()
    check(model)
    packed = model(tokens, position_ids=positions).logits
    assert torch.allclose(packed, alone(model, tokens), rtol=0, atol=1e-9)

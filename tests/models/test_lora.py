"""Adapters on one device: where they lie, that they begin as nothing, how they are drawn and merged, and what
is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import LoraSection
from fsdp.models.lora import adapted, apply_lora
from tests.support import user_code
from tests.support.adapters import draw_adapters, merge


def made(model: nn.Module, **section: Any) -> nn.Module:
    apply_lora(model, LoraSection(**{"rank": 3, **section}))
    draw_adapters(model, seed=0)
    return model


def layers(model: nn.Module, **section: Any) -> list[str]:
    return [name for name, _ in adapted(made(model, **section))]


class Stacked(nn.Module):
    """Experts as transformers stacks them, beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(3, 8, 4))
        self.head = nn.Linear(4, 2)


def test_by_default_they_lie_within_the_blocks() -> None:
    assert layers(user_code.Uneven()) == [f"blocks.{i}.{part}" for i in range(3) for part in ("up", "down")]
    assert layers(user_code.Tiny()) == ["narrow"]


def test_targets_are_names_last_names_or_patterns() -> None:
    assert layers(user_code.Uneven(), targets="up") == [f"blocks.{i}.up" for i in range(3)]
    assert layers(user_code.Uneven(), targets="blocks.0.*,head") == ["blocks.0.up", "blocks.0.down", "head"]


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (user_code.Uneven(), "upp", r"--lora.targets upp matches no untied linear layer "),
        (user_code.Uneven(), "norm", "--lora.targets norm matches no untied linear layer"),
        (Stacked(), "gate_up_proj", "gate_up_proj matches no untied linear layer"),
        (user_code.TiedWords(), "head", "matches no untied linear layer"),
        (nn.Sequential(nn.ReLU()), "", "this model has no linear layer"),
        (nn.MultiheadAttention(8, 2), "out_proj", "matches no untied linear layer"),
    ],
)
def test_what_cannot_carry_an_adapter_is_refused(model: nn.Module, targets: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(model, targets=targets)


def test_at_first_they_change_nothing_and_merged_they_do_the_same() -> None:
    plain = user_code.Uneven().eval()
    x = torch.randn(7, 12)
    expected = plain(x)
    model = made(plain, alpha=5.0)
    assert torch.equal(model(x), expected)
    for _, layer in adapted(model):
        nn.init.normal_(layer.lora_b)
    moved = model(x)
    assert not torch.allclose(moved, expected)
    names = [name for name, _ in user_code.Uneven().named_parameters()]
    merge(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.allclose(model(x), moved, atol=1e-5)

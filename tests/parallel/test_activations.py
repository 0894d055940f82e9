"""Each setting keeps what it names for backward, gradients stay equal, and a budget is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.config import MemorySection
from fsdp.models.units import find_units
from fsdp.parallel.activations import (
    Selective,
    apply_activation_checkpointing,
)
from tests.memory.held import Trunk, gradients, held
from tests.support.marks import quick_are, sample_are
from tests.support.runs import run

INPUT = torch.linspace(-1, 1, 2 * 64 * 32).view(2, 64, 32)


def after(memory: MemorySection, dropout: float = 0.0) -> tuple[int, list[Tensor], list[nn.Module]]:
    """Bytes held between forward and backward, the gradients, and the blocks."""
    model = Trunk(dropout)
    apply_activation_checkpointing(find_units(model), memory)
    torch.manual_seed(5)
    model(INPUT)  # a budget measures at first
    torch.manual_seed(5)
    nbytes, output = held(model, lambda: model(INPUT))
    return nbytes, gradients(model, output), list(model.blocks)


def test_each_kind_keeps_less_and_computes_the_same() -> None:
    none, expected, _ = after(MemorySection())
    full, one, _ = after(MemorySection(activation_checkpointing="full"))
    second, two, _ = after(MemorySection(activation_checkpointing="full", activation_checkpointing_every=2))
    ops, three, _ = after(MemorySection(activation_checkpointing="ops"))
    assert full < ops < none
    assert full < second < none
    for found in (one, two, three):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("budget", quick_are([0.5], [0.0, 0.1, 0.25, 0.5, 0.75, 0.9], [0.0]))
def test_a_budget_is_kept(budget: float) -> None:
    """Over all blocks: at most its share of what they keep by themselves, and not much less where there is a
    choice.
    """
    none, expected, _ = after(MemorySection(), dropout=0.1)
    nothing, _, _ = after(MemorySection(activation_checkpointing="full"), dropout=0.1)
    some, found, blocks = after(MemorySection(activation_budget=budget), dropout=0.1)
    assert some <= max(nothing, budget * none)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(isinstance(block.forward, Selective) and block.forward.measured for block in blocks)
    if budget >= 0.25:
        assert some >= 0.7 * budget * none


class Counting(nn.Module):
    """A block with statistics and chance, in which something is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.inner(x)), 0.3)
        x = self.inner(x)
        x.mul_(2)
        return torch.relu_(x)


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.6, 0.95])
def test_measuring_changes_no_state(budget: float) -> None:
    """Random streams are as without it; only recomputation counts statistics once more."""

    def train(wrap: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(1)
        block = Counting()
        if wrap:
            block.forward = Selective(block, block.forward, budget)  # type: ignore[method-assign]
        out = block(torch.ones(4, 8, requires_grad=True))
        chance = torch.rand(1)
        return gradients(block, out), chance

    (plain, a), (wrapped, b) = train(False), train(True)
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(plain, wrapped, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    sample_are(
        [(2, "")],
        [(2, ""), (4, "--mesh.strategy hsdp"), (2, "--mesh.strategy ddp --train.micro_batch 3")],
    ),
)
def test_a_run_within_a_budget_is_the_same_run(ranks: int, words: str, tmp_path: Path) -> None:
    plain, within = (
        run(ranks, tmp_path / name, words, more)
        for name, more in (("a", ""), ("b", "--memory.activation_budget 0.4"))
    )
    assert [r.get("loss") for r in plain.records] == [r.get("loss") for r in within.records]
    assert all(torch.equal(within.parameters[name], value) for name, value in plain.parameters.items())


def test_the_compiler_keeps_the_budget() -> None:
    functorch: Any = torch._functorch.config
    before = functorch.activation_memory_budget
    try:
        model = Trunk()
        apply_activation_checkpointing(find_units(model), MemorySection(activation_budget=0.3), compiled=True)
        assert functorch.activation_memory_budget == 0.3
        assert "forward" not in vars(next(iter(model.blocks)))
    finally:
        functorch.activation_memory_budget = before


class Writes(nn.Module):
    """Into a product, seen by its version; with `batched` into one that is a view with another version."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        product = torch.matmul(x, x.transpose(1, 2)) @ x if self.batched else self.first(x)
        product += x
        return x + self.second(torch.tanh(product))


def writing(batched: bool, memory: MemorySection) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(Writes(batched), Writes(batched))
    apply_activation_checkpointing(find_units(model), memory, root=model)
    gradients(model, model(INPUT / 8))
    return gradients(model, model(INPUT / 8))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("how", ["ops", "full", "budget"])
def test_a_unit_that_writes_into_a_product(batched: bool, how: Any) -> None:
    """As transformers' LongT5, Llama 4 and Gemma 3n do: the product is not kept."""
    expected = writing(batched, MemorySection())
    memory = MemorySection(activation_budget=0.6) if how == "budget" else None
    found = writing(batched, memory or MemorySection(activation_checkpointing=how))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""--memory.activation_offload: the same numbers to the bit, and what units keep is not where it was."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.config import MemorySection
from fsdp.shard.activations import apply_activation_checkpointing
from fsdp.shard.offload import Offloaded, apply_activation_offload
from tests.support.marks import quick_are
from tests.support.runs import check_same_numbers
from tests.support.user_code import Uneven

OFFLOAD = "--memory.activation_offload true"
FULL = "--memory.activation_checkpointing full"
CPU = torch.device("cpu")
CASES = {
    "alone": (1, ""),
    "fsdp": (2, ""),
    "hsdp": (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2 --train.micro_batch 1"),
    "ddp": (2, "--mesh.strategy ddp"),
    "recomputed": (2, FULL),
    "tied, a block used twice": (
        2,
        "--model.name tests.support.user_code:TiedWords --data.name tests.support.user_code:sentences",
    ),
}


@pytest.mark.parametrize("case", quick_are(["ddp"], CASES, ["tied, a block used twice"]))
def test_the_numbers_are_those_of_a_run_without(case: str, tmp_path: Path) -> None:
    ranks, words = CASES[case]
    check_same_numbers(ranks, tmp_path, words, OFFLOAD)


def made(memory: MemorySection) -> tuple[Uneven, Any]:
    """The model, and its first block's forward."""
    torch.manual_seed(0)
    model = Uneven()
    units: list[list[nn.Module]] = [[block] for block in model.blocks]
    apply_activation_checkpointing(units, memory)
    apply_activation_offload(units, CPU, compiled=False)
    assert not isinstance(model.blocks[-1].forward, Offloaded)
    return model, model.blocks[0].forward


def test_recomputed_units_offload_their_inputs_alone() -> None:
    """Of three units the last one's stay; a row of 13 fp32 numbers is what a unit is given."""
    model, first = made(MemorySection(activation_offload=True, activation_checkpointing="full"))
    model(torch.randn(6, 12)).square().sum().backward()
    assert first.copied == 6 * 13 * 4


@pytest.mark.parametrize("offload", [False, True])
def test_copied_tensors_are_freed_before_backward(offload: bool) -> None:
    model, _ = made(MemorySection(activation_offload=True)) if offload else (Uneven(), None)
    seen: list[weakref.ref[Tensor]] = []
    norm = model.blocks[0].get_submodule("norm")
    norm.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    out = model(torch.randn(6, 12))
    assert (seen[0]() is None) is offload
    out.square().sum().backward()

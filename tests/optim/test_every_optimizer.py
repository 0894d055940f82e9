"""What holds for each of OPTIMIZERS, and for a name that has been added there alone: it is not built as Adam,
and flags that would have no effect on it are refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.config.sections import IN_PARTS, MOMENTS, OPTIMIZERS
from fsdp.memory.account import resting_bytes
from fsdp.optim.optimizer import build_optimizer
from fsdp.parallel.offload import moments_of


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_counted_states_are_those_after_a_step(name: str) -> None:
    made, section = model(), OptimSection(name=name, muon_parameters="0.weight" if name == "muon" else "")
    optimizer = build_optimizer(section, made)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = moments_of(optimizer, made.parameters())
    assert (
        sum(value.nbytes for _, _, value in states) == resting_bytes(section, made, torch.float32).optimizer
    )
    if name in IN_PARTS:
        assert {kept for _, kept, _ in states} == set(MOMENTS[name])

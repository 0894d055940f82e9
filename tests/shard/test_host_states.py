"""--memory.optimizer_offload: the same numbers to the bit, with states copied for each update and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.optim.optimizer import build_optimizer
from fsdp.shard import offload as host_states
from fsdp.shard.offload import HostStates
from tests.support.marks import quick_are
from tests.support.runs import check_same_numbers

OFFLOAD = "--memory.optimizer_offload true"
CASES = {
    "fsdp": (2, ""),
    "ddp": (2, "--mesh.strategy ddp"),
    "sgd": (2, "--optim.name sgd"),
    "scalars and frozen parts": (3, "--model.name tests.support.user_code:Scalar"),
}


@pytest.mark.parametrize("case", quick_are(["fsdp"], CASES, ["ddp"]))
def test_the_numbers_are_those_of_a_run_without(case: str, tmp_path: Path) -> None:
    ranks, words = CASES[case]
    check_same_numbers(ranks, tmp_path, words, OFFLOAD)


def stepped(model: nn.Module, store: HostStates | None) -> torch.optim.Optimizer:
    optimizer = build_optimizer(OptimSection(), model)
    for step in range(3):
        optimizer.zero_grad()
        for nth, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (nth + step + 1))
        if store is None:
            optimizer.step()
        else:
            store.step(optimizer)
    return optimizer


def test_one_part_is_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one parameter each; after an update all moments are where they were before it."""
    monkeypatch.setattr(host_states, "PART_BYTES", 1)
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    store = HostStates(OptimSection(), torch.float32, torch.device("cpu"))
    whole, parts = stepped(models[0], None), stepped(models[1], store)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    moments = 2 * sum(p.numel() * p.element_size() for p in models[1].parameters())
    assert store.copied == 2 * moments, "the first update creates them"
    rooms = {name: value.data_ptr() for p in parts.state for name, value in parts.state[p].items()}
    store.step(parts)
    assert rooms == {name: value.data_ptr() for p in parts.state for name, value in parts.state[p].items()}
    assert len(whole.state) == len(parts.state)

"""--memory.optimizer_offload: the same numbers to the bit, with states copied for each update and back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection, load
from fsdp.optim.optimizer import build_optimizer
from fsdp.parallel import offload as host_states
from fsdp.parallel.offload import HostStates
from tests.memory import small
from tests.support.marks import quick_are
from tests.support.runs import check_same_numbers, failures, run

OFFLOAD = "--memory.optimizer_offload true"
CASES = {
    "fsdp": (2, ""),
    "hsdp": (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
    "ddp": (2, "--mesh.strategy ddp"),
    "sgd": (2, "--optim.name sgd"),
    "bf16 moments": (2, "--optim.state bf16"),
    "scalars and frozen parts": (3, "--model.name tests.support.user_code:Scalar"),
}


@pytest.mark.parametrize("case", quick_are(["fsdp"], CASES, ["ddp"]))
def test_the_numbers_are_those_of_a_run_without(case: str, tmp_path: Path) -> None:
    ranks, words = CASES[case]
    check_same_numbers(ranks, tmp_path, words, OFFLOAD)


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [("", OFFLOAD), (OFFLOAD, "")])
def test_a_checkpoint_resumes_with_and_without(first: str, then: str, tmp_path: Path) -> None:
    cut = "--train.stop_after 9 --checkpoint.every_steps 5"
    for folder, ways in (("plain", ("", "")), ("moved", (first, then))):
        assert failures(2, tmp_path / folder, ways[0], cut) == [None, None]
        run(3, tmp_path / folder, ways[1], "--checkpoint.every_steps 5")
    assert small.digests(tmp_path / "plain") == small.digests(tmp_path / "moved")


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


@pytest.mark.parametrize(
    "words",
    [
        "--memory.cpu_offload true",
        "--optim.name muon",
        "--optim.state 8bit",
        "--optim.ema 0.9",
        "--optim.name sgd --optim.momentum 0",
        "--memory.nvme optimizer --memory.nvme_dir /tmp/x",
    ],
)
def test_what_it_does_not_go_with(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory\.optimizer_offload true"):
        load([*OFFLOAD.split(), *words.split()])


def test_on_a_device_memory_is_pinned_and_the_host_waits_once_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for CUDA: copies over the bus are asynchronous only from pinned memory, and a save reads
    states as soon as the update has returned.
    """
    said: list[str] = []
    empty, copy_ = torch.empty, Tensor.copy_

    def allocated(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        said.extend(["pinned"] * pin_memory)
        return empty(*size, **more)

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        said.append("queued" if non_blocking else "waited for a copy")
        return copy_(self, source)

    stream = SimpleNamespace(synchronize=lambda: said.append("the host waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    model = nn.Linear(8, 8)
    store = HostStates(OptimSection(), torch.float32, torch.device("cuda", 0))
    optimizer = build_optimizer(OptimSection(), model)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, device=None, **more: empty_like(t, **more))
    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(Tensor, "copy_", copied)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    store.step(optimizer)
    assert said == ["pinned", "queued"] * 4 + ["the host waits"], "new states of two parameters"
    said.clear()
    store.step(optimizer)
    assert said == ["queued"] * 8 + ["the host waits"], "there and back"

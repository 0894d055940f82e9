"""Batches that are copied to a GPU beside computation. Streams are stand-ins that record their calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.data import loader
from fsdp.data.types import Batch, StepBatch

GPU = torch.device("cuda", 1)


class CopyStream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def record_event(self) -> str:
        self._said.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._said.append(f"{self.name} waits for {event}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened, in order."""
    found: list[str] = []
    inside: list[str] = []
    copying, computing = CopyStream("copying", found), CopyStream("computing", found)

    @contextlib.contextmanager
    def within(what: Any) -> Iterator[None]:
        inside.append(getattr(what, "name", str(what)))
        yield
        inside.pop()

    def to(self: Batch, device: torch.device) -> Batch:
        found.append(f"copies to {device} in {', '.join(inside)}")
        return self

    def used(tensor: Tensor, stream: CopyStream) -> None:
        found.append(f"{stream.name} uses {tensor.tolist()}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", used)
    loader._copy_stream.cache_clear()
    yield found
    loader._copy_stream.cache_clear()


def test_computation_waits_for_the_copy_and_its_memory_is_kept_until_it_is_used(said: list[str]) -> None:
    carrier = loader.DevicePrefetch(GPU)
    micro = [Batch({"x": torch.tensor([n])}, torch.tensor([True]), 1) for n in range(2)]
    mixed = Batch({"x": torch.tensor([2])}, torch.tensor([False]), 0, {}, torch.tensor([7]))
    sent = carrier.send(StepBatch([*micro, mixed], 3))
    assert said == [*["copies to cuda:1 in cuda:1, copying"] * 3, "copying records"]
    said.clear()
    received = carrier.receive(sent)
    assert (received.micro, received.samples) == ([*micro, mixed], 3)
    first, *used = said
    assert first == "computing waits for event of copying"
    assert used == [f"computing uses {one}" for one in ([0], [True], [1], [True], [2], [False], [7])]


def test_a_batch_is_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[bool] = []

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        queued.append(non_blocking)
        return self

    monkeypatch.setattr(Tensor, "to", to)
    batch = Batch({"inputs": torch.ones(2), "targets": torch.ones(2)}, torch.ones(2), 2, {}, torch.ones(2))
    batch.to(GPU)
    assert queued == [True] * 4, "data, mask and sources"

"""A save on CUDA: pinned memory, streams and events. Stand-ins for CUDA record the calls."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp.checkpoint import Checkpointer, save
from fsdp.checkpoint.save import Staging, write_file
from fsdp.checkpoint.state import Piece
from fsdp.config import CheckpointSection
from fsdp.distributed.mesh import MeshSizes
from fsdp.optim.optimizer import TrainState
from tests.support.env import env_of

GPU = torch.device("cuda", 0)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses that the stand-in has pinned; it refuses one that is pinned, as CUDA does."""
    held: set[int] = set()

    def register(address: int, size: int, flags: int) -> int:
        assert address not in held, "already registered"
        held.add(address)
        return 0

    def unregister(address: int) -> int:
        held.remove(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "Stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return held


def copied(staging: Staging, size: int) -> None:
    value: Any = torch.arange(size, dtype=torch.float32)
    staging.copy([Piece("a", ("a",), (size,), (0,), value)], None)


def test_a_larger_buffer_and_the_end_of_a_run_release_what_was_pinned(pinned: set[int]) -> None:
    """As in a notebook that trains twice: memory that is unmapped while pinned stays with CUDA."""
    for _ in range(3):
        staging = Staging(torch.device("cuda", 0))
        copied(staging, 10)
        first = set(pinned)
        copied(staging, 10)
        assert pinned == first
        copied(staging, 1 << 20)
        assert len(pinned) == 1
        del staging
        gc.collect()
        assert not pinned


class Stream:
    """A stand-in for a stream of CUDA, with what is done in order."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def record_event(self) -> Event:
        self._said.append(f"{self.name} records")
        return Event(self.name, self._said)

    def wait_event(self, event: Event) -> None:
        self._said.append(f"{self.name} waits for {event.of}")


class Event:
    def __init__(self, of: str, said: list[str]) -> None:
        self.of, self._said = of, said

    def synchronize(self) -> None:
        self._said.append(f"the host waits for {self.of}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, pinned: set[int]) -> list[str]:
    """What happens to streams and copies, in order. Copies are real."""
    found: list[str] = []
    copying, computing = Stream("copying", found), Stream("computing", found)
    copy_, inside = Tensor.copy_, list[str]()

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        inside.append(stream.name)
        yield
        inside.pop()

    def copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if inside:
            found.append(f"copies in {inside[-1]}{', and does not wait' if non_blocking else ''}")
        return copy_(self, source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Tensor, "copy_", copy)
    return found


COPIES = ["copying waits for computing", "copies in copying, and does not wait"]


def test_an_update_waits_on_the_device_and_the_file_on_the_host(
    said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The host queues the next update while the copy runs; bytes are read once it has ended."""

    def writes(*args: Any) -> Any:
        said.append("writes")
        return write_file(*args)

    monkeypatch.setattr(save, "write_file", writes)
    model = nn.Linear(3, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    env = replace(env_of(), device=GPU)
    checkpointer = Checkpointer(CheckpointSection(), tmp_path, env, MeshSizes("fsdp", 1, 1), config_hash="00")
    checkpointer.save(state, metrics={}, reason="a test")
    assert checkpointer.flight is not None
    checkpointer.flight.done.wait()
    first, second, *copies, recorded, waited, wrote = said
    assert [first, second, *set(copies)] == ["computing records", *COPIES]
    assert [recorded, waited, wrote] == ["copying records", "the host waits for copying", "writes"]
    said.clear()
    checkpointer.before_update()
    assert said == ["computing waits for copying"]
    checkpointer.close()
    assert checkpointer.sealed()
    del checkpointer
    gc.collect()  # its memory is unpinned here, by the stand-in

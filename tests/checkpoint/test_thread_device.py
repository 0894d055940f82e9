"""Threads that use tensors set their rank's GPU. A stand-in for torch.cuda records the calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.checkpoint import restore

GPU = torch.device("cuda", 1)


class Calls:
    """The calls of each thread, in order."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = {}

    def note(self, what: Any) -> None:
        self.of.setdefault(threading.current_thread().name, []).append(what)

    def noting(self, what: Any, then: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            self.note(what)
            return then(*args, **named)

        return noted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.note(torch.device(device)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    return found


def test_threads_that_read_a_checkpoint_set_their_device(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_read", calls.noting("read", lambda *_: None))
    on_gpu = SimpleNamespace(device=GPU, is_cuda=True)
    targets: Any = [SimpleNamespace(key=f"{nth}", local=on_gpu) for nth in range(20)]
    restore._read_all(SimpleNamespace(manifest=object()), targets)  # type: ignore[arg-type]
    assert calls.of
    for name, done in calls.of.items():
        assert done[0] == GPU, name
        assert done.count(GPU) == 1, name

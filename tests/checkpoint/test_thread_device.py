"""Threads that use tensors set their rank's GPU. A stand-in for torch.cuda records the calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.checkpoint import restore

ROOT = Path(__file__).parents[2]
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


WITHOUT_TENSORS = {
    "fsdp/rundir/lock.py": 1,
    "fsdp/watch/failure.py": 1, "fsdp/doctor/measure.py": 1,
    "fsdp/dist/stop.py": 1, "fsdp/watch/records.py": 1, "fsdp/record/sinks.py": 1,
    "fsdp/checkpoint/inspect.py": 1,
    "launch/ray_cluster.py": 3, "launch/ray_worker.py": 1,
}  # fmt: skip
"""Threads that read files, sockets and signals, and touch no tensor: how many a file starts."""
WITH_TENSORS = {
    "fsdp/base/devices.py": 1,
    "fsdp/checkpoint/restore.py": 1,
    "fsdp/data/loader.py": 1,
    "fsdp/doctor/__main__.py": 1,
    "fsdp/watch/rank.py": 2,  # the one that keeps the monitor has no tensor
}
ABORTS = {"fsdp/dist/process_group.py": 2}
"""One aborts process groups after an exception, with torch.cuda.set_device first. The other
names an address that is not reached: no tensors.
"""


def test_every_thread_that_touches_tensors_is_among_these() -> None:
    """A new thread calls fsdp.base.devices.set_thread_device first and has a test, or uses no tensor."""
    started = re.compile(r"\b(?:Thread|Timer|ThreadPoolExecutor)\(")
    found = {
        str(path.relative_to(ROOT)): count
        for place in ("fsdp", "launch")
        for path in sorted((ROOT / place).rglob("*.py"))
        if (count := len(started.findall(path.read_text(encoding="utf-8"))))
    }
    assert found == WITHOUT_TENSORS | WITH_TENSORS | ABORTS
    for file in WITH_TENSORS:
        assert "set_thread_device" in (ROOT / file).read_text(encoding="utf-8")

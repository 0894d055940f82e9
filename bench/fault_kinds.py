"""The faults that bench.faults injects: one function for each kind, called in the affected rank.

A fault is injected into a running step: where the loop enters a phase, reads data or writes a file. The rank
first writes the time into a file, then fails as it would by itself.
"""

from __future__ import annotations

import ctypes
import enum
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base.phases import Phases
from fsdp.checkpoint import store as checkpoint_store
from fsdp.data import loader
from fsdp.models.loss import LossFunction, LossParts
from fsdp.optim.gradients import Gradients

EVER_S = 3600.0


@dataclass(frozen=True)
class Where:
    """Which rank, from which step on, and the file that receives the time."""

    rank: int
    step: int
    heard: Path

    def now(self, again: bool = False) -> None:
        if again or not self.heard.exists():
            aside = self.heard.with_suffix(".aside")
            aside.write_text(repr(time.time()))
            aside.rename(self.heard)


def _at(where: Where, phase: str, act: Callable[[], object], mine: bool = True) -> None:
    """Call `act` as the training thread enters `phase` of the step."""
    enter = Phases.enter

    def entered(self: Phases, name: str, step: int | None = None) -> None:
        enter(self, name, step)
        if name == phase and self.step == where.step:
            if mine:
                where.now()
            act()

    Phases.enter = entered  # type: ignore[method-assign]


def in_forward(act: Callable[[], object]) -> Callable[[Where, bool], None]:
    def put(where: Where, mine: bool) -> None:
        if mine:
            _at(where, "forward", act)

    return put


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def spin() -> None:
    x = 0
    while True:
        x += 1


def lock_in_c() -> None:
    """A mutex taken twice, by a call that keeps Python's own lock."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def lock_in_python() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def bad_pointer() -> None:
    ctypes.string_at(0)


def raise_error() -> None:
    raise ValueError("a sample of a length that nobody expected")


def leave() -> None:
    sys.exit("pip install a-package-that-this-model-needs")


def slow_data(where: Where, mine: bool) -> None:
    read = loader.read_batch

    def reading(samples: Any, indices: Any, at: str) -> Any:
        if mine and at.endswith(f"step {where.step}"):
            where.now()
            time.sleep(EVER_S)
        return read(samples, indices, at)

    loader.read_batch = reading  # type: ignore[assignment]


def left_out(where: Where, mine: bool) -> None:
    """The reduction of the gradient norm, by one rank."""
    norm, counted = Gradients.norm, [0]

    def normed(self: Gradients) -> torch.Tensor:
        counted[0] += 1
        if mine and counted[0] == where.step:
            where.now()
            return torch.ones(())
        return norm(self)

    Gradients.norm = normed  # type: ignore[method-assign]


def other_shape(where: Where, mine: bool) -> None:
    def reduce() -> None:
        dist.all_reduce(torch.ones(50_000 if mine else 20_000))

    _at(where, "reduce", reduce, mine)


def other_call(where: Where, mine: bool) -> None:
    def call() -> None:
        if mine:
            dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))

    _at(where, "reduce", call, mine)


def not_a_number(where: Where, mine: bool) -> None:
    call, counted = LossFunction.__call__, [0]

    def called(self: LossFunction, *args: Any) -> LossParts:
        parts = call(self, *args)
        counted[0] += 1
        if mine and counted[0] == where.step:
            where.now()
            return LossParts(
                parts.loss_sum * float("nan"),
                *(getattr(parts, f) for f in list(parts.__dataclass_fields__)[1:]),
            )
        return parts

    LossFunction.__call__ = called  # type: ignore[method-assign, assignment]


class _Storage:
    """The os of fsdp/checkpoint/store.py, with one function replaced."""

    def __init__(self, **other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return self._other.get(name) or getattr(os, name)


def _saves(path: Path, step: int) -> bool:
    """Whether this is a rank's file of a save at `step` or after it."""
    found = re.match(r"step-(\d+)", path.parent.name)
    return path.suffix == ".distcp" and found is not None and int(found[1]) >= step


def slow_storage(where: Where, mine: bool) -> None:
    def fsync(descriptor: int) -> None:
        if _saves(Path(f"/proc/self/fd/{descriptor}").readlink(), where.step):
            where.now()
            time.sleep(EVER_S)
        os.fsync(descriptor)

    if mine:
        checkpoint_store.os = _Storage(fsync=fsync)  # type: ignore[assignment]


def full_disk(where: Where, mine: bool) -> None:
    """The kernel's own ENOSPC: its files are /dev/full."""

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        if _saves(Path(path), where.step):
            where.now()
            return os.open("/dev/full", os.O_WRONLY)
        return os.open(path, flags, mode)

    if mine:
        checkpoint_store.os = _Storage(open=opened)  # type: ignore[assignment]


def nothing(where: Where, mine: bool) -> None:
    """Does nothing: faults of a node are injected from outside the ranks."""


class NodeFault(enum.Enum):
    """What happens to the second of two nodes."""

    CABLE = enum.auto()
    """Its link is taken down."""
    ONE_WAY = enum.auto()
    """Its packets to the first node are lost; the first node's packets reach it."""
    KILLED = enum.auto()
    """All its processes are killed."""
    FLOODED = enum.auto()
    """From it the first node's monitor is flooded and that is killed, then the ranks of the second stop."""


@dataclass(frozen=True)
class Kind:
    name: str
    put: Callable[[Where, bool], None]
    verdict: str
    """What the watch calls it."""
    ends: bool = True
    """The ranks are ended at once; others may come back by themselves, and are waited for."""
    node: NodeFault | None = None

    @property
    def two_nodes(self) -> bool:
        return self.node is not None


KINDS = (
    Kind("SIGKILL", in_forward(kill), "died"),
    Kind("SIGSTOP", in_forward(stop), "stopped", ends=False),
    Kind("sleep in data", slow_data, "data", ends=False),
    Kind("endless loop", in_forward(spin), "loop", ends=False),
    Kind("lock held in C", in_forward(lock_in_c), "lock", ends=False),
    Kind("deadlock in Python", in_forward(lock_in_python), "blocked", ends=False),
    Kind("collective left out", left_out, "skipped"),
    Kind("another collective", other_call, "collective"),
    Kind("other shape", other_shape, "shapes"),
    Kind("exception", in_forward(raise_error), "exception"),
    Kind("sys.exit", in_forward(leave), "exception"),
    Kind("NaN", not_a_number, "nan"),
    Kind("slow storage", slow_storage, "storage", ends=False),
    Kind("full disk", full_disk, "full disk"),
    Kind("fault in C", in_forward(bad_pointer), "fault"),
    Kind("partitioned node", nothing, "partition", node=NodeFault.CABLE),
    Kind("packets lost one way", nothing, "partition", node=NodeFault.ONE_WAY),
    Kind("killed node", nothing, "died", node=NodeFault.KILLED),
    Kind("flooded monitor", nothing, "stopped", ends=False, node=NodeFault.FLOODED),
)

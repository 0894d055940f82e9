"""Status page: shared memory in which a rank writes what it is doing, for its node's monitor to read.

It holds numbers, each a double: the step and phase and since when, the collectives begun and ended, what its
threads are inside of, seconds by phase, and the work of the last 128 steps. After the numbers comes room for
the text of the rank's failure. The training thread writes with plain stores and never waits. A page can still
be read when its rank is stopped, dead or stuck in C code that holds Python's lock.

An aligned double is never read half written. Two of them may be of different moments, and readers allow for
that.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, Activity

clock = time.perf_counter
"""Linux's monotonic clock: the same in all processes of a host."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes faulthandler write a rank's stacks. The C library uses the first real-time signals only."""

PAGE, TEXT_AT = 1 << 18, 8192
LONGEST_TEXT, MOST_RANKS = 4096, 4096
"""Characters of one text of a failure, and ranks that it names: JSON needs twelve bytes for a character at
most, so that four texts have room.
"""

PID, THREAD, STATE, STEP, PHASE, SINCE, BEGUN, ENDED, OP, NUMEL = range(10)
WAITED, STEPS, TEXT, STEP_S, CUDA, MONITOR, PRINTED, ACTIVITY, SAVE_ACTIVITY = range(10, 19)
"""Indices of the numbers. MONITOR: the monitor's process id. PRINTED: 1 once the monitor has printed the
failure. ACTIVITY and SAVE_ACTIVITY: those of the training thread and of the thread that saves in the
background. TEXT: bytes of the text.
"""
TRAINING, OVER, FAILED, LEFT = 1, 2, 3, 4
"""STATE, which is 0 before the first step. LEFT: failed in a process that lives on."""
SPENT = 32
"""From here one number a phase: seconds in it so far, less those in collectives, which WAITED holds."""
RING, RING_STEPS = 128, 128
"""From here RING_STEPS rows of (step, own work in s), step n in row n modulo RING_STEPS."""

OPS = (
    "none", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "all_to_all_single", "barrier", "all_gather_object", "broadcast_object_list",
    "gather_object", "scatter_object_list", "send", "recv", "monitored_barrier",
)  # fmt: skip

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""A rank's own work in a step. What comes between two steps (a record, a save) does not count."""
AFTER_STEPS = ("evaluate", "save")
"""No part of the time that a step takes: after a long evaluation a hang would be seen hours later."""
ON_DEVICE = tuple(name in ("forward", "backward", "reduce", "optimizer") for name in PHASES)
"""Phases that on CUDA are the device's: the host only queues them."""


@dataclass(frozen=True)
class StatusPage:
    """The page, as a memory of doubles. Its file has a name until the rank or its monitor ends."""

    path: Path
    numbers: memoryview[float]
    page: mmap.mmap

    def close(self) -> None:
        self.numbers.release()
        self.page.close()

    def write_failure(self, failure: dict[str, Any]) -> None:
        """The length is stored last: a reader finds the whole text or none."""
        data = json.dumps({name: _shortened(value) for name, value in failure.items()}).encode()
        assert len(data) <= PAGE - TEXT_AT
        self.page[TEXT_AT : TEXT_AT + len(data)] = data
        self.numbers[TEXT] = len(data)

    def read_failure(self) -> dict[str, Any] | None:
        length = int(self.numbers[TEXT])
        failure: dict[str, Any] | None = json.loads(self.page[TEXT_AT : TEXT_AT + length]) if length else None
        return failure


def _shortened(value: Any) -> Any:
    """A text's beginning and end; a list's first numbers."""
    if isinstance(value, list):
        return value[:MOST_RANKS]
    if not isinstance(value, str) or len(value) <= LONGEST_TEXT:
        return value
    half = LONGEST_TEXT // 2
    return f"{value[:half]} … {value[-half:]}"


def folders() -> tuple[Path, Path]:
    """Where pages are made: in memory of this host, where a store waits for no disk, or without room there in
    the folder for temporary files.
    """
    return Path("/dev/shm"), Path(tempfile.gettempdir())


def create(name: str) -> StatusPage:
    """Raises OSError if no folder has room."""
    memory, files = folders()
    try:
        return _created(memory / name)
    except OSError:  # it is full, or is not there
        return _created(files / name)


def _created(path: Path) -> StatusPage:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # a store into a page that has no memory would end this process by SIGBUS
        os.posix_fallocate(descriptor, 0, PAGE)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return _mapped(path, descriptor)


def attach(path: Path) -> StatusPage:
    return _mapped(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))


def _mapped(path: Path, descriptor: int) -> StatusPage:
    """The map has a descriptor of its own, which is freed with it: an exception may keep the page."""
    page = mmap.mmap(descriptor, PAGE)
    os.close(descriptor)
    return StatusPage(path, memoryview(page)[:TEXT_AT].cast("d"), page)


def read(numbers: memoryview[float]) -> dict[str, Any]:
    """The fields of an Observation that the page holds."""
    n = numbers
    return {
        "over": n[STATE] == OVER,
        "step": int(n[STEP]),
        "phase": PHASES[int(n[PHASE])],
        "begun": int(n[BEGUN]),
        "ended": int(n[ENDED]),
        "op": OPS[int(n[OP])],
        "numel": int(n[NUMEL]),
        "cuda": bool(n[CUDA]),
        "activity": Activity(int(n[ACTIVITY])),
        "save_activity": Activity(int(n[SAVE_ACTIVITY])),
    }


def spent(numbers: memoryview[float]) -> dict[str, float]:
    """Seconds by phase since the start, and `waiting` in collectives."""
    return {name: numbers[SPENT + i] for i, name in enumerate(PHASES)} | {"waiting": numbers[WAITED]}


def ring(numbers: memoryview[float]) -> dict[int, float]:
    """The last steps: own work of each, in seconds."""
    flat = numbers[RING : RING + 2 * RING_STEPS].tolist()
    return {int(step): work for step, work in zip(flat[::2], flat[1::2], strict=True) if step}


class Writer:
    """Writes the training thread's numbers: a listener of fsdp/base/phases.py."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self.numbers = numbers
        self.waited = 0.0
        self._thread = threading.get_ident()
        self._phase, self._since, self._waited_at = 0, clock(), 0.0
        self._began, self._left, self._work, self._step_s = 0.0, 0.0, 0.0, 0.0
        self._index = {name: i for i, name in enumerate(PHASES)}
        self._in_step = [name in STEP_PHASES for name in PHASES]

    def phase(self, name: str, step: int) -> None:
        n, now, waited, last = self.numbers, clock(), self.waited, self._phase
        work = now - self._since - (waited - self._waited_at)
        if not (n[CUDA] and ON_DEVICE[last]):
            n[SPENT + last] += work
        if self._in_step[last]:
            self._work += work
        index = self._index[name]
        if name == "data":
            self._close_step(step - 1, now)
        elif name in AFTER_STEPS and not self._left:
            self._left = now
        n[STEP], n[PHASE], n[SINCE], n[WAITED] = step, index, now, waited
        self._phase, self._since, self._waited_at = index, now, waited

    def waited_on_device(self, seconds: float) -> None:
        """Of steps that are over: no wait of the host, whose phases keep their time."""
        self.waited += seconds
        self._waited_at += seconds
        self.numbers[WAITED] = self.waited

    def activity(self, activity: Activity) -> None:
        """A listener of fsdp/base/phases.py's activities, called on the thread whose activity it is."""
        self.numbers[ACTIVITY if threading.get_ident() == self._thread else SAVE_ACTIVITY] = activity

    def step_took(self, step: int, work: float) -> None:
        """One row of the ring; its step number is stored last."""
        n, row = self.numbers, RING + 2 * (step % RING_STEPS)
        n[row + 1] = work
        n[row] = step

    def _close_step(self, step: int, now: float) -> None:
        n = self.numbers
        if self._began:
            if not n[CUDA]:  # there the device's own clock measures it: DeviceClock
                self.step_took(step, self._work)
            n[STEPS] += 1
            # follows slow steps at once and forgets them slowly
            self._step_s = max((self._left or now) - self._began, 0.95 * self._step_s)
            n[STEP_S] = self._step_s
        n[STATE] = TRAINING
        self._began, self._left, self._work = now, 0.0, 0.0

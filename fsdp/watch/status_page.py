"""One rank's page: where it stands, since when, and what it spent its time on. Numbers only, each a double of
its own.

The training thread writes with plain stores and never waits; anyone who maps the file reads. A double that
lies on its own eight bytes is never seen half written; two of them may be of different moments, and readers
must bear that.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, Activity

clock = time.perf_counter
"""Linux's monotonic clock: the same in all processes of a host."""

PAGE = 16384
TEXT_AT = 8192
TEXT_MOST = PAGE - TEXT_AT - 8

STARTING, TRAINING, OVER, FAILED = range(4)

(
    PID,
    THREAD,
    STATE,
    STEP,
    PHASE,
    SINCE,
    BEGUN,
    ENDED,
    OP,
    NUMEL,
    WAITED,
    STEPS,
    TEXT,
    STEP_S,
    CUDA,
    MONITOR,
    SAID,
    DOES,
    BEHIND,
) = range(19)
"""DOES and BEHIND: the activities of the training thread and of the thread that saves behind it."""
SPENT = 32
"""From here one cell a phase: seconds in it so far, less the waiting in collectives, which is WAITED's."""
RING = 128
"""From here RING_STEPS times (step, own work in s, whole step in s), step n at n modulo RING_STEPS."""
RING_STEPS = 128

OPS = (
    "none", "all_reduce", "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send", "recv", "monitored_barrier",
)  # fmt: skip

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""Whose time is a rank's own work in a step: what comes between two steps (a record, a save) is not."""


@dataclass(frozen=True)
class Cells:
    """The page as a memory of doubles; the file has a name until the monitor has it open."""

    path: Path
    numbers: memoryview[float]
    page: mmap.mmap
    descriptor: int

    def close(self) -> None:
        self.numbers.release()
        self.page.close()
        os.close(self.descriptor)

    def tell(self, words: dict[str, Any]) -> None:
        """The rank's last words; their length is stored last, so that a reader finds all or nothing."""
        data = _fitting(words)
        self.page[TEXT_AT : TEXT_AT + len(data)] = data
        self.numbers[TEXT] = len(data)

    def told(self) -> dict[str, Any] | None:
        length = int(self.numbers[TEXT])
        if not length:
            return None
        words: dict[str, Any] = json.loads(self.page[TEXT_AT : TEXT_AT + length])
        return words


def _fitting(words: dict[str, Any]) -> bytes:
    data = json.dumps(words).encode()
    if len(data) > TEXT_MOST:  # a traceback's end says more than its beginning
        cut = {
            key: value[-TEXT_MOST // 12 :] if isinstance(value, str) else value
            for key, value in words.items()
        }
        data = json.dumps(cut).encode()
    return data


def folder() -> Path:
    """Memory of this host: a store there waits for no disk."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def create(name: str) -> Cells:
    path = folder() / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.truncate(descriptor, PAGE)
    return _mapped(path, descriptor)


def attach(path: Path) -> Cells:
    return _mapped(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))


def inherited(descriptor: int) -> Cells:
    """A page that this process was handed open: its name may be gone."""
    return _mapped(Path(f"/proc/self/fd/{descriptor}"), descriptor)


def _mapped(path: Path, descriptor: int) -> Cells:
    page = mmap.mmap(descriptor, PAGE)
    return Cells(path, memoryview(page)[:TEXT_AT].cast("d"), page, descriptor)


@dataclass(frozen=True)
class Beat:
    """A page as it was read: what a monitor keeps, sends to another and judges by."""

    pid: int
    thread: int
    state: int
    step: int
    phase: str
    since: float
    begun: int
    ended: int
    op: str
    numel: int
    steps: int
    step_s: float
    cuda: bool
    does: Activity
    behind: Activity

    @property
    def progress(self) -> tuple[float, ...]:
        """Differs whenever the rank has moved; `since` tells two batches of one evaluation apart."""
        return (self.state, self.step, self.since, self.begun, self.ended)


def read(numbers: memoryview[float]) -> Beat:
    n = numbers
    return Beat(
        pid=int(n[PID]),
        thread=int(n[THREAD]),
        state=int(n[STATE]),
        step=int(n[STEP]),
        phase=PHASES[int(n[PHASE])],
        since=n[SINCE],
        begun=int(n[BEGUN]),
        ended=int(n[ENDED]),
        op=OPS[int(n[OP])],
        numel=int(n[NUMEL]),
        steps=int(n[STEPS]),
        step_s=n[STEP_S],
        cuda=bool(n[CUDA]),
        does=Activity(int(n[DOES])),
        behind=Activity(int(n[BEHIND])),
    )


def spent(numbers: memoryview[float]) -> dict[str, float]:
    """Seconds by phase since the start, and `waiting` in collectives."""
    return {name: numbers[SPENT + i] for i, name in enumerate(PHASES)} | {"waiting": numbers[WAITED]}


def ring(numbers: memoryview[float]) -> dict[int, tuple[float, float]]:
    """The last steps: own work and whole time of each, in seconds."""
    flat = numbers[RING : RING + 3 * RING_STEPS].tolist()
    return {
        int(step): (work, whole)
        for step, work, whole in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        if step
    }


ON_DEVICE = tuple(name in ("forward", "backward", "reduce", "optimizer") for name in PHASES)
"""Phases that on CUDA are the device's: the host only queues them."""


class Writer:
    """The training thread's pen: a listener of fsdp/base/phases.py, and what calls.py tells."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self.numbers = numbers
        self.waited = 0.0
        self._thread = threading.get_ident()
        self._phase, self._since, self._waited_at = 0, clock(), 0.0
        self._began, self._work, self._step_s = 0.0, 0.0, 0.0
        self._index = {name: i for i, name in enumerate(PHASES)}
        self._in_step = [name in STEP_PHASES for name in PHASES]
        self._data = self._index["data"]

    def phase(self, name: str, step: int) -> None:
        n, now, waited, last = self.numbers, clock(), self.waited, self._phase
        work = now - self._since - (waited - self._waited_at)
        if not (n[CUDA] and ON_DEVICE[last]):
            n[SPENT + last] += work
        if self._in_step[last]:
            self._work += work
        index = self._index[name]
        if index == self._data:
            self._close_step(step - 1, now)
        n[STEP], n[PHASE], n[SINCE], n[WAITED] = step, index, now, waited
        self._phase, self._since, self._waited_at = index, now, waited

    def activity(self, activity: Activity) -> None:
        """A listener of fsdp/base/phases.py's activities, called on the thread whose activity it is."""
        self.numbers[DOES if threading.get_ident() == self._thread else BEHIND] = activity

    def step_took(self, step: int, work: float, whole: float) -> None:
        """One row of the ring; its number is stored last."""
        n, at = self.numbers, RING + 3 * (step % RING_STEPS)
        n[at + 1], n[at + 2] = work, whole
        n[at] = step

    def _close_step(self, step: int, now: float) -> None:
        n = self.numbers
        if self._began:
            if not n[CUDA]:  # there the device's own clock says it: fsdp/watch/cuda_timing.py
                self.step_took(step, self._work, now - self._began)
            n[STEPS] += 1
            # follows slow steps at once and forgets them slowly
            self._step_s = max(now - self._began, 0.95 * self._step_s)
            n[STEP_S] = self._step_s
        n[STATE] = TRAINING
        self._began, self._work = now, 0.0

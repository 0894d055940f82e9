"""Status page: shared memory in which a rank writes what it is doing, for its node's monitor to read.

It holds numbers, each a double: the step and phase and since when, the collectives begun and ended, what its
threads are inside of, seconds by phase, and the work of the last 128 steps. After the numbers comes room for
two texts: parameters left out of a reduction, and the rank's failure. The training thread writes with plain
stores and never waits. A page can still be read when its rank is stopped, dead or stuck in C code that holds
Python's lock.

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
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, Activity

clock = time.perf_counter
"""Linux's monotonic clock: the same in all processes of a host."""

STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes faulthandler write a rank's stacks. The C library uses the first real-time signals only."""

PAGE = 16384
TEXT_AT = 8192
TEXT_MOST = PAGE - TEXT_AT - 8
ENCODER = json.JSONEncoder(ensure_ascii=False)
CUT = " … "
"""Between the beginning and the end of a text that has no room."""

LEFT_OUT_AT, LEFT_OUT_MOST = 4096, 1024
"""Room for the text of the parameters that this rank leaves out of its reduction."""

TRAINING, OVER, FAILED, LEFT = 1, 2, 3, 4
"""STATE, which is 0 before the first step. LEFT: failed in a process that lives on."""

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
    PRINTED,
    ACTIVITY,
    SAVE_ACTIVITY,
    LEFT_OUT,
) = range(20)
"""Indices of the numbers. MONITOR: the monitor's process id. PRINTED: 1 once the monitor has printed the
failure. ACTIVITY and SAVE_ACTIVITY: those of the training thread and of the thread that saves in the
background. TEXT and LEFT_OUT: bytes of the two texts.
"""
SPENT = 32
"""From here one number a phase: seconds in it so far, less those in collectives, which WAITED holds."""
RING = 128
"""From here RING_STEPS rows of (step, own work in s), step n in row n modulo RING_STEPS."""
RING_STEPS = 128

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
        data = _fitting(failure)
        self.page[TEXT_AT : TEXT_AT + len(data)] = data
        self.numbers[TEXT] = len(data)

    def read_failure(self) -> dict[str, Any] | None:
        length = int(self.numbers[TEXT])
        if not length:
            return None
        failure: dict[str, Any] = json.loads(self.page[TEXT_AT : TEXT_AT + length])
        return failure

    def write_left_out(self, text: str) -> None:
        """The parameters that this rank leaves out of its reduction; empty if there are none."""
        data = text.encode(errors="backslashreplace")[:LEFT_OUT_MOST]
        self.numbers[LEFT_OUT] = 0
        self.page[LEFT_OUT_AT : LEFT_OUT_AT + len(data)] = data
        self.numbers[LEFT_OUT] = len(data)

    def read_left_out(self) -> str:
        length = int(self.numbers[LEFT_OUT])
        return self.page[LEFT_OUT_AT : LEFT_OUT_AT + length].decode(errors="replace")


def _fitting(failure: dict[str, Any]) -> bytes:
    """As JSON, with long texts and lists cut to a size at which all of it has room."""
    data, most = _encoded(failure), TEXT_MOST
    while len(data) > TEXT_MOST:
        most = most * 3 // 4
        data = _encoded({name: _cut(value, most) for name, value in failure.items()})
    return data


def _encoded(value: Any) -> bytes:
    # a file's name in a message may have half of a surrogate pair; json.loads reads it back
    return ENCODER.encode(value).encode("utf-8", "surrogatepass")


def _cut(value: Any, most: int) -> Any:
    """A text: its beginning and its end, in `most` bytes. A list: the first numbers, 8 bytes for each."""
    if isinstance(value, list):
        return value[: most // 8]
    if not isinstance(value, str) or len(_encoded(value)) <= most:
        return value
    half = (most - len(_encoded(CUT))) // 2
    return _beginning(value, half) + CUT + _beginning(value[::-1], half)[::-1]


def _beginning(text: str, most: int) -> str:
    """The characters that take `most` bytes in JSON: up to four each, and six for a control character."""
    sizes = accumulate(len(_encoded(one)) - len('""') for one in text[: max(0, most)])
    return text[: bisect_right(list(sizes), most)]


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


@dataclass(frozen=True)
class RankStatus:
    """The numbers of a page as they were read, without the times by phase and step."""

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
    activity: Activity
    save_activity: Activity

    @property
    def progress(self) -> tuple[float, ...]:
        """Differs whenever the rank has moved; `since` tells two batches of one evaluation apart."""
        return (self.state, self.step, self.since, self.begun, self.ended)


def read(numbers: memoryview[float]) -> RankStatus:
    n = numbers
    return RankStatus(
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
        activity=Activity(int(n[ACTIVITY])),
        save_activity=Activity(int(n[SAVE_ACTIVITY])),
    )


def spent(numbers: memoryview[float]) -> dict[str, float]:
    """Seconds by phase since the start, and `waiting` in collectives."""
    return {name: numbers[SPENT + i] for i, name in enumerate(PHASES)} | {"waiting": numbers[WAITED]}


def ring(numbers: memoryview[float]) -> dict[int, float]:
    """The last steps: own work of each, in seconds."""
    flat = numbers[RING : RING + 2 * RING_STEPS].tolist()
    return {int(step): work for step, work in zip(flat[::2], flat[1::2], strict=True) if step}


ON_DEVICE = tuple(name in ("forward", "backward", "reduce", "optimizer") for name in PHASES)
"""Phases that on CUDA are the device's: the host only queues them."""


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
        self._data = self._index["data"]
        self._after_steps = [self._index[name] for name in AFTER_STEPS]

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
        elif index in self._after_steps and not self._left:
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
        n, at = self.numbers, RING + 2 * (step % RING_STEPS)
        n[at + 1] = work
        n[at] = step

    def _close_step(self, step: int, now: float) -> None:
        n = self.numbers
        if self._began:
            if not n[CUDA]:  # there the device's own clock measures it: fsdp/watch/cuda_timing.py
                self.step_took(step, self._work)
            n[STEPS] += 1
            # follows slow steps at once and forgets them slowly
            self._step_s = max((self._left or now) - self._began, 0.95 * self._step_s)
            n[STEP_S] = self._step_s
        n[STATE] = TRAINING
        self._began, self._left, self._work = now, 0.0, 0.0

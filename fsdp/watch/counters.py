"""What a rank writes into its status page: phases, its collectives, and on CUDA the device's times of a step.

torch.distributed's functions are wrapped while a run lasts. FSDP2, our own reductions and users' code call
them as attributes of the module, so one place sees them; DDP's buckets are reduced in C++ and are not seen.
On CPU the time inside is the time that a rank waits for others; on CUDA it is that of the call. Collectives
of another thread pass through uncounted: a save's have an order of their own, and on CUDA those of a backward
run in autograd's thread. There the flight recorder knows them.

On CUDA the host only queues work, so its clock does not measure forward and backward. An event is recorded as
each phase begins, and around the places where FSDP2 makes the compute stream wait for an all-gather or for
the last reductions: communication that computation did not hide. Nothing waits for an event; it is read once
it has passed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp.base.phases import PHASES, Activity
from fsdp.base.torch_private.fsdp import Run, around_methods
from fsdp.watch.status_page import (
    ACTIVITY,
    BEGUN,
    CUDA,
    ENDED,
    NUMEL,
    OP,
    OPS,
    PHASE,
    RING,
    RING_STEPS,
    SAVE_ACTIVITY,
    SINCE,
    SPENT,
    STATE,
    STEP,
    STEP_S,
    STEPS,
    TRAINING,
    WAITED,
)

clock = time.perf_counter
"""Linux's monotonic clock: the same in all processes of a host."""
STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""A rank's own work in a step. What comes between two steps (a record, a save) does not count."""
AFTER_STEPS = ("evaluate", "save")
"""No part of the time that a step takes: after a long evaluation a hang would be seen hours later."""
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


class CollectiveCounter:
    """The wrappers are installed from the constructor to close()."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._thread = threading.get_ident()
        self._outermost = [True]  # a call that is made of others counts once
        self._count = [0]
        self._originals: dict[str, Any] = {}
        for number, name in enumerate(OPS):
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, self._counted(float(number), original))

    def _counted(self, number: float, original: Callable[..., Any]) -> Callable[..., Any]:
        # All names are local to the closure: this runs in every collective of every step.
        ident, training_thread, now = threading.get_ident, self._thread, clock
        writer, numbers, outermost, counter = self._writer, self._writer.numbers, self._outermost, self._count
        begun_at, ended_at, op_at, numel_at = BEGUN, ENDED, OP, NUMEL

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not outermost[0] or ident() != training_thread:
                return original(*args, **kwargs)
            outermost[0] = False
            counter[0] = count = counter[0] + 1
            numbers[op_at] = number
            numbers[numel_at] = _numel(args, kwargs)
            numbers[begun_at] = count
            began = now()
            try:
                return original(*args, **kwargs)
            finally:
                writer.waited += now() - began
                numbers[ended_at] = count
                outermost[0] = True

        return call

    def close(self) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the first argument or the first tensor given by name; 0 for objects, whose size may differ between
    ranks.
    """
    values = args[:1] or kwargs.values()
    return next((value.numel() for value in values if isinstance(value, torch.Tensor)), 0)


# ---------------------------------------------------------------- the device

MOST_OPEN = 64
"""Most steps whose events have not passed yet; the host does not run so far ahead."""
WAITS = ("wait_for_unshard", "finalize_backward")
DEVICE_PHASES = tuple(index for index, is_device in enumerate(ON_DEVICE) if is_device)


class Event(Protocol):
    def record(self) -> Any: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float: ...


Marks = list[tuple[int, Event]]
Waits = list[tuple[int, Event, Event]]


def cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """A listener of fsdp/base/phases.py, after the Writer whose page it completes."""

    def __init__(self, writer: Writer, new: Callable[[], Event] = cuda_event) -> None:
        self._writer, self._new = writer, new
        self._step = 0
        self._marks: Marks = []
        self._waits: Waits = []
        self._open: deque[tuple[int, Marks, Waits]] = deque()
        self._patches = contextlib.ExitStack()

    def phase(self, name: str, step: int) -> None:
        index = PHASES.index(name)
        if self._marks and self._marks[-1][0] == index and name != "data":
            return  # the next batch of an evaluation
        self._marks.append((index, self._now()))
        if name == "data":
            self._open.append((self._step, self._marks, self._waits))
            self._step, self._marks, self._waits = step, [self._marks[-1]], []
            self._settle()

    def _now(self) -> Event:
        event = self._new()
        event.record()
        return event

    def _settle(self) -> None:
        """Read the steps whose last event has passed."""
        while self._open and (len(self._open) > MOST_OPEN or self._open[0][1][-1][1].query()):
            step, marks, waits = self._open.popleft()
            if len(self._open) <= MOST_OPEN and step:
                self._add(step, marks, waits)

    def _add(self, step: int, marks: Marks, waits: Waits) -> None:
        """As on the CPU the time of a phase is without the waits in it. In the host's phases (an evaluation)
        the host waits for the device, too.
        """
        spans = [(index, began, ended, 1) for (index, began), (_, ended) in itertools.pairwise(marks)]
        work = dict.fromkeys(DEVICE_PHASES, 0.0)
        waiting = 0.0
        for index, began, ended, sign in (*spans, *((*wait, -1) for wait in waits)):
            if ON_DEVICE[index]:
                seconds = began.elapsed_time(ended) / 1e3
                work[index] += sign * seconds
                waiting += seconds * (sign < 0)
        for index, seconds in work.items():
            self._writer.numbers[SPENT + index] += seconds
        self._writer.waited_on_device(waiting)
        self._writer.step_took(step, sum(work.values()))

    def wrap(self, *groups: Any) -> DeviceClock:
        """Times where the class of FSDP's groups waits; a method that it lacks is not timed."""
        methods = [(name, self._timed) for name in WAITS]
        self._patches.enter_context(around_methods(methods, *groups, required=False))
        return self

    def _timed(self, group: Any, run: Run) -> Any:
        if not self._marks or not ON_DEVICE[self._marks[-1][0]]:
            return run()  # before the first step; in an evaluation, whose waits nobody reads
        index, began = self._marks[-1][0], self._now()
        try:
            return run()
        finally:
            self._waits.append((index, began, self._now()))

    def close(self) -> None:
        self._patches.close()

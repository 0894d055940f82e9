"""Times a step's phases on CUDA with events on the compute stream, which are read once they have passed.

Nothing waits for an event. The host only queues work, so its clock does not measure forward and backward. An
event is recorded as each phase begins, and around the places where FSDP2 makes the compute stream wait for an
all-gather or for the last reductions: communication that computation did not hide. The copy out of the
gathered buffer counts in it. The host's phases are in status_page.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fsdp.base.phases import PHASES
from fsdp.base.torch_private.fsdp import Run, around_methods
from fsdp.watch.status_page import ON_DEVICE, SPENT, Writer

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
        self._free: list[Event] = []
        self._step = 0
        self._marks: Marks = []
        self._waits: Waits = []
        self._open: deque[tuple[int, Marks, Waits]] = deque()
        self._index = {name: i for i, name in enumerate(PHASES)}
        self._patches = contextlib.ExitStack()

    def phase(self, name: str, step: int) -> None:
        index = self._index[name]
        if self._marks and self._marks[-1][0] == index and name != "data":
            return  # the next batch of an evaluation
        self._marks.append((index, self._now()))
        if name == "data":
            self._open.append((self._step, self._marks, self._waits))
            self._step, self._marks, self._waits = step, [self._marks[-1]], []
            self._settle()

    def _now(self) -> Event:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def _settle(self) -> None:
        """Read the steps whose last event has passed."""
        while self._open and (len(self._open) > MOST_OPEN or self._open[0][1][-1][1].query()):
            step, marks, waits = self._open.popleft()
            if len(self._open) <= MOST_OPEN and step:
                self._add(step, marks, waits)
            # the last mark is the next step's first
            self._free += [event for _, event in marks[:-1]] + [event for _, *two in waits for event in two]

    def _add(self, step: int, marks: Marks, waits: Waits) -> None:
        """As on the CPU the time of a phase is without the waits in it. In the host's phases (an evaluation)
        the host waits for the device, too.
        """
        spent = [0.0] * len(PHASES)
        for (index, began), (_, ended) in itertools.pairwise(marks):
            spent[index] += began.elapsed_time(ended) / 1e3
        waited = [0.0] * len(PHASES)
        for index, began, ended in waits:
            waited[index] += began.elapsed_time(ended) / 1e3
        for index in DEVICE_PHASES:
            self._writer.numbers[SPENT + index] += spent[index] - waited[index]
        waiting = sum(waited[index] for index in DEVICE_PHASES)
        self._writer.waited_on_device(waiting)
        work = sum(spent[index] for index in DEVICE_PHASES) - waiting
        self._writer.step_took(step, work)

    # ------------------------------------------------------------ where FSDP2 waits

    def wrap(self, *groups: Any) -> None:
        """Times where the class of FSDP's groups waits; a method that it lacks is not timed."""
        methods = [(name, self._timed) for name in WAITS]
        self._patches.enter_context(around_methods(methods, *groups, required=False))

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


def device_clock(writer: Writer) -> DeviceClock:
    clock = DeviceClock(writer)
    clock.wrap()
    return clock

"""Where a rank stands in its step: said by the loop, heard by whoever asked (heartbeats, memory by phase, timings, traces).

Nothing is measured here. A listener runs on the training thread, between two kernels: it must not wait for anything.
"""

from __future__ import annotations

from collections.abc import Callable

PHASES = ("start", "data", "forward", "backward", "reduce", "optimizer", "record", "evaluate", "save", "end")
"""In the order of a step; forward and backward come once a micro-batch. start ends with the first data."""

Listener = Callable[[str, int], None]
"""Called with the phase that begins and the step (from 1) that is being made."""


class Phases:
    def __init__(self) -> None:
        self.name, self.step = "start", 0
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)

    def enter(self, name: str, step: int | None = None) -> None:
        self.name = name
        if step is not None:
            self.step = step
        for listener in self._listeners:
            listener(name, self.step)

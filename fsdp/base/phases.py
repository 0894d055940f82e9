"""What a rank says of itself: the phase of its step, the activity of its threads, why it stops, how its run
ended.

Values, not phrases: a monitor, a launcher or a report decides by them. The loop announces phases and
functions announce activities; whoever asked receives them (heartbeats, memory by phase, timings, traces).
Nothing is measured here. A listener runs on the announcing thread, between two kernels: it must not wait for
anything. No torch: launchers read this first.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

PHASES = ("start", "data", "forward", "backward", "reduce", "optimizer", "record", "evaluate", "save", "end")
"""In the order of a step; forward and backward come once a micro-batch. start ends with the first data."""

Listener = Callable[[str, int], None]
"""Called with the phase that begins and the step (from 1) that is being made."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


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


# ---------------------------------------------------------------- activities


class Activity(enum.IntFlag):
    """What a thread is inside of. Of STORAGE and RANKS the innermost counts; SAVE stays beside it."""

    NONE = 0
    STORAGE = 1
    """Reads or writes checkpoints' storage."""
    RANKS = 2
    """Exchanges messages with other ranks."""
    SAVE = 4
    """Saves or restores a checkpoint, or waits for that."""


class Activities:
    """The activities of this process, each thread's its own. One listener: the watch of the run."""

    def __init__(self) -> None:
        self.listener: Callable[[Activity], None] | None = None
        self._inside = threading.local()

    def enter(self, activity: Activity) -> Activity:
        """Returns what to go back to."""
        before: Activity = getattr(self._inside, "now", Activity.NONE)
        self.back_to(before | activity if activity is Activity.SAVE else (before & Activity.SAVE) | activity)
        return before

    def back_to(self, activity: Activity) -> None:
        self._inside.now = activity
        if self.listener is not None:
            self.listener(activity)


ACTIVITIES = Activities()


def announces(activity: Activity) -> Callable[[F], F]:
    """Decorates a function: while it runs its thread is inside of `activity`. Costs 1 µs a call."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = ACTIVITIES.enter(activity)
            try:
                return function(*args, **kwargs)
            finally:
                ACTIVITIES.back_to(before)

        return call  # type: ignore[return-value]

    return decorate


def methods_announce(activity: Activity) -> Callable[[type[T]], type[T]]:
    """Decorates a class: all its own public methods announce `activity`."""

    def decorate(owner: type[T]) -> type[T]:
        for name, value in list(vars(owner).items()):
            if callable(value) and not name.startswith("_"):
                setattr(owner, name, announces(activity)(value))
        return owner

    return decorate


# ---------------------------------------------------------------- ends


class StopReason(enum.StrEnum):
    """Why a run stops before its last step; as text it stands in RUN/STOPPED and in the history."""

    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    SIGUSR1 = "SIGUSR1"
    SIGUSR2 = "SIGUSR2"
    STOP_FILE = "the stop file"
    DEADLINE = "the deadline"
    LAUNCHER = "the launcher"
    STOP_AFTER = "--train.stop_after"
    """With the step behind it."""

    @classmethod
    def read(cls, text: str | None) -> StopReason | None:
        """The reason that a run has written; None for text of an unknown one, and for no text."""
        return next(
            (one for one in cls if text is not None and (text == one or text.startswith(f"{one} "))), None
        )


class Ending(enum.StrEnum):
    """How a start ended, as the history says it."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

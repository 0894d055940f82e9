"""The phase of a step, the activity of a thread, the reason of a stop and the end of a run, as values.

Monitors, launchers and reports decide by these values. The loop announces phases and functions announce
activities to listeners (heartbeats, memory by phase, timings, traces). Nothing is measured here. A listener
runs on the announcing thread, between two kernels: it must not block. No torch: launchers import this first.

And the signals that stop a run: they are recorded, and the ranks agree on a step and save.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

PHASES = ("start", "data", "forward", "backward", "reduce", "optimizer", "record", "evaluate", "save", "end")
"""In the order of a step; forward and backward once per micro-batch. start ends with the first data."""

READER = "reader-"
"""Prefix of the threads that read data ahead: a rank that waits for its data waits for one of them."""

Listener = Callable[[str, int], None]
"""Called with the phase that begins and the current step (from 1)."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Phases:
    """The current phase and step of the loop, and their listeners."""

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
    """What a thread is doing. Of all but SAVE the innermost applies; SAVE is kept beside it."""

    NONE = 0
    STORAGE = 1
    """Reads or writes the storage of checkpoints, or writes records."""
    RANKS = 2
    """Exchanges messages with other ranks."""
    SAVE = 4
    """Saves or restores a checkpoint, or waits for that."""
    DATA = 8
    """Waits for a batch of an evaluation. That of a step has a phase of its own."""
    PROFILE = 16
    """Writes a profile: a trace of millions of events takes minutes."""


class Activities:
    """The activity of each thread of this process. One listener: the watch of the run."""

    def __init__(self) -> None:
        self.listener: Callable[[Activity], None] | None = None
        self._inside = threading.local()

    def enter(self, activity: Activity) -> Activity:
        """Set the activity; returns the previous one for `back_to`."""
        before: Activity = getattr(self._inside, "now", Activity.NONE)
        self.back_to(before | activity if activity is Activity.SAVE else (before & Activity.SAVE) | activity)
        return before

    def back_to(self, activity: Activity) -> None:
        self._inside.now = activity
        if self.listener is not None and not getattr(self._inside, "left_out", False):
            self.listener(activity)

    def leave_out_this_thread(self) -> None:
        """For a thread whose work no step and no save waits for."""
        self._inside.left_out = True


ACTIVITIES = Activities()


def announces(activity: Activity) -> Callable[[F], F]:
    """Decorate a function: while it runs, its thread has this activity. Costs 1 µs a call."""

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
    """Decorate a class: all its own public methods announce the activity."""

    def decorate(owner: type[T]) -> type[T]:
        for name, value in list(vars(owner).items()):
            if callable(value) and not name.startswith("_"):
                setattr(owner, name, announces(activity)(value))
        return owner

    return decorate


# ---------------------------------------------------------------- ends


class StopReason(enum.StrEnum):
    """Why a run stops before its last step; RUN/STOPPED and the history have it as text."""

    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    SIGUSR1 = "SIGUSR1"
    SIGUSR2 = "SIGUSR2"
    SIGHUP = "SIGHUP"
    STOP_FILE = "the stop file"
    DEADLINE = "the deadline"
    LAUNCHER = "the launcher"
    STOP_AFTER = "--train.stop_after"
    """Followed by the step."""

    @classmethod
    def read(cls, text: str | None) -> StopReason | None:
        """The reason in a text that a run has written; None for an unknown or missing text."""
        return next(
            (one for one in cls if text is not None and (text == one or text.startswith(f"{one} "))), None
        )


class Ending(enum.StrEnum):
    """How a start ended, as the history has it."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP: the terminal was closed. SIGCONT accompanies other signals and stops nothing."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that this process handles: without SIGHUP under nohup, whose run outlives its terminal."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(one for one in SIGNALS if not (outlives and one is signal.SIGHUP))


def follow_parent() -> None:
    """A rank whose launcher was killed gets SIGTERM, and so saves and ends.

    The kernel sends it when the thread that started this process ends: it is the main one of torchrun.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def follows_parent() -> bool:
    number = ctypes.c_int()
    _prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value == signal.SIGTERM


def _prctl(*words: object) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(*words)


@contextmanager
def delayed(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Signals that arrive meanwhile are handled at the end. A new process starts with all of them delayed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

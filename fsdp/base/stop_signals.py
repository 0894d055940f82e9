"""The signals that stop a run: they are recorded, and the ranks agree on a step and save."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

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

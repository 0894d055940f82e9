"""The signals that stop a run: they are recorded, and the ranks agree on a step and save."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP: the terminal was closed. SIGCONT accompanies other signals and stops nothing."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that this process handles: without SIGHUP under nohup, whose run outlives its terminal."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(one for one in SIGNALS if not (outlives and one is signal.SIGHUP))

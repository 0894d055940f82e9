"""When a sitting is over before its work is done: at a signal, or after a time."""

from __future__ import annotations

import signal
import threading


def over_at_a_signal(seconds: float) -> threading.Event:
    """Set at the first Ctrl-C or SIGTERM, and after so many seconds; 0 is no limit."""
    over = threading.Event()

    def end(number: int, _: object) -> None:
        over.set()
        signal.signal(number, signal.SIG_DFL)

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, end)
    if seconds:
        clock = threading.Timer(seconds, over.set)
        clock.daemon = True
        clock.start()
    return over

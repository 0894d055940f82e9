"""How a rank that has failed leaves: after the monitor has printed the failure, then its atexit handlers,
within a bound.

A launcher that sees a rank end ends the others, and the screen may be gone: so the rank waits for the monitor
first, for TELLS_S at most. The interpreter's own teardown comes after the atexit handlers and may wait for
ever: gloo's threads for a collective that the other ranks never enter, NCCL's for kernels that never end. The
process ends before it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from fsdp.watch.status_page import MONITOR, SAID, Cells

TELLS_S = 5.0
"""Longer than the monitor waits for a first failure that is not another's echo."""
LEAVE_S = 20.0
"""For non-daemon threads and atexit handlers after a failure; a wandb run takes some seconds to send its last
lines.
"""


class Farewell:
    """Built before anything registers an atexit handler: they are called last in, first out, and this one
    comes last.
    """

    def __init__(self) -> None:
        self._code = 0
        atexit.register(self._end)

    def leave(self, code: int) -> int:
        """The exit code. Where it tells a failure the process ends with it, LEAVE_S from now at the latest."""
        self._code = code
        if code:
            late = threading.Timer(LEAVE_S, self._end)
            late.daemon = True
            late.start()
        return code

    def _end(self) -> None:
        if self._code:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    stream.flush()
            os._exit(self._code)


def wait_until_told(own: Cells) -> bool:
    monitor = int(own.numbers[MONITOR])
    if monitor:
        wake(monitor)
    deadline = time.monotonic() + TELLS_S
    while not own.numbers[SAID] and time.monotonic() < deadline and _may_come(int(own.numbers[MONITOR])):
        time.sleep(0.02)
    return bool(own.numbers[SAID])


def wake(monitor: int) -> None:
    """One that somebody has stopped would print nothing, and outlive its run."""
    with contextlib.suppress(OSError):  # it has ended
        os.kill(monitor, signal.SIGCONT)


def _may_come(monitor: int) -> bool:
    """None yet: it may be on its way. A monitor that this very process has started is its child, and a zombie
    when it ends.
    """
    if not monitor:
        return True
    try:
        return Path(f"/proc/{monitor}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

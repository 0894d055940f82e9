"""How a rank's process ends: a failure is printed, atexit handlers run, within a time limit.

A launcher that sees a rank end also ends the others, and the terminal may be gone with them. So a rank that
failed first waits for the monitor to print, for PRINT_WAIT_S at most. The interpreter's own teardown comes
after the atexit handlers, and the process ends before it. After a failure it may hang: gloo's threads wait
for a collective that the other ranks never enter, NCCL's for kernels that never end. After success it may
abort: a thread of gloo holds the tensors of a finished collective until it runs again, and on a busy machine
that is in the teardown, where it cannot release them ("terminate called without an active exception", once in
13 runs of `torchrun -m fsdp.predict` on two cores at a load of 15).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time

from fsdp.base import proc
from fsdp.record.sender import any_stuck
from fsdp.watch.status_page import MONITOR, PRINTED, StatusPage

PRINT_WAIT_S = 5.0
"""Longer than the monitor waits after a first failure that is no consequence of another."""
EXIT_S = 20.0
"""For non-daemon threads and atexit handlers after a failure; a wandb run takes some seconds to send its last
lines.
"""


class ProcessExit:
    """Ends a process that leaves. Build it before anything registers an atexit handler.

    Handlers are called last in, first out, so this one comes after all others. In a tool, whose imports come
    first, those of the imported modules are left out: they stop helpers that the tool has not started.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def leave(self, code: int) -> int:
        """Returns the exit code, with which the process ends. After a failure, or where a server of records
        has not answered, it ends in EXIT_S at the latest.
        """
        self._code = code
        if code or any_stuck():
            limit = threading.Timer(EXIT_S, self._end)
            limit.daemon = True
            limit.start()
        return code

    def _end(self) -> None:
        if self._code is None:  # an exception that nobody caught: the interpreter has printed it
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        os._exit(self._code)


def wait_until_printed(own: StatusPage) -> bool:
    """Whether the monitor has printed this rank's failure, PRINT_WAIT_S from now at the latest."""
    monitor = int(own.numbers[MONITOR])
    if monitor:
        wake(monitor)
    deadline = time.monotonic() + PRINT_WAIT_S
    while not own.numbers[PRINTED] and time.monotonic() < deadline and _may_print(int(own.numbers[MONITOR])):
        time.sleep(0.02)
    return bool(own.numbers[PRINTED])


def wake(monitor: int) -> None:
    """Continue a monitor that was stopped (SIGSTOP): it would print nothing, and outlive its run."""
    with contextlib.suppress(OSError):  # it has ended
        os.kill(monitor, signal.SIGCONT)


def _may_print(monitor: int) -> bool:
    """True for a monitor that has not started yet (0). One that has ended may be a zombie."""
    return not monitor or proc.is_alive(monitor)

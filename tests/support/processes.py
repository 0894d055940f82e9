"""State of processes that are not children of the test: conditions to wait for, who runs where.

Linux only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.processes import pids
from fsdp.base import proc

T = TypeVar("T")


def eventually(what: str, condition: Callable[[], T], timeout_s: float, tell: Callable[[], str] = str) -> T:
    """Polls until condition() is true and returns its value; a failure names the condition and adds `tell`'s
    text.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{tell()}")
        # A condition that asks by a command (scontrol) takes a tenth of the time, not most of a processor.
        time.sleep(min(2.0, max(0.1, 10 * (now - asked))))


def dies_with_us() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL"]


def process_space(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return proc.pid_namespace(pid)
    return None


def program(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def command_line(pid: int) -> str:
    """Words with spaces between; empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def pids_with(*environ: str) -> list[int]:
    wanted, found = {text.encode() for text in environ}, []
    for pid in pids():
        # a process may end while it is looked at, or belong to somebody else
        with contextlib.suppress(OSError):
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(pid)
    return found

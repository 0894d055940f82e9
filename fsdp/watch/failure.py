"""A rank's failure: the report for the monitor, and how the process then ends.

The report is an exception as plain values: kind, message, ranks at fault, hint, traceback. It tells a failure
of this rank from a consequence of another rank's end (`secondary`). The monitor prints it; the error classes
are in fsdp/base/errors.py.

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
import errno
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from fsdp.base import proc
from fsdp.base.errors import OtherRankFailed, ShardrunError, error_number, exception_line, first_line
from fsdp.base.phases import SIGNALS
from fsdp.dist.env import DistEnv, is_peer_failure
from fsdp.record import STUCK
from fsdp.watch.status_page import MONITOR, PRINTED, StatusPage

TRACE_LINES, LINE_MOST = 30, 1000
MESSAGE_MOST, PRINTED_MOST, RANKS_MOST = 4000, 40_000, 4096
"""Characters of each text (an error may hold that of a whole sample), and ranks: a status page has room for
all, at four bytes a character.
"""
DISK = "free space in the folder above, or --checkpoint.dir elsewhere; the same command resumes"
KNOWN = (
    ("out of memory|[Cc]an(not|'t) allocate memory", "memory",
     "--train.micro_batch smaller, or --memory.activation_checkpointing full"),
    ("^MemoryError", "memory",
     "less on the host: fewer ranks a node, or smaller pieces in the line above (docs/oom.md)"),
    ("No space left on device|Disk quota exceeded", "full disk", DISK),
    ("Input/output error|Stale file handle|Transport endpoint is not connected", "exception",
     "the storage of this file does not answer as it should: dmesg and its server's log show why"),
    ("device-side assert", "exception",
     "CUDA_LAUNCH_BLOCKING=1 names the line; an index beyond a table is the usual cause"),
    ("No module named '", "exception", "pip install it on every node, or set PYTHONPATH"),
    ("ECC error|illegal memory access|Xid", "exception",
     "the device may be broken: nvidia-smi -q shows its errors; leave its node out"),
)  # fmt: skip
"""Text in an error of torch, CUDA or user code, which carries no value to decide by → kind and hint."""


def failure_report(error: BaseException, env: DistEnv) -> dict[str, Any]:
    """JSON values: they go through the status page, and to another node."""
    ours = isinstance(error, ShardrunError)
    secondary = isinstance(error, OtherRankFailed) or is_peer_failure(error)
    kind, hint = kind_and_hint(error, env)
    return {
        "time": time.time(),
        "kind": kind,
        "message": (str(error) if ours else exception_line(error))[:MESSAGE_MOST],
        "hint": hint,
        "ranks": list(getattr(error, "ranks", ()))[:RANKS_MOST] if ours else [],
        "secondary": secondary,
        "ours": ours,
        "print": printed(error, env)[:PRINTED_MOST],
    }


def kind_and_hint(error: BaseException, env: DistEnv) -> tuple[str, str]:
    """The hint is empty for an error that has its own."""
    if error_number(error) in (errno.ENOSPC, errno.EDQUOT):
        return "full disk", "" if getattr(error, "hint", None) else DISK
    if isinstance(error, ShardrunError):
        return error.verdict, ""
    text = f"{type(error).__name__}: {error}"
    for pattern, kind, hint in KNOWN:
        if re.search(pattern, text):
            return kind, hint
    return "exception", ""


def printed(error: BaseException, env: DistEnv, program: str = "train.py") -> str:
    """For people: one line for an error of ours, and the end of the traceback for any other."""
    if isinstance(error, ShardrunError):
        alone = env.is_main or error.scope == "all"
        return f"{program}{'' if alone else f' (rank {env.rank})'}: {error}"
    if is_peer_failure(error):
        return f"[rank {env.rank}] ended because another rank did: {first_line(error, 160)}"
    hint = kind_and_hint(error, env)[1]
    return f"[rank {env.rank}] failed on {env.device}:\n{_trace(error)}" + (f"\nHINT: {hint}" if hint else "")


def _trace(error: BaseException) -> str:
    lines = [line[:LINE_MOST] for line in "".join(traceback.format_exception(error)).rstrip().splitlines()]
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - TRACE_LINES} lines …", *lines[-half:]]
    return "\n".join(lines)


def write_torchrun_error_file(message: str, *, secondary: bool = False) -> None:
    """torchrun's own summary then ends with this message in place of `error_file: <N/A>`; the first stays."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if not file.parent.is_dir() or file.exists():
        return
    # Whole seconds, and of equal ones torchrun takes the lower rank's: a consequence is a second later.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + secondary)}
    with contextlib.suppress(OSError):  # the message itself is printed
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


# ---------------------------------------------------------------- the end of the process

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
        if code or STUCK.is_set():
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


def failure_was_printed(error: BaseException) -> bool:
    """Wait until the monitor has printed the first failure of all ranks; False if it does not.

    Call it last before the process ends. Signals are ignored from here on: a launcher that ends the other
    ranks does not interrupt the wait.
    """
    page: StatusPage | None = getattr(error, "status_page", None)
    if page is None:
        return False
    with contextlib.suppress(ValueError):  # not on the main thread, which alone has handlers
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    was_printed = wait_until_printed(page)
    page.close()
    return was_printed


def wait_until_printed(page: StatusPage) -> bool:
    """Whether the monitor has printed this rank's failure, PRINT_WAIT_S from now at the latest."""
    wake(int(page.numbers[MONITOR]))
    deadline = time.monotonic() + PRINT_WAIT_S
    while not page.numbers[PRINTED] and time.monotonic() < deadline:
        monitor = int(page.numbers[MONITOR])  # 0: it has not started yet
        if monitor and not proc.is_alive(monitor):
            break
        time.sleep(0.02)
    return bool(page.numbers[PRINTED])


def wake(monitor: int) -> None:
    """Continue a monitor that was stopped (SIGSTOP): it would print nothing, and outlive its run."""
    if monitor:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(monitor, signal.SIGCONT)

"""Failure report: an exception of a rank as plain values: kind, message, ranks at fault, hint, traceback.

It tells a failure of this rank from a consequence of another rank's end (`secondary`). The monitor prints it;
the error classes are in fsdp/base/errors.py.
"""

from __future__ import annotations

import errno
import re
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    NotFiniteError,
    OtherRankFailed,
    ShardrunError,
    TrainingError,
    error_number,
    exception_line,
    first_line,
)
from fsdp.dist.env import DistEnv
from fsdp.dist.launcher_hints import without_device
from fsdp.dist.lost_peer import is_peer_failure
from fsdp.memory.oom_error import OutOfMemory

TRACE_LINES = 30
LINE_MOST = 2000
"""Characters of one line: an error may hold the text of a whole sample."""

FULL = (errno.ENOSPC, errno.EDQUOT)
_MEMORY = "--train.micro_batch smaller, or --memory.activation_checkpointing full"
_DISK = "free space in the folder above, or --checkpoint.dir elsewhere; the same command resumes"
_HOST = "less on the host: fewer ranks a node, or smaller pieces in the line above (docs/oom.md)"
_SHM = "a larger /dev/shm (docker run --shm-size 8g), or num_workers=0 in the DataLoader of the line above"
_WORKER = "dmesg shows whether memory ended the worker; num_workers=0 in its DataLoader shows other causes"
_TASKS = (
    "ulimit -u and the cgroup's pids.max limit threads and processes: raise them, or fewer --data.workers"
)
_STORAGE = "the storage of this file does not answer as it should: dmesg and its server's log show why"


def _broken_device(env: DistEnv) -> str:
    return f"the device may be broken: {without_device(env, socket.gethostname())}"


KNOWN: tuple[tuple[str, str, str | Callable[[DistEnv], str]], ...] = (
    (r"out of memory|can't allocate memory|Cannot allocate memory", "memory", _MEMORY),
    (r"^MemoryError", "memory", _HOST),
    (r"No space left on device|Disk quota exceeded", "full disk", _DISK),
    (
        r"(insufficient|out of) shared memory|unable to (resize|mmap) .*/torch_",
        "exception",
        _SHM,
    ),
    (r"DataLoader worker .* (exited unexpectedly|is killed by signal)", "exception", _WORKER),
    (r"can't start new thread|Resource temporarily unavailable", "exception", _TASKS),
    (r"Input/output error|Stale file handle|Transport endpoint is not connected", "exception", _STORAGE),
    (r"Too many open files", "exception", "ulimit -n 65536 before the start, or fewer --data.workers"),
    (
        r"device-side assert",
        "exception",
        "CUDA_LAUNCH_BLOCKING=1 names the line; an index beyond a table is the usual cause",
    ),
    (r"No module named '", "exception", "pip install it on every node, or set PYTHONPATH"),
    (r"ECC error|illegal memory access|Xid", "exception", _broken_device),
    (r"unhandled (system|cuda) error", "exception", "NCCL_DEBUG=INFO names the call"),
)
"""Text in an error of torch, CUDA or user code, which carries no value to decide by → kind and hint. A
hint may depend on the launcher.
"""


def failure_report(error: BaseException, env: DistEnv) -> dict[str, Any]:
    """JSON values: they go through the status page, and to another node."""
    ours = isinstance(error, ShardrunError)
    secondary = isinstance(error, OtherRankFailed) or is_peer_failure(error)
    message = str(error) if ours else exception_line(error)
    kind, hint = kind_and_hint(error, env)
    return {
        "time": time.time(),
        "kind": kind,
        "message": message,
        "hint": hint,
        "ranks": list(error.ranks) if isinstance(error, ShardrunError) else [],
        "secondary": secondary,
        "ours": ours,
        "trace": "" if ours or secondary else _trace(error),
        "print": printed(error, env),
        "code": error.exit_code if isinstance(error, ShardrunError) else 1,
    }


KINDS = {
    NotFiniteError: "nan",
    OutOfMemory: "memory",
    ConfigError: "config",
    LaunchError: "launcher",
    CheckpointError: "checkpoint",
    TrainingError: "training",
}
"""Our own errors; the first class that fits."""


def kind_and_hint(error: BaseException, env: DistEnv) -> tuple[str, str]:
    """The hint is empty for an error that has its own."""
    if error_number(error) in FULL:
        return "full disk", "" if getattr(error, "hint", None) else _DISK
    if isinstance(error, ShardrunError):
        return next((kind for cls, kind in KINDS.items() if isinstance(error, cls)), "exception"), ""
    text = f"{type(error).__name__}: {error}"
    for pattern, kind, hint in KNOWN:
        if re.search(pattern, text):
            return kind, hint if isinstance(hint, str) else hint(env)
    return "exception", ""


def printed(error: BaseException, env: DistEnv) -> str:
    """For people: one line for an error of ours, and the end of the traceback for any other."""
    if isinstance(error, ShardrunError):
        alone = env.is_main or error.scope == "all"
        return f"train.py{'' if alone else f' (rank {env.rank})'}: {error}"
    if is_peer_failure(error):
        return f"[rank {env.rank}] ended because another rank did: {first_line(error, 160)}"
    hint = kind_and_hint(error, env)[1]
    return f"[rank {env.rank}] failed on {env.device}:\n{_trace(error)}" + (f"\nHINT: {hint}" if hint else "")


def _trace(error: BaseException) -> str:
    whole = "".join(traceback.format_exception(error)).rstrip().splitlines()
    lines = [one if len(one) <= LINE_MOST else f"{one[:LINE_MOST]} …" for one in whole]
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - TRACE_LINES} lines …", *lines[-half:]]
    return "\n".join(lines)

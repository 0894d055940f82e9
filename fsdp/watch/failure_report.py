"""Failure report: an exception of a rank as plain values: kind, message, ranks at fault, hint, traceback.

It tells a failure of this rank from a consequence of another rank's end (`secondary`). The monitor prints it;
the error classes are in fsdp/base/errors.py.
"""

from __future__ import annotations

import errno
import re
import time
import traceback
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
    first_line,
)
from fsdp.dist.env import DistEnv
from fsdp.dist.lost_peer import is_peer_failure
from fsdp.memory.oom import OutOfMemory

TRACE_LINES = 30

FULL = (errno.ENOSPC, errno.EDQUOT)
_MEMORY = "--train.micro_batch smaller, or --memory.activation_checkpointing full"
_DISK = "free space in the folder above, or --checkpoint.dir elsewhere; the same command resumes"
_DEVICE = "the device may be broken: leave its node out (sbatch --exclude)"
KNOWN = (
    (r"out of memory|can't allocate memory|Cannot allocate memory", "memory", _MEMORY),
    (r"No space left on device|Disk quota exceeded", "full disk", _DISK),
    (r"Too many open files", "exception", "ulimit -n 65536 before the start, or fewer --data.workers"),
    (
        r"device-side assert",
        "exception",
        "CUDA_LAUNCH_BLOCKING=1 names the line; an index beyond a table is the usual cause",
    ),
    (r"No module named '", "exception", "pip install it on every node, or set PYTHONPATH"),
    (r"ECC error|illegal memory access|Xid", "exception", _DEVICE),
    (r"unhandled (system|cuda) error", "exception", "NCCL_DEBUG=INFO names the call"),
)
"""Text in an error of torch, CUDA or user code, which carries no value to decide by → kind and hint."""


def failure_report(error: BaseException, env: DistEnv) -> dict[str, Any]:
    """JSON values: they go through the status page, and to another node."""
    ours = isinstance(error, ShardrunError)
    secondary = isinstance(error, OtherRankFailed) or is_peer_failure(error)
    message = str(error) if ours else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    kind, hint = kind_and_hint(error)
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


def kind_and_hint(error: BaseException) -> tuple[str, str]:
    """The hint is empty for an error that has its own."""
    if error_number(error) in FULL:
        return "full disk", "" if getattr(error, "hint", None) else _DISK
    if isinstance(error, ShardrunError):
        return next((kind for cls, kind in KINDS.items() if isinstance(error, cls)), "exception"), ""
    text = f"{type(error).__name__}: {error}"
    for pattern, kind, hint in KNOWN:
        if re.search(pattern, text):
            return kind, hint
    return "exception", ""


def printed(error: BaseException, env: DistEnv) -> str:
    """For people: one line for an error of ours, and the end of the traceback for any other."""
    if isinstance(error, ShardrunError):
        alone = env.is_main or error.scope == "all"
        return f"train.py{'' if alone else f' (rank {env.rank})'}: {error}"
    if is_peer_failure(error):
        return f"[rank {env.rank}] ended because another rank did: {first_line(error, 160)}"
    hint = kind_and_hint(error)[1]
    return f"[rank {env.rank}] failed on {env.device}:\n{_trace(error)}" + (f"\nHINT: {hint}" if hint else "")


def _trace(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - TRACE_LINES} lines …", *lines[-half:]]
    return "\n".join(lines)

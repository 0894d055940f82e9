"""A rank's last words, and whose they are: what failed first here, or the echo of somebody else's end.

Not here: who prints them (monitor.py, the last to leave) and the errors themselves (fsdp/base/errors.py).
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
    Elsewhere,
    LaunchError,
    NotFiniteError,
    ShardrunError,
    TrainingError,
)
from fsdp.dist.env import DistEnv
from fsdp.dist.lost_peer import is_peer_failure
from fsdp.memory.oom import OutOfMemory

TRACE_LINES = 30

_MEMORY = "--train.micro_batch smaller, or --memory.activation_checkpointing full"
_DISK = "free space where it names, or --checkpoint.dir elsewhere; the same command goes on"
_DEVICE = "the device may be broken: leave its node out (sbatch --exclude)"
KNOWN = (
    (r"out of memory|can't allocate memory|Cannot allocate memory", "memory", _MEMORY),
    (r"ENOSPC|No space left on device|EDQUOT|Disk quota exceeded", "full disk", _DISK),
    (r"Too many open files", "exception", "ulimit -n 65536 before the start, or fewer --data.workers"),
    (
        r"device-side assert",
        "exception",
        "CUDA_LAUNCH_BLOCKING=1 names the line; an index beyond a table is the usual cause",
    ),
    (r"No module named '", "exception", "pip install it on every node, or set PYTHONPATH"),
    (r"ECC error|illegal memory access|Xid", "exception", _DEVICE),
    (r"unhandled (system|cuda) error", "exception", "NCCL_DEBUG=INFO says which call"),
)
"""What a stranger's error says → its kind and what to do about it."""


def last_words(error: BaseException, env: DistEnv) -> dict[str, Any]:
    """Plain values: they go through the cells, and to another node."""
    ours = isinstance(error, ShardrunError)
    secondary = isinstance(error, Elsewhere) or is_peer_failure(error)
    message = str(error) if ours else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    kind, hint = kind_and_hint(error)
    return {
        "time": time.time(),
        "kind": kind,
        "message": message,
        "hint": hint,
        "ranks": list(getattr(error, "ranks", ())) or _named(message),
        "secondary": secondary,
        "ours": ours,
        "trace": "" if ours or secondary else _trace(error),
        "print": printed(error, env),
        "code": error.exit_code if isinstance(error, ShardrunError) else 1,
    }


def _named(message: str) -> list[int]:
    """Who a checkpoint's error is about stands in it: `rank 2: …/__2_0.distcp: ENOSPC`."""
    return sorted({int(rank) for rank in re.findall(r"\brank (\d+):", message)})


def kind_and_hint(error: BaseException) -> tuple[str, str]:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, NotFiniteError):
        return "nan", ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full disk", _DISK
    for pattern, kind, hint in KNOWN:
        if re.search(pattern, text):
            return kind, "" if "HINT:" in text else hint
    kinds = {
        OutOfMemory: "memory",
        ConfigError: "config",
        LaunchError: "launcher",
        CheckpointError: "checkpoint",
        TrainingError: "training",
    }
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), "exception"), ""


def printed(error: BaseException, env: DistEnv) -> str:
    """As a person reads it: one line of an error of ours; of a stranger's the end of its traceback as well."""
    if isinstance(error, ShardrunError):
        alone = env.is_main or error.scope == "all"
        return f"train.py{'' if alone else f' (rank {env.rank})'}: {error}"
    if is_peer_failure(error):
        return f"[rank {env.rank}] ended because another rank did: {str(error).splitlines()[0][:160]}"
    hint = kind_and_hint(error)[1]
    return f"[rank {env.rank}] failed on {env.device}:\n{_trace(error)}" + (f"\nHINT: {hint}" if hint else "")


def _trace(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if len(lines) > TRACE_LINES:
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  … {len(lines) - TRACE_LINES} lines …", *lines[-half:]]
    return "\n".join(lines)

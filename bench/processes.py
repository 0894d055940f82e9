"""What the kernel counts of a process, beyond fsdp/base/proc.py: for measurements."""

from __future__ import annotations

import socket

from fsdp.base.proc import PROC, children

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Reserved until this process ends: bound without listening, so that the ranks' store can bind it too
    (both set SO_REUSEADDR), while a process that requests any free port gets another.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    _RESERVED.append(keeper)
    return int(keeper.getsockname()[1])


def reset_peak_memory() -> None:
    """VmHWM of this process starts again from its VmRSS."""
    (PROC / "self" / "clear_refs").write_text("5")


def bytes_read() -> int:
    """Bytes that this process has read so far, from caches too."""
    return int((PROC / "self" / "io").read_text().split()[1])


def processor_name() -> str:
    """The model name of the first processor."""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def pids() -> list[int]:
    """Of all processes that can be seen."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def descendants(pid: int) -> set[int]:
    direct = children(pid)
    return set(direct).union(*(descendants(one) for one in direct))

"""What the kernel counts of a process, beyond fsdp/base/proc.py: for measurements."""

from __future__ import annotations

from fsdp.base.proc import PROC, children, kib_lines, stat


def pss_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages divided by the number of processes that map them."""
    return kib_lines(PROC / str(pid) / "smaps_rollup").get("Pss", 0)


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


def parents() -> dict[int, int]:
    """Process id → its parent's, of all processes that can be seen."""
    found = {pid: stat(pid) for pid in pids()}
    return {pid: one.parent for pid, one in found.items() if one is not None}


def descendants(pid: int) -> set[int]:
    direct = children(pid)
    return set(direct).union(*(descendants(one) for one in direct))

"""The memory cgroup of a process: its limit, and how many processes the kernel has killed for lack of memory.

A limit may be set at any level above the process's own (Slurm sets the job's), and a container sees its own
tree alone, although its path may be the host's: levels that are not here are left out. Both versions of
cgroups. Standard library: the monitor process reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fsdp.base import proc

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes its largest number of pages where nothing is limited, version 2 `max`."""


@dataclass(frozen=True)
class MemoryGroup:
    """`levels`: folders of the hierarchy, the process's own first."""

    levels: tuple[Path, ...]

    def limit(self, *, reached: bool = False) -> int | None:
        """Bytes of the smallest limit at any level; with `reached`, of those that memory has come up to."""
        limits = [
            int(text)
            for level in self.levels
            for name in ("memory.max", "memory.limit_in_bytes")
            if (text := _read(level / name).strip()).isdigit() and (not reached or _was_reached(level))
        ]
        return min((limit for limit in limits if limit < NO_LIMIT), default=None)

    def oom_kills(self) -> int:
        """Killed processes of the innermost level that counts them; without one, of the whole node."""
        files = (level / name for level in self.levels for name in ("memory.events", "memory.oom_control"))
        counts = (_count(file, "oom_kill") for file in (*files, proc.PROC / "vmstat"))
        return next((count for count in counts if count is not None), 0)


def memory_group(pid: int | str = "self") -> MemoryGroup:
    """Without levels where the system shows none."""
    lines = [line.split(":", 2) for line in _read(proc.PROC / str(pid) / "cgroup").splitlines()]
    version_1 = [line[2] for line in lines if len(line) == 3 and "memory" in line[1].split(",")]
    version_2 = [line[2] for line in lines if len(line) == 3 and line[:2] == ["0", ""]]
    root, path = (ROOT / "memory", version_1[0]) if version_1 else (ROOT, version_2[0] if version_2 else "")
    own = root / path.lstrip("/")
    levels = [own, *own.parents] if path else []
    return MemoryGroup(tuple(level for level in levels if level.is_relative_to(root) and _is_there(level)))


def _is_there(level: Path) -> bool:
    return os.path.isdir(level)  # noqa: PTH112  Path.is_dir raises where it may not look


def _was_reached(level: Path) -> bool:
    """Whether the kernel has refused memory beyond this level's limit, and not only the node's."""
    refused = _read(level / "memory.failcnt").strip()
    return bool(_count(level / "memory.events", "oom")) or refused not in ("", "0")


def _count(file: Path, name: str) -> int | None:
    rows = (line.split() for line in _read(file).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name] and len(row) == 2), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

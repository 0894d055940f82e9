"""The memory cgroup of a process: its limit, and how many processes the kernel has killed for lack of memory.

A limit may be set at any level above the process's own (Slurm sets the job's), and a container sees its own
tree alone, although its path may be the host's: levels that are not here are left out. Both versions of
cgroups. Standard library: the monitor process reads it.
"""

from __future__ import annotations

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

    def limit(self) -> int | None:
        """Bytes of the smallest limit at any level."""
        names = ("memory.max", "memory.limit_in_bytes")
        texts = (_read(level / name).strip() for level in self.levels for name in names)
        limits = [int(text) for text in texts if text.isdigit()]
        return min((limit for limit in limits if limit < NO_LIMIT), default=None)

    def oom_kills(self) -> int:
        """Killed processes of the innermost level that counts them; without one, of the whole node."""
        counted = (
            _read(level / name) for level in self.levels for name in ("memory.events", "memory.oom_control")
        )
        for text in (*counted, _read(proc.PROC / "vmstat")):
            rows = (line.split() for line in text.splitlines())
            if found := [int(row[1]) for row in rows if row[:1] == ["oom_kill"] and len(row) == 2]:
                return found[0]
        return 0


def memory_group(pid: int | str = "self") -> MemoryGroup:
    """Without levels where the system shows none."""
    lines = [line.split(":", 2) for line in _read(proc.PROC / str(pid) / "cgroup").splitlines()]
    version_1 = [line[2] for line in lines if len(line) == 3 and "memory" in line[1].split(",")]
    version_2 = [line[2] for line in lines if len(line) == 3 and line[:2] == ["0", ""]]
    root, path = (ROOT / "memory", version_1[0]) if version_1 else (ROOT, version_2[0] if version_2 else "")
    own = root / path.lstrip("/")
    levels = [own, *own.parents] if path else []
    return MemoryGroup(tuple(level for level in levels if level.is_relative_to(root) and level.is_dir()))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

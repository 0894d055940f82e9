"""What grows while a soak's run is restarted again and again: memory and descriptors of its processes, the
files of its directory.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp.base import proc

WITH_STEPS = ("metrics.jsonl", "saves.jsonl", "tensorboard", "checkpoints")
"""What grows with the steps, or is bounded by --checkpoint.keep_last. A start adds a file in tensorboard."""


@dataclass(frozen=True)
class Sample:
    """A process, or the run directory, where `mib` and `count` are its size and number of files."""

    role: str
    who: str
    """Process id and start time: one process."""
    starts: int
    step: int
    mib: float
    count: int


@dataclass(frozen=True)
class Growth:
    """Of one role, the most that one of its processes grew after its first sample."""

    role: str
    mib: float
    count: int
    starts: int
    steps: int
    """Between those samples."""

    def __str__(self) -> str:
        what = "files" if self.role == RUN else "descriptors"
        over = f"{self.starts} restarts, {self.steps:,} steps"
        return f"{self.role}: {self.mib:+.2f} MiB, {self.count:+d} {what} over {over}"


RUN = "run directory"
BOUNDS = {RUN: (1.0, 5.0), "launcher": (0.5, 0.5), "rank": (0.0, 0.0), "monitor": (0.0, 0.0)}
"""MiB and descriptors or files that each restart may add: the evidence of a verdict is a folder, with up to
0.8 MiB for the calls of a rank.
"""
ALLOWED = {RUN: (0.5, 20), "launcher": (16.0, 8), "rank": (64.0, 16), "monitor": (8.0, 8)}
"""MiB and descriptors or files that may be added once."""


def of_process(role: str, pid: int, starts: int, step: int) -> Sample | None:
    """None for a process that has ended."""
    stat, memory = proc.stat(pid), proc.memory_bytes(pid)
    try:
        count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    if stat is None or "VmRSS" not in memory:
        return None
    return Sample(role, f"{pid}-{stat.start_ticks}", starts, step, memory["VmRSS"] / 2**20, count)


def of_run(run_dir: Path, starts: int, step: int) -> Sample:
    sizes = [
        file.lstat().st_size
        for place, _, names in os.walk(run_dir)
        if not place.startswith(tuple(str(run_dir / name) for name in WITH_STEPS))
        for name in names
        if name not in WITH_STEPS and (file := Path(place, name)).exists()
    ]
    return Sample(RUN, "run", starts, step, sum(sizes) / 2**20, len(sizes))


def append(file: Path, samples: Iterable[Sample | None]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(asdict(one)) + "\n" for one in samples if one is not None)


def read(file: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def grown(samples: Sequence[Sample]) -> list[Growth]:
    """By role. The first sample of a process is taken some time after its start: see Soak."""
    by_who: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        by_who[one.role, one.who].append(one)
    worst: dict[str, Growth] = {}
    for (role, _), ours in by_who.items():
        first, last = ours[0], ours[-1]
        if first is last:
            continue
        found = Growth(
            role,
            last.mib - first.mib,
            last.count - first.count,
            last.starts - first.starts,
            last.step - first.step,
        )
        if role not in worst or _excess(found) > _excess(worst[role]):
            worst[role] = found
    return list(worst.values())


def _excess(one: Growth) -> float:
    """Above 1 if it is more than allowed."""
    (mib_a_start, count_a_start), (mib, count) = BOUNDS[one.role], ALLOWED[one.role]
    return max(one.mib / (mib + mib_a_start * one.starts), one.count / (count + count_a_start * one.starts))


def too_much(found: Iterable[Growth]) -> list[str]:
    return [f"it grows: {one}" for one in found if _excess(one) > 1]

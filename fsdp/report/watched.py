"""What the watch left in RUN/watch (fsdp/watch/files.py says in which form): times by rank, late ranks, verdicts, spikes.

Here it is read; faults.py beside it and timing.py show it. A line that is cut off or of another form is left out.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.phases import PHASES
from fsdp.report.series import Series, in_order
from fsdp.rundir import read_lines

WAITING = "waiting"
"""In collectives, for others: what no computing hides."""
STEP_PHASES = ("forward", "backward", "optimizer", "data", "reduce")
SHOWN = ("forward", "backward", WAITING, "optimizer", "data", "reduce", "record", "evaluate", "save")
assert set(SHOWN) - {WAITING} < set(PHASES)
FEW_LINES = 8
"""Read together: with thousands of ranks one line is a megabyte."""
MOST_STACKS = 4
STACK = 6000
SHORT = 100
"""Such a file holds no stack, but why there is none."""


@dataclass(frozen=True)
class Timing:
    """Mean seconds a step: by rank over all its steps, and of all ranks over the steps."""

    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    course: Mapping[str, Series] = field(default_factory=dict)

    def mean(self, phase: str) -> float | None:
        return sum(one.get(phase, 0.0) for one in self.ranks.values()) / len(self.ranks) if self.ranks else None


@dataclass(frozen=True)
class Verdict:
    """What stopped the run, or would have, and what it rests on."""

    time: float
    kind: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    step: int
    what: str
    others: str
    hint: str
    folder: str
    ended: bool
    """Whether the watch ended the job over it."""
    stacks: str = ""


@dataclass(frozen=True)
class Late:
    rank: int
    node: str
    percent: float
    since_step: int
    over: str


@dataclass(frozen=True)
class Spike:
    step: int
    grad_norm: float
    usual: float
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Watched:
    timing: Timing = field(default_factory=Timing)
    verdicts: tuple[Verdict, ...] = ()
    late: tuple[Late, ...] = ()
    spikes: tuple[Spike, ...] = ()


def read_watched(run: Path) -> Watched:
    folder = run / "watch"
    return Watched(
        _timing(folder / "timing.jsonl"), tuple(_verdicts(folder)), tuple(_late(folder / "late.jsonl")),
        tuple(_spikes(folder / "spikes.jsonl")),
    )  # fmt: skip


def _records(path: Path, *needed: str) -> Iterator[Mapping[str, Any]]:
    for record in read_lines(path, FEW_LINES):
        if record is not None and all(name in record for name in needed):
            yield record


# ---------------------------------------------------------------- times


def _timing(path: Path) -> Timing:
    """Summed up line by line: with thousands of ranks a line alone is large."""
    sums: dict[int, dict[str, float]] = {}
    counts: dict[int, float] = {}
    steps: dict[str, array[float]] = {}
    means: dict[str, array[float]] = {}
    for record in _records(path, "ranks", "from_step", "step"):
        try:
            count = record["step"] - record["from_step"]
            ranks = {int(rank): [float(times.get(name, 0.0)) for name in SHOWN] for rank, times in record["ranks"].items()}
        except (TypeError, ValueError, AttributeError):
            continue
        if count <= 0 or not ranks:
            continue
        for rank, times in ranks.items():
            into = sums.setdefault(rank, dict.fromkeys(SHOWN, 0.0))
            counts[rank] = counts.get(rank, 0.0) + count
            for name, value in zip(SHOWN, times, strict=True):
                into[name] += value * count
        for name, values in zip(SHOWN, zip(*ranks.values(), strict=True), strict=True):
            steps.setdefault(name, array("d")).append(record["step"])
            means.setdefault(name, array("d")).append(sum(values) / len(values))
    by_rank = {rank: {name: value / counts[rank] for name, value in sums[rank].items()} for rank in sorted(sums)}
    return Timing(by_rank, {name: in_order(np.array(steps[name]), np.array(means[name])) for name in steps})


# ---------------------------------------------------------------- what went wrong


def _verdicts(folder: Path) -> Iterator[Verdict]:
    found: list[dict[str, Any]] = []
    for record in _records(folder / "verdicts.jsonl", "kind"):
        if record["kind"] == "ended":
            if found:
                found[-1]["ended"] = True
        else:
            found.append(dict(record))
    for nth, record in enumerate(found):
        try:
            verdict = _verdict(record)
        except (TypeError, ValueError):
            continue  # of another form
        late = nth >= len(found) - MOST_STACKS and verdict.folder
        yield replace(verdict, stacks=_stacks(folder / verdict.folder, verdict.ranks)) if late else verdict


def _verdict(record: Mapping[str, Any]) -> Verdict:
    def words(name: str) -> str:
        return str(record.get(name) or "")

    return Verdict(
        time=float(record.get("time") or 0.0), kind=words("kind"), ranks=tuple(int(rank) for rank in record.get("ranks") or ()),
        nodes=tuple(str(node) for node in record.get("nodes") or ()), step=int(record.get("step") or 0), what=words("what"),
        others=words("others"), hint=words("hint"), folder=words("folder"), ended=bool(record.get("ended")),
    )  # fmt: skip


def _stacks(folder: Path, ranks: Sequence[int]) -> str:
    """Of the first rank that is to blame, innermost frames first; one that did not answer is shown by another's wait for it."""
    blamed = _of_rank(folder, ranks[0]) if ranks else ""
    if len(blamed) > SHORT:
        return blamed
    others = sorted(int(file.stem[5:]) for file in folder.glob("rank-*.txt") if file.stem[5:].isdigit())
    other = next((rank for rank in others if rank not in ranks), None)
    return blamed if other is None else f"{blamed}\n\nrank {other}:\n{_of_rank(folder, other)}".lstrip()


def _of_rank(folder: Path, rank: int) -> str:
    try:
        return (folder / f"rank-{rank}.txt").read_text(encoding="utf-8", errors="replace")[:STACK].rstrip()
    except OSError:
        return ""


def _late(path: Path) -> Iterator[Late]:
    """Each rank that was late, with the line that says that it is over."""
    late: dict[int, Late] = {}
    for record in read_lines(path):
        if record is None:
            continue
        with contextlib.suppress(TypeError, ValueError):  # of another form
            if "over" in record:
                ended = late.pop(int(record.get("of", next(iter(late), -1))), None)
                if ended is not None:
                    yield replace(ended, over=str(record["over"]))
            elif "rank" in record:
                numbers = float(record.get("percent", 0.0)), int(record.get("since_step", 0))
                found = Late(int(record["rank"]), str(record.get("node", "")), *numbers, "")
                before = late.pop(found.rank, None)
                if before is not None:  # a start later: nobody said that it was over
                    yield before
                late[found.rank] = found
    yield from late.values()


def _spikes(path: Path) -> Iterator[Spike]:
    for record in _records(path, "step", "grad_norm"):
        try:
            samples = tuple(int(one) for one in record.get("samples") or ())
            spike = Spike(int(record["step"]), float(record["grad_norm"]), float(record.get("usual") or 0.0), samples)
        except (TypeError, ValueError):
            continue  # of another form
        yield spike

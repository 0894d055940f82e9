"""The files that the watch writes into RUN/watch: verdicts, time by rank, late ranks, gradient spikes.

Their format is in fsdp/watch/records.py. Lines that cannot be read are left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp.report.series import Notes, Series, in_order, number

WAITING = "waiting"
"""In collectives, not overlapped by computation."""
STEP_PHASES = ("forward", "backward", WAITING, "optimizer", "data", "reduce")
SHOWN = (*STEP_PHASES, "record", "evaluate", "save")
MOST_STACKS = 4
STACK_CHARACTERS = 6000
SHORT = 100
"""A shorter file holds the reason why there is no stack."""


@dataclass(frozen=True)
class VerdictRecord:
    """A fault that the watch reported, and its evidence."""

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
    """Whether the watch ended the job because of it."""
    stacks: str = ""


@dataclass(frozen=True)
class LateRank:
    rank: int
    node: str
    percent: float
    since_step: int
    over: str = ""


@dataclass(frozen=True)
class Spike:
    step: int
    grad_norm: float
    usual: float
    samples: tuple[int, ...]


@dataclass(frozen=True)
class WatchData:
    """`by_rank`: rank → phase → mean seconds of a step. `course`: phase → mean of all ranks by step."""

    by_rank: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    course: Mapping[str, Series] = field(default_factory=dict)
    verdicts: tuple[VerdictRecord, ...] = ()
    late: tuple[LateRank, ...] = ()
    spikes: tuple[Spike, ...] = ()

    def mean(self, phase: str) -> float | None:
        times = [phases[phase] for phases in self.by_rank.values()]
        return sum(times) / len(times) if times else None


def read_watch(run: Path, notes: Notes) -> WatchData:
    folder = run / "watch"
    by_rank, course = _timing(folder / "timing.jsonl", notes)
    verdicts = tuple(_verdicts(folder, notes))
    late, spikes = _late(folder / "late.jsonl", notes), _spikes(folder / "spikes.jsonl", notes)
    return WatchData(by_rank, course, verdicts, tuple(late), tuple(spikes))


def _timing(file: Path, notes: Notes) -> tuple[dict[int, dict[str, float]], dict[str, Series]]:
    """Summed line by line: with thousands of ranks one line is large."""
    sums: dict[int, dict[str, float]] = {}
    counts: dict[int, float] = {}
    steps, means = list[float](), list[list[float]]()
    for record in notes.records(file, "ranks", "from_step", "step"):
        with notes.reading_line(file.name):
            count = number(record["step"]) - number(record["from_step"])
            ranks = {
                int(rank): [abs(number(times.get(phase, 0.0))) for phase in SHOWN]
                for rank, times in record["ranks"].items()
            }
            if count <= 0 or not ranks:
                continue
            for rank, times in ranks.items():
                total = sums.setdefault(rank, dict.fromkeys(SHOWN, 0.0))
                counts[rank] = counts.get(rank, 0.0) + count
                for phase, seconds in zip(SHOWN, times, strict=True):
                    total[phase] += seconds * count
            steps.append(record["step"])
            means.append([sum(values) / len(ranks) for values in zip(*ranks.values(), strict=True)])
    by_rank = {rank: {p: s / counts[rank] for p, s in sums[rank].items()} for rank in sorted(sums)}
    return by_rank, dict(zip(SHOWN, (in_order(steps, v) for v in zip(*means, strict=True)), strict=False))


def _verdicts(folder: Path, notes: Notes) -> Iterator[VerdictRecord]:
    records: list[dict[str, Any]] = []
    for record in notes.records(folder / "verdicts.jsonl", "kind"):
        if record["kind"] != "ended":
            records.append(record)
        elif records:
            records[-1]["ended"] = True
    for nth, record in enumerate(records):
        with notes.reading_line("verdicts.jsonl"):
            verdict = _verdict(record)
            recent = nth >= len(records) - MOST_STACKS and verdict.folder
            yield replace(verdict, stacks=_stacks(folder / verdict.folder, verdict)) if recent else verdict


def _verdict(record: Mapping[str, Any]) -> VerdictRecord:
    what, kind, others, hint, folder = (
        str(record.get(name) or "") for name in ("what", "kind", "others", "hint", "folder")
    )
    if folder in (".", "..") or "/" in folder or "\0" in folder:
        raise ValueError("the stacks' folder is outside RUN/watch")
    timestamp = number(record.get("time") or 0.0)
    datetime.datetime.fromtimestamp(timestamp, datetime.UTC)  # raises for one that cannot be shown
    return VerdictRecord(
        time=timestamp,
        kind=kind,
        ranks=tuple(int(number(rank)) for rank in record.get("ranks") or ()),
        nodes=tuple(map(str, record.get("nodes") or ())),
        step=int(number(record.get("step") or 0)),
        what=what,
        others=others,
        hint=hint,
        folder=folder,
        ended=bool(record.get("ended")),
    )


def _stacks(folder: Path, verdict: VerdictRecord) -> str:
    """Stacks of the first rank that the verdict names; if it did not answer, also of one that waits."""
    named = _stack(folder, verdict.ranks[0]) if verdict.ranks else ""
    if len(named) > SHORT:
        return named
    try:
        ranks = sorted(int(file.stem.removeprefix("rank-")) for file in folder.glob("rank-*.txt"))
    except (OSError, ValueError):
        return named
    other = next((rank for rank in ranks if rank not in verdict.ranks), None)
    return named if other is None else f"{named}\n\nrank {other}:\n{_stack(folder, other)}".lstrip()


def _stack(folder: Path, rank: int) -> str:
    file = folder / f"rank-{rank}.txt"
    if folder.is_symlink() or file.is_symlink():
        return ""  # a foreign run directory cannot show a file of this machine
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(STACK_CHARACTERS).rstrip()
    except OSError:
        return ""  # the rank left none


def _late(file: Path, notes: Notes) -> Iterator[LateRank]:
    """Each late rank, with the line that ended it."""
    late: dict[int, LateRank] = {}
    for record in notes.records(file):
        with notes.reading_line(file.name):
            if "over" in record:
                ended = late.pop(int(number(record.get("of", next(iter(late), -1)))), None)
                if ended is not None:
                    yield replace(ended, over=str(record["over"]))
            elif "rank" in record:
                rank, percent, step = (
                    number(record.get(name, 0)) for name in ("rank", "percent", "since_step")
                )
                if (earlier := late.pop(int(rank), None)) is not None:  # its start did not record the end
                    yield earlier
                late[int(rank)] = LateRank(int(rank), str(record.get("node", "")), percent, int(step))
    yield from late.values()


def _spikes(file: Path, notes: Notes) -> Iterator[Spike]:
    """NaN is allowed as a norm: it is what such a line reports."""
    for record in notes.records(file, "step", "grad_norm"):
        with notes.reading_line(file.name):
            samples = tuple(int(number(sample)) for sample in record.get("samples") or ())
            norm, usual = float(record["grad_norm"]), float(record.get("usual") or 0.0)
            yield Spike(int(number(record["step"])), norm, usual, samples)

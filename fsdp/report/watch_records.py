"""Reads the watch's files in RUN/watch: times by rank, late ranks, verdicts, spikes.

Their format is in fsdp/watch/records.py; watch_section.py and timing.py show them. Lines that cannot be read
are left out.
"""

from __future__ import annotations

import datetime
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.phases import PHASES
from fsdp.report.file_notes import Notes, integer, number
from fsdp.report.own_files import noted_lines, own_text
from fsdp.report.series import Series, in_order

WAITING = "waiting"
"""In collectives, not overlapped by computation."""
STEP_PHASES = ("forward", "backward", "optimizer", "data", "reduce")
SHOWN = ("forward", "backward", WAITING, "optimizer", "data", "reduce", "record", "evaluate", "save")
assert set(SHOWN) - {WAITING} < set(PHASES)
MOST_STACKS = 4
STACK = 6000
_STACK_FILE = re.compile(r"rank-(\d+)\.txt", re.ASCII)
SHORT = 100
"""A shorter file holds the reason why there is no stack."""


@dataclass(frozen=True)
class Timing:
    """Mean seconds per step: by rank over all its steps, and of all ranks over the steps."""

    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    course: Mapping[str, Series] = field(default_factory=dict)

    def mean(self, phase: str) -> float | None:
        return (
            sum(one.get(phase, 0.0) for one in self.ranks.values()) / len(self.ranks) if self.ranks else None
        )


@dataclass(frozen=True)
class VerdictRecord:
    """A fault that the watch found, and its evidence."""

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
class LateRecord:
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
class WatchData:
    timing: Timing = field(default_factory=Timing)
    verdicts: tuple[VerdictRecord, ...] = ()
    late: tuple[LateRecord, ...] = ()
    spikes: tuple[Spike, ...] = ()


def read_watched(run: Path, notes: Notes) -> WatchData:
    folder = run / "watch"
    timing, verdicts = _timing(folder, notes), tuple(_verdicts(folder, notes))
    return WatchData(timing, verdicts, tuple(_late(folder, notes)), tuple(_spikes(folder, notes)))


def _records(folder: Path, name: str, notes: Notes, *needed: str) -> Iterator[Mapping[str, Any]]:
    for record in noted_lines(folder / name, notes):
        if record is not None and all(key in record for key in needed):
            yield record
        else:
            notes.lost(f"watch/{name}")


# ---------------------------------------------------------------- times


def _timing(folder: Path, notes: Notes) -> Timing:
    """Summed line by line: with thousands of ranks one line is large."""
    sums: dict[int, dict[str, float]] = {}
    counts: dict[int, float] = {}
    steps: dict[str, array[float]] = {}
    means: dict[str, array[float]] = {}
    for record in _records(folder, "timing.jsonl", notes, "ranks", "from_step", "step"):
        count, ranks = 0.0, dict[int, list[float]]()
        with notes.left_out("watch/timing.jsonl"):
            count = number(record["step"]) - number(record["from_step"])
            ranks = {
                int(rank): [_seconds(times.get(name, 0.0)) for name in SHOWN]
                for rank, times in record["ranks"].items()
            }
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
    by_rank = {
        rank: {name: value / counts[rank] for name, value in sums[rank].items()} for rank in sorted(sums)
    }
    return Timing(
        by_rank, {name: in_order(Series(np.array(steps[name]), np.array(means[name]))) for name in steps}
    )


def _seconds(value: Any) -> float:
    if (found := number(value)) < 0:
        raise ValueError(f"{found:g} s is not a duration")
    return found


# ---------------------------------------------------------------- verdicts


def _verdicts(folder: Path, notes: Notes) -> Iterator[VerdictRecord]:
    found: list[dict[str, Any]] = []
    for record in _records(folder, "verdicts.jsonl", notes, "kind"):
        if record["kind"] == "ended":
            if found:
                found[-1]["ended"] = True
        else:
            found.append(dict(record))
    for nth, record in enumerate(found):
        with notes.left_out("watch/verdicts.jsonl"):
            verdict = _verdict(record)
            late = nth >= len(found) - MOST_STACKS and verdict.folder
            yield replace(verdict, stacks=_stacks(folder, verdict)) if late else verdict


def _verdict(record: Mapping[str, Any]) -> VerdictRecord:
    def text(name: str) -> str:
        return str(record.get(name) or "")

    return VerdictRecord(
        time=_timestamp(record.get("time") or 0.0),
        kind=text("kind"),
        ranks=tuple(map(integer, record.get("ranks") or ())),
        nodes=tuple(str(node) for node in record.get("nodes") or ()),
        step=integer(record.get("step") or 0),
        what=text("what"),
        others=text("others"),
        hint=text("hint"),
        folder=_folder_name(text("folder")),
        ended=bool(record.get("ended")),
    )


def _folder_name(folder: str) -> str:
    """A folder directly in RUN/watch; ValueError for any other path."""
    if folder in (".", "..") or "/" in folder or "\0" in folder:
        raise ValueError("the stacks' folder is outside RUN/watch")
    return folder


def _timestamp(value: Any) -> float:
    """Seconds that datetime can represent."""
    timestamp = number(value)
    datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    return timestamp


def _stacks(watch: Path, verdict: VerdictRecord) -> str:
    """Stacks of the first rank that the verdict names, innermost frames first; if that rank did not
    answer, also those of a rank that waits for it.
    """
    folder = watch / verdict.folder
    named = own_text(folder / f"rank-{verdict.ranks[0]}.txt", STACK) if verdict.ranks else ""
    if len(named) > SHORT:
        return named
    other = next((rank for rank in _ranks_with_stacks(folder) if rank not in verdict.ranks), None)
    if other is None:
        return named
    return f"{named}\n\nrank {other}:\n{own_text(folder / f'rank-{other}.txt', STACK)}".lstrip()


def _ranks_with_stacks(folder: Path) -> list[int]:
    """Empty for a folder that cannot be listed, such as one whose name is too long."""
    try:
        names = [file.name for file in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _STACK_FILE.fullmatch(name)))


def _late(folder: Path, notes: Notes) -> Iterator[LateRecord]:
    """Each late rank, with the line that ended it."""
    late: dict[int, LateRecord] = {}
    for record in _records(folder, "late.jsonl", notes):
        with notes.left_out("watch/late.jsonl"):
            if "over" in record:
                ended = late.pop(integer(record.get("of", next(iter(late), -1))), None)
                if ended is not None:
                    yield replace(ended, over=str(record["over"]))
            elif "rank" in record:
                numbers = number(record.get("percent", 0.0)), integer(record.get("since_step", 0))
                found = LateRecord(integer(record["rank"]), str(record.get("node", "")), *numbers, "")
                before = late.pop(found.rank, None)
                if before is not None:  # from an earlier start, which did not record its end
                    yield before
                late[found.rank] = found
    yield from late.values()


def _spikes(folder: Path, notes: Notes) -> Iterator[Spike]:
    """NaN is allowed as a norm: it is what such a line reports."""
    for record in _records(folder, "spikes.jsonl", notes, "step", "grad_norm"):
        with notes.left_out("watch/spikes.jsonl"):
            samples = tuple(map(integer, record.get("samples") or ()))
            yield Spike(
                integer(record["step"]),
                float(record["grad_norm"]),
                float(record.get("usual") or 0.0),
                samples,
            )

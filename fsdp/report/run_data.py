"""The data of a report, from the files of a run directory. Missing or damaged files become notes, not errors.

The files' formats: fsdp/record (metrics.jsonl), fsdp/rundir (history.jsonl), fsdp/watch/records.py (watch/).
"""

from __future__ import annotations

import datetime
import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.base.phases import Ending
from fsdp.base.text import counted
from fsdp.checkpoint.inspect import CheckpointListing, scan
from fsdp.checkpoint.store import open_store
from fsdp.config import FIELDS, parse_value, read_recipe
from fsdp.config.trust import check_store
from fsdp.rundir.history import RunDir, read_lines
from fsdp.watch.verdict import RECOVERABLE

Outcome = Literal["finished", "stopped", "failed", "killed", "running"]
Record = dict[str, Any]
T = TypeVar("T")
LIVE_S = 30.0
"""A lock file that was touched this lately belongs to a live run."""
LARGEST = 1e100
"""Larger values are treated as not finite: sums of smaller ones stay finite."""
UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError, OSError)
"""Raised when a file is not of the form that a run writes."""
EXPOSED = "exposed communication"
"""Waiting in collectives, not overlapped by computation."""
TIMED_PHASES = ("forward", "backward", "waiting", "optimizer", "data", "reduce", "record", "evaluate", "save")
LABELS = tuple(EXPOSED if phase == "waiting" else phase for phase in TIMED_PHASES)
MOST_OF_A_STACK = 6000


@dataclass(frozen=True)
class Series:
    """One number over the steps, in the order of steps."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def in_order(cls, points: array[float]) -> Series:
        """Of step, value, step, value, …. A resumed run makes some steps again: the newest value counts."""
        steps, values = np.array(points).reshape(-1, 2).T
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        newest = np.diff(steps, append=np.inf) > 0
        return cls(steps[newest], values[newest])

    @property
    def shown(self) -> np.ndarray:
        """Mask of the values that a chart can show."""
        return np.abs(self.values) <= LARGEST  # type: ignore[no-any-return]

    @property
    def finite(self) -> Series:
        return Series(self.steps[self.shown], self.values[self.shown])

    def figure(self, name: str) -> float:
        """ "last", or of the finite values "min", "max" or "median"; NaN of none."""
        values = self.values[-1:] if name == "last" else self.finite.values
        return float(getattr(np, name.replace("last", "max"))(values)) if len(values) else math.nan


@dataclass(frozen=True)
class Start:
    """One start of the run, and its end as far as it was recorded."""

    time: str
    launcher: str
    ranks: int
    nodes: Sequence[str]
    from_step: int
    changed: Sequence[str]
    to_step: int | None = None
    ended: bool = False
    why: str = "no end was recorded: killed, or its node was lost"
    outcome: Outcome = "killed"


@dataclass(frozen=True)
class Fault:
    """A verdict of the watch, and its evidence."""

    time: float
    kind: str
    ranks: Sequence[int]
    nodes: Sequence[str]
    step: int
    what: str
    others: str
    hint: str
    folder: str
    ended: bool
    """Whether the watch ended the job because of it."""
    stacks: str


@dataclass(frozen=True)
class RunData:
    """A run as its files describe it."""

    name: str
    path: Path
    config: Mapping[str, Any]
    series: Mapping[str, Series]
    last_step: int
    starts: Sequence[Start]
    checkpoints: Sequence[CheckpointListing]
    faults: Sequence[Fault]
    phases: Mapping[int, Mapping[str, float]]
    """Rank → label of a phase → mean seconds of a step."""
    peaks: Mapping[int, Mapping[str, float]]
    """Rank → bytes by kind at the peak of its tensors, if the run was profiled."""
    notes: Sequence[str]
    answers: Mapping[int, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Step → held-out questions with reference and answer."""

    @property
    def restarts(self) -> list[int]:
        return [start.from_step for start in self.starts if start.from_step]


def read_run(path: Path) -> RunData:
    run, notes = RunDir(path), list[str]()
    try:
        if not any(file.exists() for file in (run.config, run.metrics, run.history)):
            raise ConfigError(f"{path} is not a run directory: it has no config.toml.", "ls -d runs/*")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).", f"ls -ld {path}") from None

    def read(file: Path, reader: Callable[[Iterable[Record]], T]) -> T:
        """What `reader` makes of the file's records; of none, with a note, where it cannot read them."""
        try:
            return reader(_records(file, notes))
        except UNREADABLE as error:
            notes.append(f"{file.name} could not be read ({_cause(error)}): left out")
            return reader(())

    config, watch = _config(run, notes), path / "watch"
    series = read(run.metrics, _series)
    last_step = int(max((line.steps[-1] for line in series.values()), default=0))
    faults = read(watch / "verdicts.jsonl", lambda records: _faults(watch, records))
    starts = _with_state(run, read(run.history, _starts), last_step)
    return RunData(
        name=path.resolve().name,
        path=path,
        config=config,
        series=series,
        last_step=last_step,
        starts=list(_with_causes(starts, faults)),
        checkpoints=_checkpoints(path, str(config.get("checkpoint.dir", "")), notes),
        faults=faults,
        phases=read(watch / "timing.jsonl", _timing),
        peaks=dict(_peaks(path / "profile", notes)),
        notes=notes,
        answers=read(run.answers, _answers),
    )


def _answers(records: Iterable[Record]) -> dict[int, list[dict[str, str]]]:
    """By step, the newest first."""
    found: dict[int, list[dict[str, str]]] = {}
    for record in records:
        row = {name: str(record[name]) for name in ("question", "reference", "answer")}
        found.setdefault(int(record["step"]), []).append(row)
    return dict(sorted(found.items(), reverse=True))


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def _records(file: Path, notes: list[str]) -> Iterator[Record]:
    """A kill can truncate a line file: a torn line is counted and left out."""
    torn = 0
    for record in read_lines(file):
        if record is None:
            torn += 1
        else:
            yield record
    if torn:
        notes.append(f"left out: {counted(torn, 'line')} of {file.name} that could not be read")


def _config(run: RunDir, notes: list[str]) -> dict[str, Any]:
    """Known fields parsed to their types; other fields as text."""
    config: dict[str, Any] = {}
    try:
        for name, value in read_recipe(str(run.config)).items():
            known = name in FIELDS and not FIELDS[name].is_args
            config[name] = parse_value(FIELDS[name], value) if known else value
    except ConfigError as error:
        notes.append(without_hint(error) if run.config.exists() else "config.toml is missing")
    return config


def _series(records: Iterable[Record]) -> dict[str, Series]:
    """Every number of every record that has a step."""
    points: dict[str, array[float]] = {}
    for record in records:
        for name, value in record.items():
            if type(value) in (float, int) and name not in ("step", "steps"):
                points.setdefault(name, array("d")).extend((record["step"], value))
    return {name: Series.in_order(pairs) for name, pairs in points.items()}


# ---------------------------------------------------------------- starts


def _starts(records: Iterable[Record]) -> list[Start]:
    """Each start with the first end recorded after it."""
    starts: list[Start] = []
    for event in records:
        if event["event"] == "start":
            moment, launcher = (str(event.get(name, "")) for name in ("time", "launcher"))
            nodes, changed = (event.get(name) or [] for name in ("nodes", "changed"))
            ranks, from_step = (int(event.get(name) or 0) for name in ("ranks", "from_step"))
            starts.append(Start(moment, launcher, ranks, nodes, from_step, changed))
        elif starts and not starts[-1].ended:
            starts[-1] = _ended(starts[-1], event)
    return starts


def _ended(start: Start, event: Record) -> Start:
    kind, why = event["event"], str(event.get("why") or start.why)
    known: dict[object, Outcome] = {"crash": "failed", "unmet": "failed", "end": "stopped"}
    outcome = known.get(kind, "killed")
    if kind == "end" and event.get("how") in list(Ending):
        outcome = event["how"]
    if outcome == "failed":
        code = f"its ranks exited with code {event.get('code', '?')}"
        why = code if kind == "crash" else "the rendezvous of its nodes failed"
    return replace(start, to_step=event.get("step"), ended=True, why=why, outcome=outcome)


def _with_state(run: RunDir, starts: list[Start], last_step: int) -> list[Start]:
    """A last start without an end is running if its lock file is recent."""
    if starts and not starts[-1].ended:
        starts[-1] = replace(starts[-1], to_step=last_step or None)
        with suppress(OSError):  # no lock file: the run is not running
            if time.time() - (run.path / "CLAIM").stat().st_mtime < LIVE_S:
                starts[-1] = replace(starts[-1], outcome="running", why="in progress")
    return starts


def _with_causes(starts: Sequence[Start], faults: Sequence[Fault]) -> Iterator[Start]:
    """A start that failed or has no end gets the fault of its time that it did not survive: the first one for
    which the watch ended it, or from which no rank recovers.
    """
    begins = [*(_timestamp(start.time) for start in starts), math.inf]
    for nth, start in enumerate(starts):
        within = [fault for fault in faults if begins[nth] <= fault.time < begins[nth + 1]]
        cause = next((fault.what for fault in within if fault.ended or fault.kind not in RECOVERABLE), "")
        if cause and start.outcome in ("failed", "killed") and cause not in start.why:
            start = replace(start, why=f"{start.why}; {cause}")
        yield start


def _timestamp(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return math.inf  # no fault belongs to an unreadable time


# ---------------------------------------------------------------- checkpoints, memory


def _checkpoints(run: Path, folder: str, notes: list[str]) -> Sequence[CheckpointListing]:
    """Complete and incomplete ones, newest first."""
    folder = folder or str(run / "checkpoints")
    try:
        return scan(open_store(check_store(run, folder)))
    except (ShardrunError, OSError, ImportError) as error:
        notes.append(f"checkpoints in {folder} could not be listed: {without_hint(error)}")
        return []


def _peaks(folder: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for file in sorted(folder.glob("rank*_memory.json")):
        try:
            kinds = json.loads(file.read_text(encoding="utf-8"))["peak"]["kinds"]
            yield int(file.name.removeprefix("rank").partition("_")[0]), kinds
        except UNREADABLE as error:
            notes.append(f"profile/{file.name} could not be read ({_cause(error)}): left out")


# ---------------------------------------------------------------- the watch's files


def _timing(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Summed line by line: with thousands of ranks one line is large."""
    sums: dict[int, np.ndarray] = {}
    for record in records:
        count = record["step"] - record["from_step"]
        for rank, times in record["ranks"].items():
            row = np.array([*(times.get(phase, 0.0) for phase in TIMED_PHASES), 1.0])
            sums[int(rank)] = sums.get(int(rank), 0.0) + row * count
    means = {rank: (sums[rank][:-1] / sums[rank][-1]).tolist() for rank in sorted(sums)}
    return {rank: dict(zip(LABELS, mean, strict=True)) for rank, mean in means.items()}


def _faults(folder: Path, records: Iterable[Record]) -> list[Fault]:
    verdicts: list[Record] = []
    for record in records:
        if record["kind"] != "ended":
            verdicts.append(record)
        elif verdicts:
            verdicts[-1]["ended"] = True
    faults = []
    for record in verdicts:
        texts = {name: str(record.get(name) or "") for name in ("kind", "what", "others", "hint", "folder")}
        ranks, nodes = (record.get(name) or [] for name in ("ranks", "nodes"))
        step, ended, moment = int(record.get("step") or 0), bool(record.get("ended")), float(record["time"])
        stacks = _stacks(folder / Path(texts["folder"]).name, ranks)
        faults.append(Fault(moment, ranks=ranks, nodes=nodes, step=step, ended=ended, stacks=stacks, **texts))
    return faults


def _stacks(folder: Path, ranks: Sequence[int]) -> str:
    """Stacks of the first rank at fault; if it did not answer, also of one that waits for it."""
    blamed = {f"rank-{rank}.txt" for rank in ranks}
    files = sorted(folder.glob("rank-*.txt"), key=lambda file: file.name not in blamed)
    texts = [
        f"{f.stem}:\n{f.read_text('utf-8', errors='replace')[:MOST_OF_A_STACK]}".rstrip() for f in files[:2]
    ]
    return "\n\n".join(texts[:1] if texts and texts[0].count("\n") > 1 else texts)

"""The data of a report, from the files of a run directory. Missing or damaged files become notes, not errors.

Here: configuration, starts, checkpoints, saves, peak memory of a profiled run. Not here: numbers over steps
(series.py), the watch's files (watch_records.py).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.base.phases import Ending
from fsdp.checkpoint.inspect import CheckpointListing, scan
from fsdp.checkpoint.open_store import open_store
from fsdp.config import FIELDS, check_store, parse_value, read_recipe
from fsdp.report.series import UNREADABLE, Notes, Series, number, read_numbers
from fsdp.report.watch_records import VerdictRecord, WatchData, read_watch
from fsdp.rundir.paths import RunDir
from fsdp.watch.hang_verdict import RECOVERABLE

Outcome = Literal["finished", "stopped", "failed", "killed", "running"]
LIVE_S = 30.0
"""A claim whose count was raised this lately belongs to a live run."""
FAILURE = re.compile(
    r"^[A-Za-z_.]*(Error|Exception|Interrupt|Exit|Elsewhere|OtherRankFailed|Refused|Timeout)\b"
)


@dataclass(frozen=True)
class Start:
    """One start of the run, and its end as far as it was recorded."""

    number: int
    time: str
    launcher: str
    ranks: int
    nodes: tuple[str, ...]
    from_step: int
    changed: tuple[str, ...]
    to_step: int | None = None
    ended: str = ""
    why: str = "no end was recorded: killed, or its node was lost"
    outcome: Outcome = "killed"


@dataclass(frozen=True)
class Save:
    """Times of one saved checkpoint: training stalled, and writing in the background."""

    stall_s: float
    write_s: float


@dataclass(frozen=True)
class RunData:
    """A run as its files describe it."""

    name: str
    path: Path
    config: Mapping[str, Any]
    series: Mapping[str, Series]
    starts: tuple[Start, ...]
    checkpoints: tuple[CheckpointListing, ...]
    saves: Mapping[int, Save]
    watched: WatchData = field(default_factory=WatchData)
    peaks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Rank → bytes by kind at the peak of its tensors, if the run was profiled."""
    notes: tuple[str, ...] = field(default=())

    @property
    def changed(self) -> dict[str, Any]:
        """Fields that differ from their default."""
        return {
            name: value
            for name, value in self.config.items()
            if name in FIELDS and value != FIELDS[name].default
        }

    @property
    def last_step(self) -> int:
        return int(max((float(s.steps[-1]) for s in self.series.values() if len(s)), default=0))

    @property
    def outcome(self) -> Outcome:
        return self.starts[-1].outcome if self.starts else "killed"


def read_run(path: Path) -> RunData:
    run, notes = RunDir(path), Notes()
    try:
        if not any(file.exists() for file in (run.config, run.metrics, run.history)):
            raise ConfigError(f"{path} is not a run directory: it has no config.toml.", "ls -d runs/*")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).", f"ls -ld {path}") from None
    config = _config(run, notes)
    data = RunData(
        name=path.resolve().name,
        path=path,
        config=config,
        series=read_numbers(run.metrics, notes),
        starts=tuple(_starts(run, notes)),
        checkpoints=tuple(_checkpoints(path, str(config.get("checkpoint.dir", "")), notes)),
        saves=_saves(path / "saves.jsonl", notes),
        watched=read_watch(path, notes),
        peaks=dict(_peaks(path / "profile", notes)),
    )
    starts = _with_verdicts(_with_state(run, data), data.watched.verdicts)
    return replace(data, starts=starts, notes=notes.lines)


def _config(run: RunDir, notes: Notes) -> dict[str, Any]:
    """Known fields parsed to their types; other fields as text."""
    if not run.config.is_file():
        notes.texts.append("config.toml is missing")
        return {}
    try:
        fields = read_recipe(str(run.config))
    except ConfigError as error:
        notes.texts.append(without_hint(error))
        return {}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            found[name] = _typed(name, value)
        except ConfigError as error:
            notes.texts.append(f"config.toml: {without_hint(error)[:200]} It is left out.")
    return found


def _typed(name: str, value: Any) -> Any:
    if name not in FIELDS:
        return str(value)
    if not FIELDS[name].is_args:
        return parse_value(FIELDS[name], value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"--{name} {value} has no name.")
    return value


def _starts(run: RunDir, notes: Notes) -> Iterator[Start]:
    """Each start with the first end, crash or failed rendezvous recorded after it."""
    open_start: Start | None = None
    count = 0
    for event in notes.records(run.history, "event"):
        if event["event"] == "start":
            if open_start is not None:
                yield open_start
            count += 1
            open_start = _start(event, count)
        elif open_start is not None and not open_start.ended:
            open_start = _ended(open_start, event)
    if open_start is not None:
        yield open_start


def _start(event: Mapping[str, Any], number: int) -> Start:
    return Start(
        number=number,
        time=str(event.get("time", "")),
        launcher=str(event.get("launcher", "")),
        ranks=_integer_or_none(event.get("ranks")) or 0,
        nodes=_texts(event.get("nodes")),
        from_step=_integer_or_none(event.get("from_step")) or 0,
        changed=_texts(event.get("changed")),
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _ended(start: Start, event: Mapping[str, Any]) -> Start:
    kind, why = event["event"], str(event.get("why") or "")
    outcome: Outcome = "killed"
    if kind == "crash":
        why, outcome = f"its ranks exited with code {event.get('code', '?')}", "failed"
    elif kind == "unmet":
        why, outcome = "the rendezvous of its nodes failed", "failed"
    elif kind == "end":
        # a list, since the value may be of a type that no set holds
        outcome = event["how"] if event.get("how") in list(Ending) else _outcome_of_text(why)
    return replace(
        start,
        to_step=_integer_or_none(event.get("step")),
        ended=str(event.get("time", "")) or "?",
        why=why or start.why,
        outcome=outcome,
    )


def _outcome_of_text(why: str) -> Outcome:
    """For histories of the first format, in which `why` is the only record of the outcome."""
    return "finished" if why == "the last step" else "failed" if FAILURE.match(why) else "stopped"


def _integer_or_none(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else None


def _with_state(run: RunDir, data: RunData) -> tuple[Start, ...]:
    """A last start without an end is running if its lock file is recent."""
    if not data.starts or data.starts[-1].ended:
        return data.starts
    last = replace(data.starts[-1], to_step=data.last_step or None)
    claim = run.path / "CLAIM"
    with contextlib.suppress(OSError):  # no lock file: the run is not running
        if time.time() - claim.stat().st_mtime < LIVE_S:
            last = replace(last, outcome="running", why="in progress")
    return (*data.starts[:-1], last)


def _with_verdicts(starts: tuple[Start, ...], verdicts: Sequence[VerdictRecord]) -> tuple[Start, ...]:
    """A start that failed or has no end gets the watch's verdict as its reason."""
    moments = [*(_seconds(start.time) for start in starts), float("inf")]
    reached = [*(start.from_step for start in starts[1:]), 0]
    explained = []
    for nth, start in enumerate(starts):
        within = [verdict for verdict in verdicts if moments[nth] <= verdict.time < moments[nth + 1]]
        cause = _cause(within, start.from_step, reached[nth] if start.to_step is None else start.to_step)
        if cause is None or start.outcome not in ("failed", "killed") or cause.what in start.why:
            explained.append(start)
        elif start.ended or not cause.ended:
            reasons = (start.why, cause.what) if start.ended else (cause.what, start.why)
            explained.append(replace(start, why="; ".join(reasons)))
        else:
            last, why = max(start.from_step, cause.step - 1), f"ended by the watch: {cause.what}"
            explained.append(replace(start, why=why, outcome="failed", to_step=last))
    return tuple(explained)


def _cause(verdicts: Sequence[VerdictRecord], from_step: int, reached: int) -> VerdictRecord | None:
    """Of a start's verdicts the first that no run survives, or the stall that it did not survive: the watch
    ended it, or no step after it was recorded. What follows the end is a consequence.
    """
    last = next((nth for nth, verdict in enumerate(verdicts) if verdict.ended), len(verdicts) - 1)
    until = verdicts[: last + 1]
    fatal = next((verdict for verdict in until if verdict.kind not in RECOVERABLE), None)
    if fatal is not None:
        return replace(fatal, ended=until[-1].ended)
    stalls = [verdict for verdict in until if verdict.ended or max(verdict.step, from_step) >= reached]
    return stalls[-1] if stalls else None


def _seconds(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return float("inf")  # no verdict belongs to an unreadable time


def _checkpoints(run: Path, place: str, notes: Notes) -> list[CheckpointListing]:
    """Complete and incomplete ones, newest first."""
    place = place or str(run / "checkpoints")
    try:
        return scan(open_store(check_store(run, place)))
    except (ShardrunError, OSError, ImportError) as error:
        notes.texts.append(f"checkpoints in {place} could not be listed: {without_hint(error)}")
        return []


def _saves(path: Path, notes: Notes) -> dict[int, Save]:
    saves: dict[int, Save] = {}
    for record in notes.records(path, "step"):
        with notes.reading_line(path.name):
            times = (number(record.get(name, 0.0)) for name in ("stall_s", "write_s"))
            saves[int(number(record["step"]))] = Save(*times)
    return saves


def _peaks(folder: Path, notes: Notes) -> Iterator[tuple[int, dict[str, float]]]:
    for file in sorted(folder.glob("rank*_memory.json")):
        try:
            kinds = json.loads(file.read_text(encoding="utf-8"))["peak"]["kinds"]
            rank = int(file.name.removeprefix("rank").partition("_")[0])
            yield rank, {str(kind): abs(number(count)) for kind, count in kinds.items()}
        except (OSError, *UNREADABLE) as error:
            notes.texts.append(
                f"left out: profile/{file.name}, which could not be read ({type(error).__name__})"
            )

"""The history of a run directory: history.jsonl, and the markers STOPPED, DONE and FAILED.

history.jsonl has one record for each start, end, crash and lost start. launch/slurm_job.py derives from them
what launch/policy.py decides on.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.phases import Ending
from fsdp.rundir import tail
from fsdp.rundir.atomic_write import write_atomically, writing
from fsdp.rundir.line_files import append, append_if_possible, read_records
from fsdp.rundir.paths import RunDir

if TYPE_CHECKING:
    from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

CLASSES = "classes"
"""The field of a start's data with the digest of the names of the classes."""


def events(run: RunDir) -> list[dict[str, Any]]:
    """All records, oldest first."""
    return list(read_records(run.history))


def count_starts(run: RunDir) -> int:
    return sum(event["event"] == "start" for event in events(run))


def last_step(run: RunDir) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    return max((record["step"] for record in tail.last_records(run.metrics)), default=0)


def newest_start(events: Sequence[Mapping[str, Any]]) -> float:
    """The time of the newest start, in seconds since 1970; 0 if there is none."""
    texts = [str(event.get("time", "")) for event in events if event["event"] == "start"]
    try:
        return datetime.datetime.fromisoformat(texts[-1]).timestamp() if texts else 0.0
    except ValueError:
        return 0.0


def truncate_metrics(run: RunDir, step: int) -> None:
    """Remove the steps after `step`, from which a run resumes and records them again."""
    tail.cut(run.metrics, lambda record: record["step"] <= step)


def save_record(step: int, stall_s: float, write_s: float, size: int) -> dict[str, float]:
    """A line of saves.jsonl: the seconds that a save stalled the steps, and those of its write."""
    return {"step": step, "stall_s": stall_s, "write_s": write_s, "bytes": size}


def last_save(run: RunDir) -> int:
    """The newest step in saves.jsonl; 0 if none was saved."""
    return max(map(_saved_step, tail.last_records(run.saves)), default=0)


def truncate_saves(run: RunDir, step: int) -> None:
    """Remove the saves of steps after `step`, from which a run resumes: their checkpoints are gone."""
    tail.cut(run.saves, lambda record: _saved_step(record) <= step)


def _saved_step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if type(step) is int else 0


def data_changes(run: RunDir, data: Mapping[str, Any]) -> list[str]:
    """A line if the last start trained on other data: the samples of a step are then not the same. Another if
    their classes were others.
    """
    last = tail.find_last(run.history, lambda event: event["event"] == "start")
    before = last.get("data", data) if last is not None else data
    if not isinstance(before, Mapping):
        return []
    # a version that had none for these data
    later = [name for name in ("fingerprint", CLASSES) if name not in before]
    data = {name: value for name, value in data.items() if name not in later}
    found = []
    if (was := _listed(before)) != (now := _listed(data)):
        found.append(f"the data: {was} → {now}; the samples of each step differ")
    if before.get(CLASSES) != data.get(CLASSES):
        found.append(
            "the classes have other names or another order: an output of the model may mean another class"
        )
    return found


def trained_classes(run: RunDir) -> str:
    """The digest of the names of the classes at the last start; empty if it has none, or a torn one."""
    last = tail.find_last(run.history, lambda event: event["event"] == "start")
    data = last.get("data") if last is not None else None
    digest = str(data.get(CLASSES, "")) if isinstance(data, Mapping) else ""
    return digest if re.fullmatch("[0-9a-f]{16}", digest) else ""


def _listed(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items() if name != CLASSES)


# ---------------------------------------------------------------- writing


def record_start(
    run: RunDir,
    env: DistEnv,
    *,
    from_step: int,
    changed: list[str],
    nodes: list[str],
    data: Mapping[str, Any],
) -> None:
    remove_markers(run)
    record = {
        "event": "start",
        "time": now(),
        "launcher": env.launcher,
        "nodes": nodes,
        "ranks": env.world_size,
        "from_step": from_step,
        "pid": os.getpid(),
        "changed": changed,
        "data": dict(data),
    }
    append(run.history, record)


def record_end(run: RunDir, *, step: int, why: str, how: Ending) -> None:
    append_if_possible(run.history, {"event": "end", "time": now(), "step": step, "why": why, "how": how})


def record_lost(run: RunDir, *, why: str) -> None:
    """The last start has no end."""
    with writing(run.history):
        append(run.history, {"event": "lost", "time": now(), "step": last_step(run), "why": why})


def record_unmet(run: RunDir, *, job: str) -> None:
    """The rendezvous of a job's nodes failed."""
    with writing(run.history):
        append(run.history, {"event": "unmet", "time": now(), "job": job, "step": last_step(run)})


def record_crash(
    run: RunDir, *, job: str, restart: int, step: int, code: int, kind: str, starting: bool
) -> None:
    """The ranks of a job's start ended with an error; `starting`: before they recorded that start."""
    record = {"event": "crash", "time": now(), "job": job, "restart": restart, "step": step, "code": code}
    with writing(run.history):
        append(run.history, {**record, "kind": kind, "starting": starting})


def write_marker(marker: Path, text: str) -> None:
    """Write STOPPED or DONE. A failure is logged: the run has ended without its marker too."""
    try:
        write_atomically(marker, text)
    except OSError as error:
        log.error("%s cannot be written (%s): %s", marker, error.strerror, text.strip())


def remove_markers(run: RunDir) -> None:
    """Remove what the last start left about its end."""
    for marker in (run.stopped, run.done, run.failed):
        with writing(marker):
            marker.unlink(missing_ok=True)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

"""The records of a run directory: files of JSON lines, and the markers STOPPED, DONE and FAILED.

history.jsonl has one record for each start, end, crash and lost start: launch/slurm_job.py derives from them
what launch/policy.py decides on. A line that a kill or a full disk has torn is left out when read, and ended
before the next record. What a start needs of a file is at its end, and is read from there: a start
costs the same after any number of steps. Cutting is one ftruncate after the last record to keep.
"""

from __future__ import annotations

import datetime
import json
import logging
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.phases import Activity, Ending, announces
from fsdp.base.text import counted, listed
from fsdp.rundir.paths import RunDir, replace_with, write_atomically, writing

if TYPE_CHECKING:
    from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

CLASSES = "classes"
"""The field of a start's data with the digest of the names of the classes."""
MOST_LINE = 32 << 20
"""A longer line is torn. Steps of 4,096 ranks have lines of up to 0.9 MB in watch/timing.jsonl."""
KEPT_BYTES = 4 << 20
"""Of one file's records while it cannot be written; later records are lost."""
RETRY_S = 5.0
NEEDED: Mapping[str, Mapping[str, type]] = {
    "metrics.jsonl": {"step": int},
    "saves.jsonl": {"step": int},
    "history.jsonl": {"event": str},
    "start": {"from_step": int},
    "end": {"step": int},
    "crash": {"job": str, "restart": int, "step": int, "code": int},
}
"""The fields that decisions depend on, by file or event. A record without them counts as torn."""
Record = dict[str, Any]


# ---------------------------------------------------------------- reading


def read_lines(path: Path) -> Iterator[Record | None]:
    """Each line's object, or None for a line without one. A missing file has no lines."""
    if path.is_file():
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MOST_LINE), b""):
                if line.strip():
                    yield _record(line, path.name)


def read_records(path: Path) -> Iterator[Record]:
    """The records that have the fields in NEEDED. One warning names the lines that are left out."""
    torn = []
    for number, record in enumerate(read_lines(path), 1):
        if record is None:
            torn.append(number)
        else:
            yield record
    if torn and (path, len(torn)) not in _warned:
        _warned.add((path, len(torn)))
        log.warning("%s: torn and left out: line %s", path, listed(torn, 4))


_warned: set[tuple[Path, int]] = set()


def _record(line: bytes, name: str) -> Record | None:
    """The object in a line. A full disk or a power failure leaves NULs, and a record may follow them."""
    try:
        record = json.loads(line.lstrip(b"\0"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    needed = {**NEEDED.get(name, {}), **NEEDED.get(str(record.get("event")), {})}
    return record if all(type(record.get(field)) is kind for field, kind in needed.items()) else None


def _from_end(path: Path) -> Iterator[tuple[int, Record]]:
    """Each record with the position after its line, the last one first."""
    end = path.stat().st_size if path.is_file() else 0
    if not end:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            line = data[start:end] if end - start <= MOST_LINE else b""
            if (record := _record(line, path.name)) is not None:
                yield end, record
            end = start


def last_step(path: Path) -> int:
    """The last step in metrics.jsonl or saves.jsonl; 0 before the first."""
    return next((record["step"] for _, record in _from_end(path)), 0)


def truncate(path: Path, step: int) -> None:
    """Removes the records of steps after `step`, from which a run resumes, and torn lines among them."""
    if not path.is_file():
        return
    kept, status = next((end for end, record in _from_end(path) if record["step"] <= step), 0), path.stat()
    if status.st_nlink > 1 or path.is_symlink():  # as of `cp -al`: the other run keeps its records
        replace_with(path, [path.read_bytes()[:kept]])
    elif kept < status.st_size:
        with path.open("rb+") as file:
            file.truncate(kept)
            os.fsync(file.fileno())


def events(run: RunDir) -> list[Record]:
    """All records of the history, oldest first."""
    return list(read_records(run.history))


def count_starts(run: RunDir) -> int:
    return sum(event["event"] == "start" for event in events(run))


def newest_start(events: Sequence[Mapping[str, Any]]) -> float:
    """The time of the newest start, in seconds since 1970; 0 if there is none."""
    texts = [str(event.get("time", "")) for event in events if event["event"] == "start"]
    try:
        return datetime.datetime.fromisoformat(texts[-1]).timestamp() if texts else 0.0
    except ValueError:
        return 0.0


def data_changes(run: RunDir, data: Mapping[str, Any]) -> list[str]:
    """A line if the last start trained on other data: the samples of a step are then not the same. Another if
    their classes were others.
    """
    if (before := _data_of_last_start(run)) is None:
        return []
    # a version that had none for these data
    later = [name for name in ("fingerprint", CLASSES) if name not in before]
    data = {name: value for name, value in data.items() if name not in later}
    changes = []
    if (was := _listed(before)) != (now := _listed(data)):
        changes.append(f"the data: {was} → {now}; the samples of each step differ")
    if before.get(CLASSES) != data.get(CLASSES):
        what = "the classes have other names or another order"
        changes.append(f"{what}: an output of the model may mean another class")
    return changes


def trained_classes(run: RunDir) -> str:
    """The digest of the names of the classes at the last start; empty if it has none, or a torn one."""
    digest = str((_data_of_last_start(run) or {}).get(CLASSES, ""))
    return digest if re.fullmatch("[0-9a-f]{16}", digest) else ""


def _data_of_last_start(run: RunDir) -> Mapping[str, Any] | None:
    """None without a start; empty for one with odd data."""
    last = next((record for _, record in _from_end(run.history) if record["event"] == "start"), {})
    data = last.get("data")
    return data if isinstance(data, Mapping) else None


def _listed(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items() if name != CLASSES)


# ---------------------------------------------------------------- starts and ends


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
    fields = {"from_step": from_step, "pid": os.getpid(), "changed": changed, "data": dict(data)}
    where = {"launcher": env.launcher, "nodes": nodes, "ranks": env.world_size}
    append(run.history, {"event": "start", "time": now(), **where, **fields})


def record_end(run: RunDir, *, step: int, why: str, how: Ending) -> None:
    append_if_possible(run.history, {"event": "end", "time": now(), "step": step, "why": why, "how": how})


def record(run: RunDir, event: str, **fields: Any) -> None:
    """A start that has no end (`lost`), nodes that did not meet (`unmet`), or ranks that failed (`crash`)."""
    with writing(run.history):
        append(run.history, {"event": event, "time": now(), "step": last_step(run.metrics), **fields})


def save_record(step: int, stall_s: float, write_s: float, size: int) -> dict[str, float]:
    """A line of saves.jsonl: the seconds that a save stalled the steps, and those of its write."""
    return {"step": step, "stall_s": stall_s, "write_s": write_s, "bytes": size}


def write_marker(marker: Path, text: str) -> None:
    """Writes STOPPED or DONE. A failure is logged: the run has ended without its marker too."""
    try:
        write_atomically(marker, text)
    except OSError as error:
        log.error("%s cannot be written (%s): %s", marker, error.strerror, text.strip())


def remove_markers(run: RunDir) -> None:
    """Removes what the last start left about its end."""
    for marker in (run.stopped, run.done, run.failed):
        with writing(marker):
            marker.unlink(missing_ok=True)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# ---------------------------------------------------------------- appending


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one whole record, or raises OSError. A torn last line gets its newline first."""
    descriptor = _open_for_append(path)
    try:
        _write_whole(descriptor, _ends_torn_line(descriptor) + _line(record))
    finally:
        os.close(descriptor)


def check_appendable(path: Path) -> None:
    """Raises OSError where no record can be appended. Creates the file."""
    os.close(_open_for_append(path))


def append_if_possible(path: Path, record: Mapping[str, Any]) -> None:
    """Appends an optional record; logs it if it cannot be written."""
    try:
        append(path, record)
    except OSError as error:
        log.warning("%s cannot be written (%s). Not recorded: %s", path, error.strerror, json.dumps(record))


class Appender:
    """Appends whole records to an optional file, which stays open. Its methods do not raise OSError.

    While the file cannot be written (a full disk, an unreachable server), up to KEPT_BYTES of records are
    kept and retried every RETRY_S and at `close`. The log shows when that begins, and how many records were
    kept and lost when it ends.
    """

    def __init__(self, path: Path, *, lines: bool = True, buffer_bytes: int = 0) -> None:
        """`lines`: end a torn last line first. `buffer_bytes`: collect this much before a write."""
        self.path = path
        self._lines, self._buffer_bytes = lines, buffer_bytes
        self._descriptor: int | None = None
        self._waiting: list[bytes] = []
        self._bytes = self._lost = 0
        self._retry_at: float | None = None
        """None while the file can be written."""

    def append(self, record: Mapping[str, Any]) -> None:
        self.write(_line(record))

    def write(self, data: bytes) -> None:
        """One record, already encoded."""
        if self._retry_at is not None and self._bytes + len(data) > KEPT_BYTES:
            self._lost += 1
        else:
            self._waiting.append(data)
            self._bytes += len(data)
        may_try = self._retry_at is None or time.monotonic() >= self._retry_at
        if may_try and self._bytes > self._buffer_bytes:
            self.flush()

    @announces(Activity.STORAGE)
    def flush(self) -> None:
        """Writes the waiting records, or keeps them and logs why."""
        if not self._waiting:
            return
        try:
            self._write_waiting()
        except OSError as error:
            if self._retry_at is None:
                message = "%s cannot be written (%s): the run continues, and its records are kept"
                log.warning(message, self.path, error.strerror)
            self._retry_at = time.monotonic() + RETRY_S
            self._release()  # a stale handle of a file server stays invalid
            return
        if self._retry_at is not None:
            recorded, lost = counted(len(self._waiting), "record"), counted(self._lost, "record")
            log.warning("%s is written again: %s kept until now, %s lost", self.path, recorded, lost)
        self._waiting, self._bytes, self._lost, self._retry_at = [], 0, 0, None

    def _write_waiting(self) -> None:
        begun = b""
        # removed and not replaced, as by the job that took over the run directory
        if (
            self._descriptor is not None
            and not os.fstat(self._descriptor).st_nlink
            and not self.path.exists()
        ):
            log.warning("%s was removed with its records: a new one is begun", self.path)
            self._release()
        if self._descriptor is None:
            self.path.parent.mkdir(exist_ok=True)
            self._descriptor = _open_for_append(self.path)
            begun = _ends_torn_line(self._descriptor) if self._lines else b""
        _write_whole(self._descriptor, begun + b"".join(self._waiting))

    def close(self) -> None:
        """Writes the waiting records. Those that cannot be written are lost, and the log has their number."""
        self.flush()
        if self._retry_at is not None:
            lost = counted(self._lost + len(self._waiting), "record")
            log.warning("%s could not be written to the end: %s lost", self.path, lost)
        self._waiting, self._bytes = [], 0
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:  # NFS reports failed writes at close
                log.warning("%s: the last records may be lost (%s)", self.path, error.strerror)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _ends_torn_line(descriptor: int) -> bytes:
    """A newline if the last line has none, else nothing."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _write_whole(descriptor: int, data: bytes) -> None:
    """Writes all or nothing: a part that a full disk has cut off is removed."""
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        if len(left) < len(data):
            with suppress(OSError):  # the part stays: a torn line, which readers leave out
                os.ftruncate(descriptor, size)
        raise

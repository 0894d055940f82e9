"""The run directory: its name, the paths of its files, its records and markers.

    config.toml     the newest resolved configuration; places of checkpoints are absolute
    metrics.jsonl   one record per step and per evaluation
    saves.jsonl     one record per sealed checkpoint
    answers.jsonl   one record per held-out question that an evaluation has answered
    history.jsonl   one record per start, end, crash and lost start
    STOPPED         the reason of a stop on request, if the last start ended so
    DONE            written when the last step is reached
    FAILED          the last start's error, for its launcher
    checkpoints/ full_model/ tensorboard/ logs/

Rank 0 alone writes here, except checkpoints. launch/slurm_job.py derives from the history what
launch/policy.py decides on. A line that a kill or a full disk has torn is left out when read, and ended
before the next record. What a start needs of a file is at its end, and is read from there: a start
costs the same after any number of steps. Not here: the lock (lock.py).
"""

from __future__ import annotations

import datetime
import errno
import io
import json
import logging
import mmap
import os
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.errors import CheckpointError, ConfigError, error_number
from fsdp.base.object_client import is_url
from fsdp.base.phases import Activity, Ending, announces
from fsdp.base.text import counted, listed

if TYPE_CHECKING:
    from fsdp.config import Config
    from fsdp.distributed.env import DistEnv

log = logging.getLogger(__name__)

RAY_COPY = "working_dir_files"
"""Of `ray job submit --working-dir`: SESSION/runtime_resources/working_dir_files/_ray_pkg_…"""
PROBE_BYTES = 4096
"""Written and synced before a start: an empty file can be made on a disk that has no block left."""


class _Below:
    """A path in the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The paths in a run directory."""

    path: Path

    config = _Below("config.toml")
    metrics = _Below("metrics.jsonl")
    history = _Below("history.jsonl")
    saves = _Below("saves.jsonl")
    answers = _Below("answers.jsonl")
    stopped = _Below("STOPPED")
    done = _Below("DONE")
    failed = _Below("FAILED")
    full_model = _Below("full_model")
    full_model_ema = _Below("full_model_ema")


def choose(config: Config) -> RunDir:
    """The folder --run.dir, or a new one under runs/. Creates nothing."""
    path = Path(config.run.dir or f"runs/{_new_name(config)}").absolute()
    if RAY_COPY in path.parts:
        raise ConfigError(
            f"--run.dir {path} lies in Ray's copy of the working directory, which Ray deletes.",
            f"--run.dir $HOME/runs/{path.name}, or another folder that all nodes share",
        )
    return RunDir(path)


def _new_name(config: Config) -> str:
    """Time, model and data set; a random suffix distinguishes two runs started in one second."""
    data = "-".join(source.label for source in config.data.sources) or config.data.name
    label = f"{config.model.name}-{Path(data).name[:40]}".translate(str.maketrans(":./", "---")).strip("-")
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{label}-{os.urandom(2).hex()}"


def open_run(place: str) -> RunDir:
    """The run directory that a command names; ConfigError for a URL. Creates nothing."""
    if is_url(place):
        copy = f"aws s3 cp --recursive --exclude 'step-*' {shlex.quote(place)} runs/copy"
        reason = f"{place} is in an object store, and a run directory is a folder."
        raise ConfigError(reason, f"{copy} copies the run's records there")
    return RunDir(Path(place).absolute())


def create(path: Path) -> RunDir:
    """Create the folders on rank 0, or raise an error that names the place that cannot be written."""
    with writing(path):
        for folder in (path, path / "logs", path / "tensorboard"):
            folder.mkdir(parents=True, exist_ok=True)
        # os.urandom, not secrets: that imports OpenSSL, 4 MiB in the monitor process of each node
        probe = path / f".writable-{os.urandom(4).hex()}"
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink(missing_ok=True)
    return RunDir(path)


def write_config(run: RunDir, config: Config) -> list[str]:
    """Writes config.toml, and returns what has changed since the last start as `field: old → new`. Places of
    checkpoints become absolute: a start or a tool in another working directory finds this run's.
    """
    # here: the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    places = config.checkpoint
    places = replace(places, dir=_absolute(places.dir), local_dir=_absolute(places.local_dir))
    config, changed, old = replace(config, checkpoint=places), list[str](), dict[str, Any]()
    try:
        old = configuration.read_recipe(str(run.config)) if run.config.is_file() else {}
    except ConfigError as error:  # used for the comparison alone: the start continues
        reason = str(error).partition(" HINT:")[0]
        changed.append(f"config.toml of the last start cannot be compared: {reason}")
    for name, value in configuration.flatten(config).items() if old else ():
        if name == "run.dir" or name.partition(".")[0] in configuration.LAUNCHERS_OWN:
            continue
        if isinstance(value, tuple):
            value = configuration.as_tables(value)
        # a field that an earlier version did not have has its default
        default = [] if isinstance(value, list) else {} if isinstance(value, Mapping) else value
        if (before := old.get(name, default)) != value:
            changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


def _absolute(place: str) -> str:
    return str(Path(place).absolute()) if place and not is_url(place) else place


# ---------------------------------------------------------------- files written whole or not at all

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, flag: str = "--run.dir") -> Iterator[None]:
    """Turns an OSError into a one-line error that names the file. For the files that a start needs; `flag`
    names their folder.
    """
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})."
        shown = next(
            str(folder)
            for folder in (error.filename or path, *path.absolute().parents)
            if os.path.lexists(folder)
        )
        advice = storage_advice(error.errno or 0, shown)
        if error.errno in FULL:
            hint = f"{advice}, then start the same command"
            raise CheckpointError(reason, hint, error_number=error.errno) from None
        raise ConfigError(reason, f"{advice}; {flag} runs/NAME is another place") from None


@contextmanager
def storing(place: str, flag: str = "--checkpoint.dir") -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the store of checkpoints."""
    try:
        yield
    except OSError as error:
        reason, hint = f"{place} cannot be written: {error}.", f"{flag} FOLDER that is writable"
        raise CheckpointError(reason, hint, error_number=error_number(error)) from None


def storage_advice(number: int, place: str) -> str:
    """The command that shows the cause of a write's `errno` in a folder or under a URL."""
    folder = shlex.quote(place)
    if is_url(place):
        return f"python -m fsdp.checkpoint {folder} shows whether it answers"
    if number in FULL:
        return f"df -h {folder} and df -i {folder} show what is full: free some"
    if number in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return f"ls -ld {folder} shows who may write there"
    return f"findmnt -T {folder} and df -h {folder} show the storage"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file. A reader sees the old file or the new one, whole, even after a power failure."""
    replace_with(path, [text.encode()])


def replace_with(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the file by these bytes, synced before the rename: a file of NULs could otherwise remain."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- records

CLASSES = "classes"
"""The field of a start's data with the digest of the names of the classes."""
MOST_LINE = 32 << 20
"""A longer line is torn. Steps of 4,096 ranks have lines of up to 0.9 MB in watch/timing.jsonl."""
KEPT = 10_000
"""Records of one file, while it cannot be written; older ones are lost."""
Record = dict[str, Any]


# ---------------------------------------------------------------- reading


def read_lines(path: Path) -> Iterator[Record | None]:
    """Each line's object, or None for a line without one. A missing file has no lines."""
    if path.is_file():
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MOST_LINE), b""):
                if line.strip():
                    yield _record(line)


def read_records(path: Path) -> Iterator[Record]:
    """The whole records. One warning names the lines that are left out."""
    torn = []
    for number, record in enumerate(read_lines(path), 1):
        if record is None:
            torn.append(number)
        else:
            yield record
    if torn:
        _warn_once(f"{path}: torn and left out: line {listed(torn, 4)}")


@cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)


def _record(line: bytes) -> Record | None:
    """The object in a line. A full disk or a power failure leaves NULs, and a record may follow them."""
    try:
        record = json.loads(line.lstrip(b"\0"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _from_end(path: Path) -> Iterator[tuple[int, Record]]:
    """Each record with the position after its line, the last one first."""
    end = path.stat().st_size if path.is_file() else 0
    if not end:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            if end - start <= MOST_LINE and (record := _record(data[start:end])) is not None:
                yield end, record
            end = start


def last_step(path: Path) -> int:
    """The last step in metrics.jsonl or saves.jsonl; 0 before the first."""
    return next((record["step"] for _, record in _from_end(path)), 0)


def truncate(path: Path, step: int) -> None:
    """Removes the records of steps after `step`, from which a run resumes, and torn lines among them."""
    if not path.is_file():
        return
    end, status = next((end for end, record in _from_end(path) if record["step"] <= step), 0), path.stat()
    if status.st_nlink > 1 or path.is_symlink():  # as of `cp -al`: the other run keeps its records
        replace_with(path, [path.read_bytes()[:end]])
    elif end < status.st_size:
        with path.open("rb+") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def events(run: RunDir) -> list[Record]:
    """All records of the history, oldest first."""
    return list(read_records(run.history))


def count_starts(run: RunDir) -> int:
    return sum(event["event"] == "start" for event in events(run))


def newest_start(events: Sequence[Mapping[str, Any]]) -> float:
    """The time of the newest start, in seconds since 1970; 0 if there is none."""
    times = [event["time"] for event in events if event["event"] == "start" and "time" in event]
    return datetime.datetime.fromisoformat(times[-1]).timestamp() if times else 0.0


def data_changes(run: RunDir, data: Mapping[str, Any]) -> list[str]:
    """A line if the last start trained on other data: the samples of a step are then not the same. Another if
    their classes were others. What an earlier version did not record is no change.
    """
    before = _data_of_last_start(run)
    changed = {name for name, value in before.items() if data.get(name) != value}
    lines = []
    if changed - {CLASSES}:
        lines.append(f"the data: {_listed(before)} → {_listed(data)}; the samples of each step differ")
    if CLASSES in changed:
        lines.append("the classes have other names or another order: an output may mean another class")
    return lines


def trained_classes(run: RunDir) -> str:
    """The digest of the names of the classes at the last start; empty if it has none."""
    return str(_data_of_last_start(run).get(CLASSES, ""))


def _data_of_last_start(run: RunDir) -> Mapping[str, Any]:
    starts = (record for _, record in _from_end(run.history) if record["event"] == "start")
    data: Mapping[str, Any] = next(starts, {}).get("data", {})
    return data


def _listed(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items() if name != CLASSES)


# ---------------------------------------------------------------- starts and ends


def record_start(run: RunDir, env: DistEnv, **fields: Any) -> None:
    remove_markers(run)
    start = {"event": "start", "time": now(), "launcher": env.launcher, "ranks": env.world_size}
    append(run.history, {**start, "pid": os.getpid(), **fields})


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
    """Appends one whole record, or raises OSError."""
    with open_lines(path) as file:
        _write_whole(file, _line(record))


def append_if_possible(path: Path, record: Mapping[str, Any]) -> None:
    """Appends an optional record; logs it if it cannot be written."""
    try:
        append(path, record)
    except OSError as error:
        log.warning("%s cannot be written (%s). Not recorded: %s", path, error.strerror, json.dumps(record))


class Appender:
    """Appends whole records to an optional file, which stays open. Its methods do not raise OSError: while
    the file cannot be written, the newest KEPT records wait for the next write.
    """

    def __init__(self, path: Path, *, lines: bool = True, buffer: int = 0) -> None:
        """`lines`: end a torn last line first. `buffer`: the records that wait before a write."""
        self.path = path
        self._lines, self._buffer = lines, buffer
        self._file: io.FileIO | None = None
        self._waiting = deque[bytes](maxlen=KEPT)
        self._fails = False

    def append(self, record: Mapping[str, Any]) -> None:
        self.write(json.dumps(record).encode() + b"\n")

    def write(self, data: bytes) -> None:
        """One record, already encoded."""
        self._waiting.append(data)
        if len(self._waiting) > self._buffer:
            self.flush()

    @announces(Activity.STORAGE)
    def flush(self) -> None:
        """Writes the waiting records, or keeps them and logs why."""
        try:
            self._write_waiting()
        except OSError as error:
            if not self._fails:
                message = "%s cannot be written (%s): the run continues, and its newest records are kept"
                log.warning(message, self.path, error.strerror)
            self._fails = True
            self._release()  # a stale handle of a file server stays invalid
            return
        if self._fails:
            log.warning("%s is written again", self.path)
        self._fails = False
        self._waiting.clear()

    def _write_waiting(self) -> None:
        # removed and not replaced, as by the job that took over the run directory
        if self._file and not os.fstat(self._file.fileno()).st_nlink and not self.path.exists():
            log.warning("%s was removed with its records: a new one is begun", self.path)
            self._release()
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = open_lines(self.path, self._lines)
        _write_whole(self._file, b"".join(self._waiting))

    def close(self) -> None:
        """Writes the waiting records. Those that cannot be written are lost, and the log has their number."""
        if self._waiting:
            self.flush()
        if self._fails:
            lost = counted(len(self._waiting), "record")
            log.warning("%s could not be written to the end: %s lost", self.path, lost)
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # NFS reports failed writes again
                self._file.close()
            self._file = None


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def open_lines(path: Path, lines: bool = True) -> io.FileIO:
    """The file, which is created, for appending. A torn last line of `lines` gets its newline."""
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666), "a+")
    size = os.fstat(file.fileno()).st_size
    if lines and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        _write_whole(file, b"\n")
    return file


def _write_whole(file: io.FileIO, data: bytes) -> None:
    """Writes all or nothing: a part that a full disk has cut off is removed."""
    size, left = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        if len(left) < len(data):
            with suppress(OSError):  # the part stays: a torn line, which readers leave out
                file.truncate(size)
        raise

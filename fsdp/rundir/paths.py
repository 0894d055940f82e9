"""The run directory: what a run is called, where its files lie, and the history of its starts.

    config.toml     the newest resolved configuration      metrics.jsonl   an object a step or evaluation
    history.jsonl   when, who, from which step, why ended   checkpoints/ full_model/ tensorboard/ logs/
    STOPPED         the last start left by request: why     DONE            the last step was reached
    FAILED          the last start's error: what it means

Only rank 0 writes here, apart from checkpoints. Who may write at all is fsdp/rundir/lock.py's.

A line file (`*.jsonl`) holds one JSON object a line. Every reader and writer of one uses `read_lines`,
`read_records`, `append` or `Appender` below: a torn line is left out when read, and ended before the next
write.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.errors import CheckpointError, ConfigError, ShardrunError, error_number
from fsdp.base.phases import Ending

if TYPE_CHECKING:
    from fsdp.config import Config
    from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

RUNS = Path("runs")
PROBE_BYTES = 4096
"""Written and synced before a start: an empty file can be made on a disk that has no block left."""
BLOCK_LINES = 2048
"""Lines parsed in one call, which takes half the time of a call a line."""
SHOWN = 4
KEPT_BYTES = 4 << 20
"""Of one file's records while it cannot be written; what comes after that is lost."""
RETRY_S = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT)
NEEDED: Mapping[str, Mapping[str, type]] = {"metrics.jsonl": {"step": int}, "history.jsonl": {"event": str}}
NEEDED_OF_EVENT: Mapping[str, Mapping[str, type]] = {
    "start": {"from_step": int},
    "end": {"step": int},
    "crash": {"job": str, "restart": int, "step": int, "code": int},
}
"""The fields that decisions rest on. A record without them is left out as a torn one is."""


@dataclass(frozen=True)
class RunDir:
    """Paths by name."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def stopped(self) -> Path:
        return self.path / "STOPPED"

    @property
    def done(self) -> Path:
        return self.path / "DONE"

    @property
    def failed(self) -> Path:
        return self.path / "FAILED"

    @property
    def full_model(self) -> Path:
        return self.path / "full_model"


def new_name(config: Config) -> str:
    """Sorts by time, says what it is, and two started in one second differ."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    model = config.model.name.replace(":", "-").replace(".", "-")
    return f"{now}-{model}-{Path(config.data.name.replace(':', '-')).name}-{os.urandom(2).hex()}"


def choose(config: Config) -> Path:
    return Path(config.run.dir).absolute() if config.run.dir else (RUNS / new_name(config)).absolute()


def create(path: Path) -> RunDir:
    """Rank 0 makes the folders, or says why the place cannot be written."""
    with writing(path):
        for folder in (path, path / "logs", path / "tensorboard"):
            folder.mkdir(parents=True, exist_ok=True)
        # os.urandom, not secrets: that imports OpenSSL, 4 MiB in the monitor process of each node
        probe = path / f".writable-{os.urandom(4).hex()}"
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink()
    return RunDir(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line that names the file. For what a start needs."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ShardrunError:
    folder = path if path.is_dir() else path.parent
    if error.errno in FULL:
        hint = f"df -h {folder} and df -i {folder} show what is full: free some, then start the same command"
        full = f"{path} cannot be written ({error.strerror})."
        return CheckpointError(full, hint, error_number=error_number(error))
    hint = f"ls -ld {folder} shows who may write there; --run.dir runs/NAME is another place"
    return ConfigError(f"{path} cannot be written ({error.strerror}).", hint)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, whole, after a power cut too."""
    replace_with(path, [text.encode()])


def replace_with(path: Path, pieces: Iterable[bytes]) -> None:
    """Synced before the rename: the name may otherwise reach the disk before the bytes, which leaves NULs."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_config(run: RunDir, config: Config) -> list[str]:
    """Keep the configuration, and return what has changed since the last start as `field: old → new`."""
    # here, since the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    changed: list[str] = []
    if run.config.exists():
        try:
            old = configuration.read_recipe(str(run.config))
        except ConfigError as error:  # only compared with: a start does not depend on it
            why = str(error).partition(" HINT:")[0]
            changed.append(f"config.toml of the last start cannot be compared: {why}")
            old = {}
        for name, value in configuration.flatten(config).items():
            if name.partition(".")[0] in configuration.LAUNCHERS_OWN:
                continue
            before = old.get(name, {} if isinstance(value, Mapping) else value)
            if before != value:
                changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


# ---------------------------------------------------------------- reading line files


def read_lines(path: Path, together: int = BLOCK_LINES) -> Iterator[dict[str, Any] | None]:
    """Each line's object; None for a line that holds none. A file that is not there has no lines."""
    return (record for _, record in _numbered(path, together))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a line file that have the fields NEEDED. One warning a file names the lines left out."""
    torn: list[int] = []
    for number, record in _numbered(path, BLOCK_LINES):
        if record is not None and _is_whole(record, path.name):
            yield record
        else:
            torn.append(number)
    _tell_torn(path, torn)


def last_step(run: RunDir) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    return max((record["step"] for record in read_records(run.metrics)), default=0)


def _is_whole(record: Mapping[str, Any], file: str) -> bool:
    needed = {**NEEDED.get(file, {}), **NEEDED_OF_EVENT.get(str(record.get("event")), {})}
    return all(type(record.get(name)) is kind for name, kind in needed.items())


_told_torn: set[tuple[Path, tuple[int, ...]]] = set()


def _tell_torn(path: Path, lines: list[int]) -> None:
    """Once a process, however often the file is read."""
    if not lines or (path, tuple(lines)) in _told_torn:
        return
    _told_torn.add((path, tuple(lines)))
    numbers = ", ".join(map(str, lines[:SHOWN]))
    if len(lines) > SHOWN:
        numbers += f" and {len(lines) - SHOWN} more"
    what = f"line {numbers} is torn and" if len(lines) == 1 else f"lines {numbers} are torn and"
    log.warning("%s: %s left out", path, what)


def _numbered(path: Path, together: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, object or None) of each line that is not blank."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        first = 1
        while block := list(islice(file, together)):
            yield from _parsed(block, first)
            first += len(block)


def _parsed(block: list[str], first: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    try:
        found = json.loads(f"[{','.join(block)}]")
    except (ValueError, RecursionError):
        found = []
    if len(found) == len(block):
        for number, one in enumerate(found, first):
            yield number, one if isinstance(one, dict) else None
    else:
        yield from ((number, _object(line)) for number, line in enumerate(block, first) if line.strip())


def _object(line: str) -> dict[str, Any] | None:
    """A disk that was full or lost power leaves NULs, which the next record may follow in the same line."""
    try:
        found = json.loads(line.lstrip("\0"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------- writing line files


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One record, whole; OSError where it cannot be written. A torn last line gets its newline first."""
    descriptor = _open_for_append(path)
    try:
        _write_whole(descriptor, _ends_torn_line(descriptor) + _line(record))
    finally:
        os.close(descriptor)


def append_if_possible(path: Path, record: Mapping[str, Any]) -> None:
    """For an optional record: if it cannot be written, it goes to the log."""
    try:
        append(path, record)
    except OSError as error:
        log.warning("%s cannot be written (%s). Not recorded: %s", path, error.strerror, json.dumps(record))


class Appender:
    """Appends whole records to an optional file, which it holds open. Its methods do not raise OSError.

    While the file cannot be written (a full disk, a server that is away) it keeps up to KEPT_BYTES of records
    and retries every RETRY_S and at `close`. It logs when that begins, and how many records were kept and
    lost at its end.
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

    def flush(self) -> None:
        """Write what waits, or keep it and say why."""
        if not self._waiting:
            return
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            _write_whole(self._descriptor, b"".join(self._waiting))
        except OSError as error:
            self._failed(error)
            return
        if self._retry_at is not None:
            self._recovered()
        self._waiting, self._bytes, self._retry_at = [], 0, None

    def close(self) -> None:
        """Write what waits. What still cannot be written is lost, and counted in the log."""
        self.flush()
        lost, self._waiting, self._bytes = self._lost + len(self._waiting), [], 0
        if self._retry_at is not None:
            log.warning("%s could not be written to the end: %s lost", self.path, _records(lost))
        self._release()

    def _open(self) -> int:
        self.path.parent.mkdir(exist_ok=True)
        descriptor = _open_for_append(self.path)
        try:
            if self._lines and (newline := _ends_torn_line(descriptor)):
                _write_whole(descriptor, newline)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _failed(self, error: OSError) -> None:
        if self._retry_at is None:
            words = "%s cannot be written (%s): the run continues, and its records are kept"
            log.warning(words, self.path, error.strerror)
        self._retry_at = time.monotonic() + RETRY_S
        self._release()  # a handle that a server has forgotten stays bad

    def _recovered(self) -> None:
        lost, self._lost = self._lost, 0
        words = (self.path, _records(len(self._waiting)), _records(lost))
        log.warning("%s is written again: %s kept until now, %s lost", *words)

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:  # NFS tells here of writes that it has accepted before
                log.warning("%s: the last records may be lost (%s)", self.path, error.strerror)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _ends_torn_line(descriptor: int) -> bytes:
    """What must stand before the next record: a newline, if the last line has none."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _write_whole(descriptor: int, data: bytes) -> None:
    """All or nothing: of a write that a full disk cut off, the part is taken back."""
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


def truncate_metrics(run: RunDir, step: int) -> None:
    """A run that goes on from `step` draws the later steps anew: one curve, no step twice."""
    if run.metrics.exists():
        kept = (record for record in read_records(run.metrics) if record["step"] <= step)
        replace_with(run.metrics, map(_line, kept))


# ---------------------------------------------------------------- starts and ends


def other_data(run: RunDir, data: Mapping[str, Any]) -> list[str]:
    """A line where the last start trained on other data than this one: step n would no longer mean the same
    samples.
    """
    starts = [event for event in read_records(run.history) if event["event"] == "start"]
    before = starts[-1].get("data", data) if starts else data
    return (
        []
        if before == data or not isinstance(before, Mapping)
        else [
            f"the data: {_said(before)} → {_said(data)}; a step's samples are not what they would have been"
        ]
    )


def _said(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in data.items())


def record_start(
    run: RunDir,
    env: DistEnv,
    *,
    from_step: int,
    changed: list[str],
    nodes: list[str],
    data: Mapping[str, Any],
) -> None:
    for marker in (run.stopped, run.done, run.failed):
        marker.unlink(missing_ok=True)
    append(
        run.history,
        {
            "event": "start",
            "time": now(),
            "launcher": env.launcher,
            "nodes": nodes,
            "ranks": env.world_size,
            "from_step": from_step,
            "pid": os.getpid(),
            "changed": changed,
            "data": dict(data),
        },
    )


def mark(marker: Path, text: str) -> None:
    """Write STOPPED or DONE. A failure is logged: the run has ended without its marker too."""
    try:
        write_atomically(marker, text)
    except OSError as error:
        log.error("%s cannot be written (%s): %s", marker, error.strerror, text.strip())


def record_end(run: RunDir, *, step: int, why: str, how: Ending) -> None:
    append_if_possible(run.history, {"event": "end", "time": now(), "step": step, "why": why, "how": how})


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def host() -> str:
    return socket.gethostname()

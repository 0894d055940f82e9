"""Line files (`*.jsonl`), one JSON object a line: the one reader and the one appender.

A line that a kill or a full disk has torn is left out when read, and gets its newline before the next record.
Not here: reading and cutting from the end (tail.py).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from fsdp.base.phases import Activity, announces
from fsdp.base.text import listed

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16
"""Some 220 lines, parsed in one call: it takes half the time of a call a line. Reads of more than 128 KiB at
once get new pages from the system each time, which takes ten times as long.
"""
MOST_LINE = 32 << 20
"""A longer line is torn. Steps of 4,096 ranks have lines of up to 0.9 MB in watch/timing.jsonl."""
_TORN = b"!"
"""Begins no JSON: in the place of what a line has beyond MOST_LINE."""
SHOWN = 4
KEPT_BYTES = 4 << 20
"""Of one file's records while it cannot be written; later records are lost."""
RETRY_S = 5.0
NEEDED: Mapping[str, Mapping[str, type]] = {"metrics.jsonl": {"step": int}, "history.jsonl": {"event": str}}
NEEDED_OF_EVENT: Mapping[str, Mapping[str, type]] = {
    "start": {"from_step": int},
    "end": {"step": int},
    "crash": {"job": str, "restart": int, "step": int, "code": int},
}
"""The fields that decisions depend on. A record without them is left out like a torn one."""


# ---------------------------------------------------------------- reading


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's object, or None if the line has no JSON object. A missing file has no lines."""
    return (record for _, record in _numbered(path))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records that have the fields in NEEDED. One warning per file names the lines that are left out."""
    torn: list[int] = []
    for number, record in _numbered(path):
        if record is not None and is_whole(record, path.name):
            yield record
        else:
            torn.append(number)
    warn_torn(path, torn)


def is_whole(record: Mapping[str, Any], file: str) -> bool:
    """Whether it has the fields in NEEDED of the file with this name."""
    needed = {**NEEDED.get(file, {}), **NEEDED_OF_EVENT.get(str(record.get("event")), {})}
    return all(type(record.get(name)) is kind for name, kind in needed.items())


_warned_torn: set[tuple[Path, tuple[int, ...]]] = set()


def warn_torn(path: Path, lines: list[int]) -> None:
    """One warning with the line numbers, once per process and file, however often it is read."""
    if not lines or (path, tuple(lines)) in _warned_torn:
        return
    _warned_torn.add((path, tuple(lines)))
    numbers = listed(lines, SHOWN)
    what = f"line {numbers} is torn and" if len(lines) == 1 else f"lines {numbers} are torn and"
    log.warning("%s: %s left out", path, what)


def _numbered(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, object or None) of each line that is not blank."""
    if not path.is_file():
        return
    with path.open("rb", buffering=0) as file:
        first = 1
        for block in _blocks(file):
            yield from parse_lines(block, first)
            first += len(block)


def _blocks(file: FileIO) -> Iterator[list[str]]:
    """The lines that end in the next BLOCK_BYTES, a block at a time; a line over MOST_LINE as torn."""
    kept, size = list[bytes](), 0
    while data := file.read(BLOCK_BYTES):
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            yield _texts([*kept, whole])
            kept, size = [rest], len(rest)
        elif size <= MOST_LINE:
            kept.append(rest)
            if (size := size + len(rest)) > MOST_LINE:
                kept = [_TORN]
    if size:
        yield _texts(kept)


def _texts(parts: list[bytes]) -> list[str]:
    return b"".join(parts).decode(errors="replace").split("\n")


def parse_lines(block: list[str], first: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number, object or None) of each line that is not blank, counted from `first`."""
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
    """The object in a line. A full disk or a power failure leaves NULs, and a record may follow them."""
    try:
        found = json.loads(line.lstrip("\0"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------- writing


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one whole record, or raise OSError. A torn last line gets its newline first."""
    descriptor = _open_for_append(path)
    try:
        _write_whole(descriptor, _ends_torn_line(descriptor) + _line(record))
    finally:
        os.close(descriptor)


def check_appendable(path: Path) -> None:
    """Raise OSError where no record can be appended. Creates the file."""
    os.close(_open_for_append(path))


def append_if_possible(path: Path, record: Mapping[str, Any]) -> None:
    """Append an optional record; log it if it cannot be written."""
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
        """Write the waiting records, or keep them and log why."""
        if not self._waiting:
            return
        try:
            if self._descriptor is not None and _is_removed(self._descriptor, self.path):
                log.warning("%s was removed with its records: a new one is begun", self.path)
                self._release()
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
        """Write the waiting records. Those that cannot be written are lost, and the log has their number."""
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
            message = "%s cannot be written (%s): the run continues, and its records are kept"
            log.warning(message, self.path, error.strerror)
        self._retry_at = time.monotonic() + RETRY_S
        self._release()  # a stale handle of a file server stays invalid

    def _recovered(self) -> None:
        lost, self._lost = self._lost, 0
        kept = _records(len(self._waiting))
        log.warning("%s is written again: %s kept until now, %s lost", self.path, kept, _records(lost))

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:  # NFS reports failed writes at close
                log.warning("%s: the last records may be lost (%s)", self.path, error.strerror)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _open_for_append(path: Path) -> int:
    """O_NONBLOCK: a FIFO in the file's place is an error when it is full, instead of a wait without end."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _is_removed(descriptor: int, path: Path) -> bool:
    """And not replaced, as by the job that took over the run directory."""
    return os.fstat(descriptor).st_nlink == 0 and not path.exists()


def _ends_torn_line(descriptor: int) -> bytes:
    """A newline if the last line has none, else nothing."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all or nothing: a part that a full disk has cut off is removed."""
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

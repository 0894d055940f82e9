"""The tail of a line file, read and cut from the end: a start costs the same after any number of steps.

A run writes its records in the order of steps, so the lines of steps that it repeats are at the end. Reading
stops at the first block that has a record to keep and none to remove. Torn lines are left out as in
line_files.py.

`cut` is safe against a kill at any moment:

* The lines to remove are the last ones: one ftruncate removes them all or none.
* A torn line, or one to remove, stands before a line to keep, or the file has another name (a link,
  `cp -al` of a run): the bytes to keep are copied aside, synced and renamed. Those before the tail are not
  parsed.

A line to remove that stands more than a block before the last line to keep stays. Only a process that writes
after it has lost the run directory's lock leaves such a line; the report takes the newest record of a step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fsdp.rundir.atomic_write import replace_with
from fsdp.rundir.line_files import MOST_LINE, is_whole, parse_lines, warn_torn

BLOCK_BYTES = 1 << 18
"""About 900 records of steps."""
SKIPPED_BYTES = 1 << 16
"""Read at once of a line that is too long: see BLOCK_BYTES in line_files.py."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    start: int
    end: int
    """After its newline."""
    record: Record | None
    """None if it is torn."""


def last_records(path: Path) -> list[Record]:
    """The records of the last block that has one, oldest first. A missing file has none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        for block in _blocks(file, path.name):
            if found := [line.record for line in block if line.record is not None]:
                return found
    return []


def find_last(path: Path, is_it: Callable[[Record], bool]) -> Record | None:
    """The last record that satisfies the condition."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        for block in _blocks(file, path.name):
            for line in reversed(block):
                if line.record is not None and is_it(line.record):
                    return line.record
    return None


def cut(path: Path, keeps: Callable[[Record], bool]) -> None:
    """Remove the records at the end that `keeps` rejects, and torn lines among them. Raises OSError."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        tail = _read_tail(file, path.name, keeps)
        torn = list(_line_numbers(file, tail.torn[::-1]))
        status = os.fstat(file.fileno())
        if tail.remove or path.is_symlink() or status.st_nlink > 1:
            replace_with(path, _copied(file, tail))
        elif tail.end < status.st_size:
            _truncate(path, tail.end)
    warn_torn(path, torn)


# ---------------------------------------------------------------- reading backwards


def _blocks(file: BinaryIO, name: str) -> Iterator[list[Line]]:
    """The lines that are not blank, a block at a time from the end; in a block the oldest is first."""
    at = end = file.seek(0, os.SEEK_END)
    rest: list[bytes] | None = []
    """Of the line that the next block ends in, up to `end`, last part first; None if it is too long."""
    while at:
        size = min(BLOCK_BYTES if rest is not None else SKIPPED_BYTES, at)
        at -= size
        file.seek(at)
        data = file.read(size)
        newline = data.find(b"\n") if at else -1
        if at and newline < 0:  # within a line
            rest = [*rest, data] if rest is not None and end - at <= MOST_LINE else None
            continue
        start, last = at + newline + 1, data.rfind(b"\n") + 1
        if rest is not None:
            yield _lines(b"".join([data[newline + 1 :], *reversed(rest)]), start, name)
        else:
            yield [*_lines(data[newline + 1 : last], start, name), Line(at + last, end, None)]
        rest, end = [data[: newline + 1]], start


def _lines(data: bytes, start: int, name: str) -> list[Line]:
    texts = data.split(b"\n")
    starts = [start, *(start + end for end in itertools.accumulate(len(text) + 1 for text in texts))]
    starts[-1] = start + len(data)  # the last line has no newline
    if not texts[-1]:
        texts.pop()
    parsed = parse_lines([text.decode("utf-8", errors="replace") for text in texts], 0)
    return [
        Line(starts[nth], starts[nth + 1], found if found is not None and is_whole(found, name) else None)
        for nth, found in parsed
    ]


@dataclass
class _Tail:
    """What `cut` removes: the bytes from `end` on, and the ranges in `remove` before it, last first."""

    end: int
    remove: list[tuple[int, int]] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    """Starts of torn lines, last first."""


def _read_tail(file: BinaryIO, name: str, keeps: Callable[[Record], bool]) -> _Tail:
    tail, any_kept = _Tail(0), False
    for block in _blocks(file, name):
        kept = removed = False
        for line in reversed(block):
            if line.record is not None and keeps(line.record):
                tail.end = tail.end if any_kept else line.end
                kept = any_kept = True
                continue
            if line.record is None:
                tail.torn.append(line.start)
            else:
                removed = True
            if any_kept:
                tail.remove.append((line.start, line.end))
        if kept and not removed:
            break
    return tail


def _line_numbers(file: BinaryIO, starts: Sequence[int]) -> Iterator[int]:
    """The line numbers of these positions, which ascend. Counts newlines from the beginning of the file."""
    at, number = file.seek(0), 1
    for start in starts:
        while at < start and (data := file.read(min(start - at, BLOCK_BYTES))):
            at, number = at + len(data), number + data.count(b"\n")
        yield number


# ---------------------------------------------------------------- cutting


def _copied(file: BinaryIO, tail: _Tail) -> Iterator[bytes]:
    at = 0
    for start, end in [*reversed(tail.remove), (tail.end, tail.end)]:
        file.seek(at)
        while at < start and (data := file.read(min(start - at, BLOCK_BYTES))):
            yield data
            at += len(data)
        at = end


def _truncate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

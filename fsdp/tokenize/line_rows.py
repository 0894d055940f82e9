"""Lines of JSON by number, and the contents of .gz and .zst files.

A file is mapped; the offsets of its lines are an index in the cache, mapped too. A compressed one is
decompressed into the cache once.
"""

from __future__ import annotations

import codecs
import gzip
import json
import mmap
import zlib
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import bounded
from fsdp.tokenize.cache import identity, made_once
from fsdp.tokenize.rows import SourceRow
from fsdp.tokenize.zero_bytes import converting_hint, encoding_of

READ = 1 << 24
OFFSET = np.dtype(np.int64)
PACKED = 1 << 12
"""Of a .zst file, at once: what it expands to, 128 MiB at most, is in memory."""
KINDS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
"""First bytes of files that are no text, and how their names end."""
TOOLS = {".gz": "zcat", ".zst": "zstdcat"}


class LineRows:
    """Lines of a mapped file. `path` is the source, `plain` the same without compression."""

    def __init__(self, path: Path, plain: Path, name: str) -> None:
        self._path, self._plain, self._name = path, plain, name
        # Mapped where it is read: a map holds a descriptor, and a source may have more files than the limit.
        self._index = made_once("lines", identity(plain), lambda aside: _index_lines(plain, aside))
        self.count = self._index.stat().st_size // OFFSET.itemsize - 1

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        """A blank line has no row."""
        if first >= last:
            return
        starts = self._starts()
        with self._plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            for n in range(first, last):
                line = text[int(starts[n]) : int(starts[n + 1])]
                if n == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield self._row(n + 1, line)

    def cuts(self, size: int) -> list[int]:
        starts = self._starts()
        found = np.unique(np.searchsorted(starts, np.arange(size, int(starts[-1]), size)))
        return [int(row) for row in found if 0 < row < self.count] + [self.count]

    def _starts(self) -> np.ndarray:
        """The offset of each line, and the end."""
        return np.memmap(self._index, OFFSET, "r")

    def _row(self, number: int, line: bytes) -> SourceRow:
        place = self._place(number)
        try:
            values = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{place} is not UTF-8 at byte {error.start} of the line: {error.reason}.",
                self._hint(number, line),
            ) from None
        except (ValueError, RecursionError) as error:
            what = (
                f"{error.msg} at character {error.pos + 1}" if isinstance(error, JSONDecodeError) else error
            )
            raise ConfigError(f"{place} is not JSON: {what}.", self._hint(number, line)) from None
        if not isinstance(values, dict):
            kind = "null" if values is None else f"a {type(values).__name__}"
            raise ConfigError(
                f"{place} is {kind}, not an object with columns.",
                """an object for each row, such as {"text": "Once upon a time"}""",
            )
        return SourceRow(place, values)

    def _hint(self, number: int, line: bytes) -> str:
        return (renaming_hint(self._path, line) if number == 1 else "") or self._show(number)

    def _place(self, number: int) -> str:
        return f"{self._name} line {number}"

    def _show(self, number: int) -> str:
        name, show = quoted(self._path), f"sed -n {number}p"
        tool = reading_tool(self._path)
        return f"{tool} {name} | {show} shows it" if tool else f"{show} {name} shows it"


def reading_tool(path: Path) -> str:
    """The command that writes the contents of a compressed file; empty for another."""
    return TOOLS.get(_kind(path), "")


def renaming_hint(path: Path, first: bytes) -> str:
    """For a file of another kind than its name: what makes one of its first bytes; empty if it is none."""
    if _kind(path) in TOOLS:
        return ""
    name, stem = str(path), str(path.with_suffix(""))
    for begin, suffix in KINDS.items():
        if first.startswith(begin):
            new = name + suffix if suffix in TOOLS else stem + suffix
            return f"its contents are {suffix}: mv {quoted(name)} {quoted(new)}"
    encoding = encoding_of(first)
    return converting_hint(encoding, path) if encoding else ""


def _index_lines(path: Path, aside: Path) -> None:
    """Writes the offset of each line, and of the end."""
    done = 0
    with path.open("rb") as file, aside.open("wb") as out:
        np.zeros(1, OFFSET).tofile(out)
        last = b"\n"
        while block := file.read(READ):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + (done + 1)
            ends.astype(OFFSET).tofile(out)
            done, last = done + len(block), block[-1:]
        if last != b"\n":
            np.array([done], OFFSET).tofile(out)


def zst_blocks(path: Path, zstandard: Any) -> Iterator[bytes]:
    """Frame by frame: zstandard.open ends without an error where a file is cut short."""
    library = zstandard.ZstdDecompressor()
    frame, complete = library.decompressobj(), True
    with path.open("rb") as file:
        while packed := file.read(PACKED):
            while packed:
                yield frame.decompress(packed)
                packed, complete = frame.unused_data, frame.eof
                if complete:
                    frame = library.decompressobj()
    if not complete:
        raise EOFError("it ends within a frame")


def decompressed(path: Path, name: str, blocks: Callable[[], Iterator[bytes]]) -> Path:
    def write(aside: Path) -> None:
        try:
            with aside.open("wb") as out:
                out.writelines(bounded(blocks(), path))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _damaged(path, name, error) from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise _damaged(path, name, error) from None
        if not aside.stat().st_size:
            raise ConfigError(f"{name} is empty.", f"rm {quoted(path)}, or write it again")

    return made_once("plain", identity(path), write)


def _starts_as(path: Path) -> bool:
    """Whether the first bytes are those of the name's kind."""
    with path.open("rb") as file:
        first = file.read(4)
    return any(begin.startswith(first[: len(begin)]) for begin, kind in KINDS.items() if kind == _kind(path))


def _kind(path: Path) -> str:
    return path.suffix.lower()


def _damaged(path: Path, name: str, error: Exception) -> ConfigError:
    if not _starts_as(path):
        plain = path.with_suffix("")
        return ConfigError(
            f"{name} is not compressed: {error}.",
            f"mv {quoted(path)} {quoted(plain)}, or copy it again",
        )
    test = "zstd -t" if _kind(path) == ".zst" else "gzip -t"
    return ConfigError(
        f"{name} is damaged or cut short: {error}.",
        f"copy it again; {test} {quoted(path)} checks it",
    )

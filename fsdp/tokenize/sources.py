"""Files of rows by number: .jsonl (also .gz and .zst), .parquet, and .txt, where a file is a row.

A .jsonl file is mapped; the offsets of its lines are an index in the cache, mapped too. A compressed one is
decompressed into the cache once. Parquet is read by row groups. Nothing is held in memory beyond one of them.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import itertools
import json
import mmap
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.config.values import expanded
from fsdp.tokenize.cache import identity, made_once

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
ROWS = SUFFIXES[:-1]
READ = 1 << 24
PACKED = 1 << 17
"""Of a .zst file, at once: what it expands to is in memory."""
HINT = "a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file, a folder of them, or a pattern in quotes"


@dataclass(frozen=True)
class SourceRow:
    place: str
    """The file and the line, as messages name it."""
    values: dict[str, Any]


class SourceRows(Protocol):
    """A file's rows."""

    count: int

    def read(self, first: int, last: int) -> Iterator[SourceRow]: ...

    def cuts(self, size: int) -> list[int]:
        """Rows at which the file may be cut into parts of about `size` bytes; the last is `count`."""
        ...


def find_files(name: str) -> list[Path]:
    """The files of a path or a pattern, in the order of names. Of a folder, its row files, else its .txt."""
    root = expanded(name)
    if root.is_dir():
        below = sorted(path for path in root.rglob("*") if path.is_file() and not _hidden(path, root))
        found = [path for path in below if path.name.endswith(ROWS)]
        found = found or [path for path in below if path.suffix == ".txt"]
    elif root.exists():
        found = [root]
    else:
        found = matching(name)
        if not found:
            raise _absent(name)
    if not found:
        raise ConfigError(f"{name} has no {', '.join(SUFFIXES)} file.", HINT)
    for path in found:
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(f"{path} is not a {', '.join(SUFFIXES)} file.", HINT)
        if not path.stat().st_size:
            raise ConfigError(f"{path} is empty.", f"rm {shlex.quote(str(path))}, or write it again")
    return found


def _absent(name: str) -> ConfigError:
    if not is_pattern(name):
        return ConfigError(f"{name} does not exist.", HINT)
    return ConfigError(f"{name} matches no file.", f"ls {shlex.quote(str(plain_folder(name)))}")


def plain_folder(pattern: str) -> Path:
    """The folder before the first part that is a pattern."""
    parts = Path(pattern).parts
    return Path(*itertools.takewhile(lambda part: not is_pattern(part), parts))


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def matching(name: str) -> list[Path]:
    """The files of a pattern such as 'corpus/**/*.jsonl', hidden ones left out; empty if it is none."""
    if not is_pattern(name):
        return []
    pattern = expanded(name)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def open_rows(files: list[Path], names: Mapping[Path, str] | None = None) -> list[SourceRows]:
    """One source a row file; the .txt files are one source together. `names` are shown in messages."""
    shown = {path: str(path) for path in files} | dict(names or {})
    texts = [path for path in files if path.suffix == ".txt"]
    opened: list[SourceRows] = [_opened(path, shown[path]) for path in files if path.suffix != ".txt"]
    return [*opened, TextFiles(texts, shown)] if texts else opened


def _opened(path: Path, name: str) -> SourceRows:
    if path.suffix == ".parquet":
        return ParquetRows(path, name)
    if path.suffix == ".gz":
        return LineRows(path, _decompressed(path, name, lambda: _gzip_blocks(path)), name)
    if path.suffix == ".zst":
        zstandard = optional("zstandard", name)
        return LineRows(path, _decompressed(path, name, lambda: _zst_blocks(path, zstandard)), name)
    return LineRows(path, path, name)


def optional(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"{name} needs the package {package}, which is not installed.", f"pip install {package}"
        ) from None


# ---------------------------------------------------------------- lines of JSON


class LineRows:
    """Lines of a mapped file. `path` is the source, `plain` the same without compression."""

    def __init__(self, path: Path, plain: Path, name: str) -> None:
        self._path, self._plain, self._name = path, plain, name
        index = made_once("lines", identity(plain), lambda aside: _index_lines(plain, aside))
        self._starts: np.ndarray = np.memmap(index, np.int64, "r")
        self.count = len(self._starts) - 1

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        """A blank line has no row."""
        if first >= last:
            return
        with self._plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            for n in range(first, last):
                line = text[int(self._starts[n]) : int(self._starts[n + 1])]
                if n == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield self._row(n + 1, line)

    def cuts(self, size: int) -> list[int]:
        marks = np.arange(size, int(self._starts[-1]), size)
        found = np.unique(np.searchsorted(self._starts, marks))
        return [int(row) for row in found if 0 < row < self.count] + [self.count]

    def _row(self, number: int, line: bytes) -> SourceRow:
        place = f"{self._name} line {number}"
        try:
            values = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{place} is not UTF-8 at byte {error.start} of the line: {error.reason}.", self._show(number)
            ) from None
        except (ValueError, RecursionError) as error:
            what = (
                f"{error.msg} at character {error.pos + 1}" if isinstance(error, JSONDecodeError) else error
            )
            raise ConfigError(f"{place} is not JSON: {what}.", self._show(number)) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"{place} is a {type(values).__name__}, not an object with columns.",
                """one line a row, such as {"text": "Once upon a time"}""",
            )
        return SourceRow(place, values)

    def _show(self, number: int) -> str:
        name, show = shlex.quote(str(self._path)), f"sed -n {number}p"
        tool = {".gz": "zcat", ".zst": "zstdcat"}.get(self._path.suffix)
        return f"{tool} {name} | {show} shows it" if tool else f"{show} {name} shows it"


def _index_lines(path: Path, aside: Path) -> None:
    """Writes the offset of each line, and of the end."""
    done = 0
    with path.open("rb") as file, aside.open("wb") as out:
        np.zeros(1, np.int64).tofile(out)
        last = b"\n"
        while block := file.read(READ):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + (done + 1)
            ends.astype(np.int64).tofile(out)
            done, last = done + len(block), block[-1:]
        if last != b"\n":
            np.array([done], np.int64).tofile(out)


def _gzip_blocks(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        while block := file.read(READ):
            yield block


def _zst_blocks(path: Path, zstandard: Any) -> Iterator[bytes]:
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


def _decompressed(path: Path, name: str, blocks: Callable[[], Iterator[bytes]]) -> Path:
    def write(aside: Path) -> None:
        try:
            with aside.open("wb") as out:
                out.writelines(blocks())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _damaged(path, name, error) from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise _damaged(path, name, error) from None
        if not aside.stat().st_size:
            raise ConfigError(f"{name} is empty.", f"rm {shlex.quote(str(path))}, or write it again")

    return made_once("plain", identity(path), write)


def _damaged(path: Path, name: str, error: Exception) -> ConfigError:
    test = "zstd -t" if path.suffix == ".zst" else "gzip -t"
    return ConfigError(
        f"{name} is damaged or cut short: {error}.",
        f"copy it again; {test} {shlex.quote(str(path))} checks it",
    )


# ---------------------------------------------------------------- Parquet


class ParquetRows:
    """Rows of a Parquet file, a row group at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name, self._place = path, name, ""
        self._arrow = optional("pyarrow", name)
        self._parquet = optional("pyarrow.parquet", name)
        with self._reading():
            facts = self._parquet.read_metadata(path)
        groups = [facts.row_group(n) for n in range(facts.num_row_groups)]
        self._ends = np.cumsum([0, *(group.num_rows for group in groups)])
        self._bytes = [group.total_byte_size for group in groups]
        self.count = int(self._ends[-1])
        if not self.count:
            raise ConfigError(f"{name} has no rows.", f"rm {shlex.quote(str(path))}, or write it again")

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        with self._reading(), self._parquet.ParquetFile(self._path) as file:
            for group, start in enumerate(self._ends[:-1]):
                if start >= last or self._ends[group + 1] <= first:
                    continue
                number = int(start)
                self._place = f", rows {number + 1} to {self._ends[group + 1]}"
                for batch in file.iter_batches(1024, row_groups=[group], use_threads=False):
                    for values in self._values(batch, number):
                        number += 1
                        if first < number <= last:
                            yield SourceRow(f"{self._name} row {number}", values)

    def _values(self, batch: Any, before: int) -> list[dict[str, Any]]:
        """The batch's rows, with `before` rows of the file before them."""
        try:
            found: list[dict[str, Any]] = batch.to_pylist()
        except UnicodeDecodeError:
            raise self._not_text(batch, before) from None
        return found

    def _not_text(self, batch: Any, before: int) -> ConfigError:
        """Names the first row and column whose bytes are not UTF-8: pyarrow does not check them."""
        for n in range(batch.num_rows):
            for name in batch.schema.names:
                try:
                    batch.column(name)[n].as_py()
                except UnicodeDecodeError as error:
                    return ConfigError(
                        f"{self._name} row {before + n + 1}: {name} is not UTF-8 at byte {error.start}: "
                        f"{error.reason}.",
                        "write the file again from text, such as with pyarrow.array(texts, pyarrow.string())",
                    )
        raise AssertionError("not reached")

    def cuts(self, size: int) -> list[int]:
        """At row groups: a part of one would read it whole."""
        found, held = [], 0
        for end, held_here in zip(self._ends[1:-1], self._bytes[:-1], strict=True):
            held += held_here
            if held >= size:
                found.append(int(end))
                held = 0
        return [*found, self.count]

    def _reading(self) -> Any:
        return _ParquetErrors(self._path, lambda: f"{self._name}{self._place}", self._arrow)


class _ParquetErrors:
    """Turns an error of pyarrow into one line."""

    def __init__(self, path: Path, place: Callable[[], str], arrow: Any) -> None:
        self._path, self._place, self._arrow = path, place, arrow

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (self._arrow.ArrowException, OSError)):
            what = " ".join(str(error).split())[:200].rstrip(".")
            raise ConfigError(
                f"{self._place()} is not a whole Parquet file: {what}.",
                f"copy it again; ls -l {shlex.quote(str(self._path))} shows its size",
            ) from None


# ---------------------------------------------------------------- text files


class TextFiles:
    """Files of UTF-8; each is a row with the column text."""

    def __init__(self, paths: list[Path], names: Mapping[Path, str]) -> None:
        self.paths, self._names = paths, names
        self.count = len(paths)

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        for path in self.paths[first:last]:
            try:
                text = path.read_bytes().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                name = shlex.quote(str(path))
                raise ConfigError(
                    f"{self._names[path]} is not UTF-8 at byte {error.start}: {error.reason}.",
                    f"iconv -f latin1 -t utf-8 {name} > {name}.utf8 && mv {name}.utf8 {name}",
                ) from None
            except OSError as error:
                raise ConfigError(f"{path} cannot be read ({error.strerror}).", f"ls -l {path}") from None
            yield SourceRow(self._names[path], {"text": text})

    def cuts(self, size: int) -> list[int]:
        sums = np.cumsum([path.stat().st_size for path in self.paths])
        found = np.unique(np.searchsorted(sums, np.arange(size, int(sums[-1]), size)) + 1)
        return [int(row) for row in found if row < self.count] + [self.count]

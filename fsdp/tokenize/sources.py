"""Files of rows by number: .jsonl and .json (also .gz and .zst), .parquet, and .txt, where a file is a row.

Not here: lines (line_rows.py), lists in .json files (json_rows.py), Parquet (parquet_rows.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import gzip_blocks
from fsdp.config.sections import expanded
from fsdp.tokenize.file_names import broken_link, shown, unreadable
from fsdp.tokenize.json_rows import open_json
from fsdp.tokenize.line_rows import TOOLS, LineRows, decompressed, zst_blocks
from fsdp.tokenize.packages import optional
from fsdp.tokenize.parquet_rows import ParquetRows
from fsdp.tokenize.rows import SourceRow, SourceRows
from fsdp.tokenize.zero_bytes import check_no_zero_byte, not_decodable

JSON = (".json", ".json.gz", ".json.zst")
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst", ".parquet")
ROWS = (*LINES, *JSON)
SUFFIXES = (*ROWS, ".txt")
SETTINGS = frozenset(
    {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
"""Files beside those of rows, as the libraries of Hugging Face write them."""
LISTED = ".jsonl, .json (.gz and .zst too), .parquet or .txt"
HINT = f"a {LISTED} file, a folder of them, or a pattern in quotes"
_File = TypeVar("_File")


def find_files(name: str) -> list[Path]:
    """The files of a path or a pattern, in the order of names; of a folder, those of `row_files`."""
    try:
        found = _found(name)
        for path in found:
            _check_file(path)
    except OSError as error:
        raise unreadable(error, name) from None
    return found


def _found(name: str) -> list[Path]:
    root = expanded(name)
    if root.is_dir():
        entries = _entries(root)
        _check_links(entries)
        found, _ = row_files(sorted(path for path in entries if path.is_file()), _name)
    elif root.exists():
        found = [root]
    else:
        found = matching(name)
        if is_pattern(name):
            _check_nothing_left_out(expanded(name))
        if not found:
            raise _absent(name)
    if not found:
        raise ConfigError(f"{shown(name)} has no {LISTED} file.", HINT)
    return found


def _check_file(path: Path) -> None:
    if not ends_with(path.name, SUFFIXES):
        raise ConfigError(f"{shown(path)} is not a {LISTED} file.", HINT)
    if not path.stat().st_size:
        raise ConfigError(f"{shown(path)} is empty.", f"rm {quoted(path)}, or write it again")


def ends_with(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name has one of the suffixes, in upper or lower case."""
    return name.lower().endswith(suffixes)


def left_out(name: str) -> str:
    """A line about the .json files of a folder that are not read; empty without one."""
    root = expanded(name)
    others = row_files(sorted(_entries(root)), _name)[1] if root.is_dir() else []
    if not others:
        return ""
    return (
        f"{len(others)} .json files are left out beside the other files of {name}, as {others[0]}. "
        f"HINT: {quoted(str(root / '**' / '*.json'))} as the source reads them"
    )


def _entries(root: Path) -> list[Path]:
    """The files below, without hidden ones. One that cannot be listed is an error: its rows would lack."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _raise(error: OSError) -> None:
    raise error


def _name(path: Path) -> str:
    return path.name


def row_files(files: Iterable[_File], name: Callable[[_File], str]) -> tuple[list[_File], list[_File]]:
    """Of a folder: its .jsonl and .parquet files, else its .json or its .txt, of which there are more.

    The second list has the .json files that are left out, without settings of other libraries.
    """
    named = [(name(file), file) for file in files]
    lines = [file for one, file in named if ends_with(one, LINES)]
    rows = [file for one, file in named if ends_with(one, JSON) and one not in SETTINGS]
    texts = [file for one, file in named if ends_with(one, (".txt",))]
    if not lines and len(rows) > len(texts):
        return rows, []
    return lines or texts or rows, rows


def _check_links(paths: list[Path]) -> None:
    """A link to a file that is gone would leave out its rows in silence."""
    for path in paths:
        if ends_with(path.name, SUFFIXES) and path.is_symlink() and not path.exists():
            raise broken_link(path)


def _absent(name: str) -> ConfigError:
    if not is_pattern(name):
        return ConfigError(f"{name} does not exist.", HINT)
    return ConfigError(f"{name} matches no file.", f"ls {quoted(str(plain_folder(name)))}")


def plain_folder(pattern: str) -> Path:
    """The folder before the first part that is a pattern."""
    parts = Path(pattern).parts
    return Path(*itertools.takewhile(lambda part: not is_pattern(part), parts))


def _check_nothing_left_out(pattern: Path) -> None:
    """glob leaves out folders that it cannot list, and links to files that are gone."""
    plain = plain_folder(str(pattern))
    if not plain.is_dir():
        return
    if "**" in pattern.parts:
        _check_links([path for path in _entries(plain) if path.match(pattern.name)])
        return
    folders = [_listable(plain)]
    for part in pattern.parts[len(plain.parts) : -1]:
        below = [path for folder in folders for path in folder.glob(part)]
        folders = [_listable(path) for path in below if path.is_dir()]
    last = pattern.name
    if is_pattern(last):
        _check_links([path for folder in folders for path in folder.glob(last)])
    else:
        _check_links([folder / last for folder in folders])


def _listable(folder: Path) -> Path:
    os.scandir(folder).close()
    return folder


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def matching(name: str) -> list[Path]:
    """The files of a pattern such as 'corpus/**/*.jsonl', hidden ones left out; empty if it is none."""
    if not is_pattern(name):
        return []
    pattern = expanded(name)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def open_rows(files: list[Path], names: Mapping[Path, str] | None = None) -> list[SourceRows]:
    """One source a row file; the .txt files are one source together. `names` are shown in messages."""
    told = {path: shown(path) for path in files} | dict(names or {})
    texts = [path for path in files if _kind(path) == ".txt"]
    opened: list[SourceRows] = [_opened(path, told[path]) for path in files if _kind(path) != ".txt"]
    return [*opened, TextFiles(texts, told)] if texts else opened


def _kind(path: Path) -> str:
    return path.suffix.lower()


def _opened(path: Path, name: str) -> SourceRows:
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(error, name) from None
    if _kind(path) in TOOLS:
        return READERS[_kind(path.with_suffix(""))](path, _unpacked(path, name), name)
    return READERS[_kind(path)](path, path, name)


def _unpacked(path: Path, name: str) -> Path:
    if _kind(path) == ".gz":
        return decompressed(path, name, lambda: gzip_blocks(path))
    zstandard = optional("zstandard", name)
    return decompressed(path, name, lambda: zst_blocks(path, zstandard))


READERS: Mapping[str, Callable[[Path, Path, str], SourceRows]] = {
    ".jsonl": LineRows,
    ".ndjson": LineRows,
    ".json": open_json,
    ".parquet": lambda path, plain, name: ParquetRows(path, name),
}
"""By suffix: of the file, of the same without compression, and of its name in messages."""


# ---------------------------------------------------------------- text files


class TextFiles:
    """Files of UTF-8; each is a row with the column text."""

    def __init__(self, paths: list[Path], names: Mapping[Path, str]) -> None:
        self.paths, self._names = paths, names
        self.count = len(paths)

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        for path in self.paths[first:last]:
            yield SourceRow(self._names[path], {"text": self._text(path, self._names[path])})

    def _text(self, path: Path, name: str) -> str:
        try:
            raw = path.read_bytes()
            check_no_zero_byte(raw, path, name)
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise not_decodable(error, raw, path, name) from None
        except OSError as error:
            raise unreadable(error, path) from None

    def cuts(self, size: int) -> list[int]:
        sums = np.cumsum([path.stat().st_size for path in self.paths])
        found = np.unique(np.searchsorted(sums, np.arange(size, int(sums[-1]), size)) + 1)
        return [int(row) for row in found if row < self.count] + [self.count]

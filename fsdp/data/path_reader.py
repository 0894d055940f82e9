"""Which built-in data set reads the file or folder that --data.name is: by the names of its files alone.

Imported only for a path: the readers of rows, whose suffixes it knows, are half of what a run of images would
import for its data.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
from pathlib import Path

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.tokenize.file_names import shown
from fsdp.tokenize.source_names import MANIFEST, PREFIX, SAVED
from fsdp.tokenize.sources import ROWS, SETTINGS, ends_with, matching

LOOKED_AT = 1000  # files of a folder, to tell images, rows and text apart
ABOUT = ("README", "LICENSE")
"""How the names of files about a folder begin, which are none of its data."""


def is_path(name: str) -> bool:
    """Whether it is a file or a folder here, or a pattern that some match."""
    return Path(name).exists() or bool(matching(name))


def reader_of(path: Path, with_tokenizer: bool) -> str:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if not path.exists() or (path / MANIFEST).is_file():
        return "documents"
    if not (path.is_file() or path.is_dir()):
        rows = f"rows{path.suffix or '.jsonl'}"
        raise ConfigError(
            f"--data.name {shown(path)} is neither a file nor a folder.",
            f"cat {quoted(path)} > {rows} makes one of a pipe; --data.name {rows}",
        )
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    if any(ends_with(name, (".bin", ".npy")) and not name.startswith(".") for name in names):
        return "tokens"
    firsts = names if path.is_file() else _first_names(path)
    holds_rows = _mostly_rows(firsts) and not _are_about_pictures(path, firsts)
    if not holds_rows and any((path / name).is_file() for name in SAVED):
        raise ConfigError(
            f"--data.name {shown(path)} is a folder of save_to_disk.",
            f"--data.name {PREFIX}{quoted(path)}",
        )
    if with_tokenizer or holds_rows:
        return "documents"
    return "folder" if path.is_dir() and _mostly_pictures(path) else "text"


def _first_names(root: Path) -> list[str]:
    """The names of the files in a folder; where it has none, of the first files below it."""
    levels = ([name for name in names if not name.startswith(".")] for _, _, names in os.walk(root))
    here = next(levels, [])
    return here or list(itertools.islice(itertools.chain.from_iterable(levels), LOOKED_AT))


def _mostly_rows(names: list[str]) -> bool:
    data = [name for name in names if name not in SETTINGS and not name.upper().startswith(ABOUT)]
    marks = sum(name.startswith("_") and not ends_with(name, ROWS) for name in data)  # Spark's _SUCCESS
    return 2 * sum(ends_with(name, ROWS) for name in data) > len(data) - marks


def _are_about_pictures(root: Path, names: list[str]) -> bool:
    """Whether the rows, as labels.json, are fewer than the folders beside them, which hold pictures."""
    if not root.is_dir():
        return False
    with os.scandir(root) as entries:  # they know their kind: no request for each of 10,000 files
        folders = sum(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    return sum(ends_with(name, ROWS) for name in names) < folders and _mostly_pictures(root)


def _mostly_pictures(root: Path) -> bool:
    """Whether most of the first files in subfolders are images, or in the folder itself if it has none; one
    image among many texts does not count.
    """
    suffixes = importlib.import_module("fsdp.data.folder").SUFFIXES
    levels = os.walk(root)
    _, _, here = next(levels, ("", [], []))
    first = list(itertools.islice((name for _, _, names in levels for name in names), LOOKED_AT)) or here
    return 2 * sum(name.lower().endswith(suffixes) for name in first) > len(first)

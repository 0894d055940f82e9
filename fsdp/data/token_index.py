"""Token files, and an index of many of them: made once a machine in the cache, mapped by every rank.

With few files each rank opens every one. With many, one process examines them while the others wait; the
others' start is a listing of the folder. Not here: which files there are, and what is examined (tokens.py,
documents.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.data.mapped_sequence import MappedSequence, PackedNames, pack, start_of
from fsdp.tokenize.cache import made_once
from fsdp.tokenize.sources import ends_with

MANY = 256
"""Files of a folder from which on an index is kept."""
EXAMINED = (".bin", ".npy", ".json", ".idx", ".loss")
PARTS = ("train", "val")


@dataclass(frozen=True)
class TokenFile:
    path: Path
    dtype: np.dtype
    offset: int
    tokens: int
    guessed: bool = False
    """Whether the file has no source for the width of its tokens."""
    documents: int = 0
    """Of a folder of fsdp.tokenize."""

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


class TokenFiles(MappedSequence[TokenFile]):
    """The files of one part of an index, mapped."""

    COLUMNS = ("ends", "document_ends", "name_ends", "offsets", "dtypes", "guessed", "names")

    def __init__(self, index: Path, root: Path, suffix: str = "") -> None:
        self._index, self._root, self._suffix = index, root, suffix
        columns = {name: np.load(index / f"{name}.npy", mmap_mode="r") for name in self.COLUMNS}
        self.ends: np.ndarray = columns["ends"]
        """The tokens up to each file's end."""
        self.document_ends: np.ndarray = columns["document_ends"]
        self._columns = columns
        self._names = PackedNames(columns["names"], columns["name_ends"])

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, n: int) -> TokenFile:
        columns, path = self._columns, self._root / self._names[n]
        tokens = int(self.ends[n]) - start_of(self.ends, n)
        if self._suffix:
            return TokenFile(path.with_suffix(self._suffix), np.dtype(np.uint8), 0, tokens)
        dtype = np.dtype(columns["dtypes"][n].decode())
        documents = int(self.document_ends[n]) - start_of(self.document_ends, n)
        return TokenFile(
            path, dtype, int(columns["offsets"][n]), tokens, bool(columns["guessed"][n]), documents
        )

    def beside(self, suffix: str) -> TokenFiles:
        """The files of the same names with this suffix, a byte a token."""
        return TokenFiles(self._index, self._root, suffix)


def ends_of(files: Sequence[TokenFile]) -> np.ndarray:
    if isinstance(files, TokenFiles):
        return files.ends
    return np.cumsum([file.tokens for file in files], dtype=np.int64)


def document_ends(files: Sequence[TokenFile]) -> np.ndarray:
    if isinstance(files, TokenFiles):
        return files.document_ends
    return np.cumsum([file.documents for file in files], dtype=np.int64)


def write_part(index: Path, files: Sequence[TokenFile]) -> None:
    index.mkdir(parents=True, exist_ok=True)
    names, lengths = pack([file.path.name for file in files])
    columns = {
        "ends": np.cumsum([file.tokens for file in files], dtype=np.int64),
        "document_ends": np.cumsum([file.documents for file in files], dtype=np.int64),
        "name_ends": np.cumsum(lengths),
        "offsets": np.array([file.offset for file in files], np.int64),
        "dtypes": np.array([file.dtype.str for file in files], "S8"),
        "guessed": np.array([file.guessed for file in files], np.bool_),
        "names": np.frombuffer(names, np.uint8),
    }
    for name in TokenFiles.COLUMNS:
        np.save(index / f"{name}.npy", columns[name])


def indexed(
    root: Path, key: dict[str, Any], examine: Callable[[Path], dict[str, Sequence[TokenFile]]]
) -> Path:
    """The index of the folder's files as they are now: PARTS, and what `examine` writes beside them."""

    def make(aside: Path) -> None:
        aside.mkdir(parents=True, exist_ok=True)
        parts = examine(aside)
        for part in PARTS:
            write_part(aside / part, parts[part])

    return made_once("files", {"version": 1, **key, "folder": folder_state(root)}, make)


def folder_state(root: Path) -> list[str]:
    """Changes with the name, size or time of a token file or sidecar in the folder.

    A sum of digests, in any order: a list of very many files would be most of a start's memory.
    """
    count, total = 0, 0
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if ends_with(entry.name, EXAMINED):
                    found = entry.stat()
                    line = os.fsencode(f"{entry.name}\n{found.st_size} {found.st_mtime_ns}\n")
                    total += int.from_bytes(hashlib.sha256(line).digest(), "little")
                    count += 1
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}).", f"ls -l {root}") from None
    return [str(root.resolve()), str(count), f"{total:x}"]

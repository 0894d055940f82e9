"""Sequences in mapped files: an item is made when it is read, and names are stored as their bytes.

Not here: what the items are (token_index.py, image_index.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


class MappedSequence(Sequence[Item]):
    """Items by index and slice. A subclass gives __len__ and `item`."""

    def item(self, n: int) -> Item:
        """Item n, from 0 to len - 1."""
        raise NotImplementedError

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.item(n) for n in range(*place.indices(len(self)))]
        n = place + len(self) if place < 0 else place
        if not 0 <= n < len(self):
            raise IndexError(place)
        return self.item(n)


class PackedNames:
    """Names of files as one row of bytes, and the end of each name in it."""

    def __init__(self, raw: np.ndarray, ends: np.ndarray) -> None:
        self._raw, self._ends = raw, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, n: int) -> str:
        return os.fsdecode(self._raw[start_of(self._ends, n) : int(self._ends[n])].tobytes())


def pack(names: Sequence[str]) -> tuple[bytes, np.ndarray]:
    """The bytes of all names, and the length of each."""
    raw = [os.fsencode(name) for name in names]
    return b"".join(raw), np.array([len(one) for one in raw], np.int64)


def mapped(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """A file of little-endian numbers, mapped; it may be empty."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.memmap(path, little, "r") if path.stat().st_size else np.empty(0, little)


def start_of(ends: np.ndarray, n: int) -> int:
    """The end of the item before n."""
    return int(ends[n - 1]) if n else 0

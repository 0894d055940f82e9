"""A data set that fills a disk at about a known step of a run, and frees it again."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from torch import Tensor

from tests.support.user_code import Vectors

CHUNK = 4096


def fill(ballast: Path) -> None:
    """Fill the disk to the last byte."""
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for size in (CHUNK, 1):
            with contextlib.suppress(OSError):
                while os.write(descriptor, b"x" * size):
                    pass
    finally:
        os.close(descriptor)


def fill_inodes(folder: Path) -> None:
    """Take every inode of a disk that has room left."""
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (folder / str(number)).touch()


class Fills(Vectors):
    """`fill_at` and `free_at` count the rows read; 0 is never. `inodes`: these run out instead of room."""

    def __init__(self, count: int, ballast: str, fill_at: int, free_at: int, inodes: bool) -> None:
        super().__init__(count)
        self._inodes = inodes
        self._ballast, self._fill_at, self._free_at, self._read = Path(ballast), fill_at, free_at, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._read += 1
        if self._read == self._fill_at:
            (fill_inodes if self._inodes else fill)(self._ballast)
        if self._read == self._free_at:
            self._ballast.unlink(missing_ok=True)
        return super().__getitem__(index)


def vectors(
    count: int = 48, ballast: str = "", fill_at: int = 0, free_at: int = 0, inodes: bool = False
) -> Fills:
    return Fills(count, ballast, fill_at, free_at, inodes)

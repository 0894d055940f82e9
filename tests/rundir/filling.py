"""A data set that fills a disk at about a known step of a run, and frees it again."""

from __future__ import annotations

import contextlib
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


class Fills(Vectors):
    """`fill_at` and `free_at` count the rows read; 0 is never."""

    def __init__(self, count: int, ballast: str, fill_at: int, free_at: int) -> None:
        super().__init__(count)
        self._ballast, self._fill_at, self._free_at, self._read = Path(ballast), fill_at, free_at, 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._read += 1
        if self._read == self._fill_at:
            fill(self._ballast)
        if self._read == self._free_at:
            self._ballast.unlink(missing_ok=True)
        return super().__getitem__(index)


def vectors(count: int = 48, ballast: str = "", fill_at: int = 0, free_at: int = 0) -> Fills:
    return Fills(count, ballast, fill_at, free_at)

"""A file of tokens as it was checked at the start. Not here: which files there are (tokens.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


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


def ends_of(files: Sequence[TokenFile]) -> np.ndarray:
    """The tokens up to each file's end."""
    return np.cumsum([file.tokens for file in files], dtype=np.int64)


def document_ends(files: Sequence[TokenFile]) -> np.ndarray:
    return np.cumsum([file.documents for file in files], dtype=np.int64)

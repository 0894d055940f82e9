"""Data sets of bench.gpu whose samples are not numbers, or whose rank 1 raises or stalls at a sample.

--data.name bench.gpu_data:spoilt --data.args.at 20
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE, CLASSES = 64, 10


class Samples(Dataset[tuple[Tensor, int]]):
    """Random vectors; sample `at` is `kind`."""

    def __init__(self, count: int, at: int, kind: str) -> None:
        self._at, self._kind = at, kind
        draw = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(count, SIZE, generator=draw)
        self._targets = torch.randint(0, CLASSES, (count,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self._at and self._kind == "nan":
            return torch.full((SIZE,), float("nan")), self._targets[index]
        if self._kind != "nan" and self._at >= 0 and os.environ.get("RANK") == "1" and index % self._at == 3:
            if self._kind == "raise":
                raise ValueError(f"sample {index} is broken on purpose")
            time.sleep(3600)
        return self._inputs[index], self._targets[index]


def spoilt(count: int = 128, at: int = 20) -> Samples:
    """Sample `at` is NaN."""
    return Samples(count, at, "nan")


def raising(count: int = 128, at: int = 7) -> Samples:
    """One sample in `at` raises on rank 1; not the first, which is read before the ranks meet."""
    return Samples(count, at, "raise")


def stalling(count: int = 128, at: int = 7) -> Samples:
    """One sample in `at` never comes on rank 1."""
    return Samples(count, at, "stall")

"""Datasets as people have them, some samples of which cannot be read; nothing here knows of shardrun."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

BROKEN = (3, 17, 18, 49)


class Files(Dataset[tuple[Tensor, int]]):
    """50 samples of noise with a label that follows from it."""

    def __init__(self, broken: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(50, 12, generator=generator)
        self.targets = (self.inputs @ torch.randn(12, 5, generator=generator)).argmax(-1)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.broken:
            raise OSError(f"{index}.png is truncated")
        return self.inputs[index], int(self.targets[index])


def broken(first: int = 3) -> Files:
    return Files((first, *BROKEN[1:]))


class Mended(Files):
    """What --data.skip_unreadable makes of Files: the next readable sample in each broken one's place."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__({3: 4, 17: 19, 18: 19, 49: 0}.get(index, index))


def mended() -> tuple[Mended, None]:
    return Mended(()), None

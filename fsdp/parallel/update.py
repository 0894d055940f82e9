"""The optimizer's update: as a whole, or part by part if its states are in files.

The numbers are the same to the bit. Not here: which optimizer (fsdp/optim/optimizer.py), and whether a step
updates (fsdp/run/step.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fsdp.parallel.nvme import NvmeFiles


class Update(Protocol):
    def step(self) -> None: ...


class Whole:
    """The optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step


class ByParts:
    """Reads states from their files, a part at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, shelf: NvmeFiles) -> None:
        self._optimizer, self._shelf = optimizer, shelf

    def step(self) -> None:
        self._shelf.step(self._optimizer)


def build_update(optimizer: torch.optim.Optimizer, shelf: NvmeFiles | None) -> Update:
    return Whole(optimizer) if shelf is None else ByParts(optimizer, shelf)

"""The optimizer's update: as a whole, or part by part if its states are in files or host memory.

The numbers are the same to the bit. Not here: which optimizer (fsdp/optim/optimizer.py), and whether a step
updates (fsdp/run/step.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fsdp.parallel.host_states import HostStates
from fsdp.parallel.nvme import NvmeFiles

StateStore = NvmeFiles | HostStates
"""Where states are between updates, if not on the device."""


class Update(Protocol):
    def step(self) -> None: ...


class Whole:
    """The optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step


class ByParts:
    """Reads states from where they are, a part at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: StateStore) -> None:
        self._optimizer, self._store = optimizer, store

    def step(self) -> None:
        self._store.step(self._optimizer)


def build_update(optimizer: torch.optim.Optimizer, store: StateStore | None) -> Update:
    return Whole(optimizer) if store is None else ByParts(optimizer, store)

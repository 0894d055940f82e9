"""The optimizer's update: as a whole, or part by part if its states are in files or host memory.

The numbers are the same to the bit. Not here: which optimizer (fsdp/optim/optimizer.py), and whether a step
updates (fsdp/run/step.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fsdp.base.errors import ConfigError, first_line
from fsdp.parallel.host_states import HostStates
from fsdp.parallel.nvme import NvmeFiles

StateStore = NvmeFiles | HostStates
"""Where states are between updates, if not on the device."""
OF_DTENSORS = ("DTensor", "Sharding propagation", "sharding strategy")
"""In torch's messages about an operation that it does not have for shards."""


class Update(Protocol):
    def step(self) -> None: ...


class Whole:
    """The optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        try:
            self._optimizer.step()
        except RuntimeError as error:
            if not any(word in str(error) for word in OF_DTENSORS):
                raise
            raise ConfigError(
                f"step() of {type(self._optimizer).__name__} cannot update sharded parameters: "
                f"{first_line(error)}",
                "another optimizer, or --mesh.strategy ddp, which keeps whole parameters",
            ) from error


class ByParts:
    """Reads states from where they are, a part at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: StateStore) -> None:
        self._optimizer, self._store = optimizer, store

    def step(self) -> None:
        self._store.step(self._optimizer)


def build_update(optimizer: torch.optim.Optimizer, store: StateStore | None) -> Update:
    return Whole(optimizer) if store is None else ByParts(optimizer, store)

"""TrainState: everything that a resume restores, and nothing else.

Random streams are derived from (seed, step, stream) and the data's order from (seed, step), so neither is
here. The learning rate is a function of the step. Beside parameters and optimizer a restored run needs four
numbers; a mixture and a stream also have a position of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class TrainState:
    """model is what fsdp/parallel/shard.py returned: the FSDP root, or the module inside
    DistributedDataParallel.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    optimizer_name: str = ""
    """--optim.name, which a checkpoint keeps; empty where it is not known."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The data's position where (seed, step) does not give it: a mixture's segments, a stream's states."""

    def counters(self) -> dict[str, float | int]:
        """The numbers beside the tensors, as a checkpoint keeps them."""
        return {
            name: getattr(self, name) for name in ("step", "samples", "tokens", "loss_scale", "good_steps")
        }

    def set_counters(self, values: dict[str, float | int]) -> None:
        for name in self.counters():
            setattr(self, name, type(getattr(self, name))(values[name]))

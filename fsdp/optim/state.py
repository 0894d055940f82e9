"""TrainState: everything that a resume restores, and nothing else.

Random streams are derived from (seed, step, stream) and the data's order from (seed, step), so neither is
here. The learning rate is a function of the step. Beside parameters and optimizer a restored run needs four
numbers; a mixture and a stream also have a position of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fsdp.config import OptimSection
from fsdp.dist.collectives import local_tensor
from fsdp.models.units import clean_name


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


KEY: Any = "ema"
"""Of the averages in the optimizer's `state`."""


class Ema:
    """In the dtype of the stored parameters. It starts from their present values."""

    def __init__(self, decay: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        with torch.no_grad():
            # Not clone: of a float8 weight it would make a tensor that is cast as weights are.
            copies = {n: torch.zeros_like(p, requires_grad=False).copy_(p) for n, p in named.items()}
        optimizer.state[KEY] = copies
        self._averages = list(copies.values())
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the parameters: average ← decay · average + (1 − decay) · parameter."""
        self._average(*self._locals(), 0)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters hold the averages inside, and the averages the parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(*self._locals(), strict=True):
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)

    def _locals(self) -> tuple[list[Tensor], list[Tensor]]:
        return [local_tensor(t) for t in self._averages], [local_tensor(p) for p in self._parameters]


def maybe_ema(section: OptimSection, model: nn.Module, optimizer: torch.optim.Optimizer) -> Ema | None:
    return Ema(section.ema, model, optimizer) if section.ema else None


def averages(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The averages by the parameters' names; empty without --optim.ema."""
    stored: dict[str, Tensor] = optimizer.state.get(KEY, {})
    return stored

"""Bytes of parameters, gradients and optimizer states, from shapes alone.

The start line, the dry run, the planner's search and the page of a run that is out of memory read them here.
Not here: what a step adds (fsdp/plan, oom_advice.py), and what is measured (account.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.optim.small_states import moment_bytes


@dataclass(frozen=True, kw_only=True)
class RestingBytes:
    """What a whole model holds between steps. Shards divide it."""

    parameters: int
    gradients: int
    """As many bytes as the trained parameters."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def checkpoint(self, *, frozen: bool = True) -> int:
        """What a checkpoint holds: a file has no gradients. `frozen` False leaves out frozen parameters."""
        return (self.parameters if frozen else self.gradients) + self.optimizer


def resting_bytes(
    section: OptimSection,
    parameters: Iterable[nn.Parameter],
    master: torch.dtype,
    frozen: torch.dtype | None = None,
) -> RestingBytes:
    """Of parameters that are kept in `master`, and those that are not trained in `frozen`."""
    every = list(parameters)
    trained = [p for p in every if p.requires_grad]
    count = sum(p.numel() for p in trained)
    return RestingBytes(
        parameters=count * master.itemsize
        + (sum(p.numel() for p in every) - count) * (frozen or master).itemsize,
        gradients=count * master.itemsize,
        optimizer=state_bytes(section, trained, master.itemsize),
    )


def state_bytes(section: OptimSection, trained: Iterable[nn.Parameter], itemsize: int) -> int:
    """Optimizer states of whole parameters that are `itemsize` bytes an element."""
    if section.state != "master":
        return sum(moment_bytes(p, section.state) for p in trained)
    # A user's optimizer counts as Adam: what it keeps is unknown before its first step.
    moments = {"sgd": 1 if section.momentum else 0}.get(section.name, 2)
    return moments * itemsize * sum(p.numel() for p in trained)

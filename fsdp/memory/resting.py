"""Bytes of parameters, gradients and optimizer states, from shapes alone.

The start line, the dry run, the planner's search and the page of a run that is out of memory read them here.
Not here: what a step adds (fsdp/plan, oom_advice.py), and what is measured (account.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.optim.custom_optimizer import is_custom


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
    model: nn.Module,
    master: torch.dtype,
    frozen: torch.dtype | None = None,
    *,
    only: Collection[nn.Parameter] | None = None,
) -> RestingBytes:
    """Of a model whose parameters are kept in `master`, and those that are not trained in `frozen`; `only`
    selects some of its parameters.
    """
    every = [p for p in model.parameters() if only is None or p in only]
    trained = [p for p in every if p.requires_grad]
    count = sum(p.numel() for p in trained)
    matrices = [p for p in muon_matrices(section, model) if only is None or p in only]
    return RestingBytes(
        parameters=count * master.itemsize
        + (sum(p.numel() for p in every) - count) * (frozen or master).itemsize,
        gradients=count * master.itemsize,
        optimizer=state_bytes(section, trained, master.itemsize, matrices),
    )


def muon_matrices(section: OptimSection, model: nn.Module) -> list[nn.Parameter]:
    if section.name != "muon":
        return []
    from fsdp.optim.muon import hidden_matrices

    return hidden_matrices(model, section.muon_parameters)


def state_bytes(
    section: OptimSection,
    trained: Iterable[nn.Parameter],
    itemsize: int,
    matrices: Iterable[nn.Parameter] = (),
) -> int:
    """Optimizer states of whole parameters that are `itemsize` bytes an element, with the moving average of
    the weights. Muon's `matrices` have one moment.
    """
    trained = list(trained)
    averages = itemsize * sum(p.numel() for p in trained) if section.ema else 0
    return averages + _moments(section, trained, itemsize, matrices)


def _moments(
    section: OptimSection, trained: list[nn.Parameter], itemsize: int, matrices: Iterable[nn.Parameter]
) -> int:
    if section.state != "master":
        from fsdp.optim.small_states import moment_bytes

        return sum(moment_bytes(p, section.state) for p in trained)
    # A user's optimizer counts as Adam: what it keeps is unknown before its first step.
    moments = 2 if is_custom(section) else len(MOMENTS[section.name])
    if section.name == "sgd" and not section.momentum:
        moments = 0
    found = moments * sum(p.numel() for p in trained) - sum(p.numel() for p in matrices)
    return itemsize * found

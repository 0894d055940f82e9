"""Optimizer states that rest elsewhere between updates: the optimizer's step on a few parameters at a time.

The update is elementwise, so the numbers are those of a whole step, to the bit. Not here: where the states
rest (nvme.py, host_states.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.dist.shards import local_tensor


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parts_of(optimizer: torch.optim.Optimizer, itemsize: int, limit: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in their order, cut where their states of `itemsize` bytes an element reach `limit`. One
    parameter is never cut.
    """
    sized = [(p, local_tensor(p).numel() * itemsize) for p in trained_parameters(optimizer)]
    yield from cut_into_parts(sized, limit)


def cut_into_parts(sized: Iterable[tuple[Any, int]], limit: int) -> Iterator[list[Any]]:
    part: list[Any] = []
    total = 0
    for one, size in sized:
        if part and total + size > limit:
            yield part
            part, total = [], 0
        part.append(one)
        total += size
    if part:
        yield part


def step_some(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """The optimizer's step on these parameters alone."""
    wanted, whole = set(parameters), optimizer.param_groups
    few = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in whole]
    try:
        optimizer.param_groups = [group for group in few if group["params"]]
        optimizer.step()
    finally:
        optimizer.param_groups = whole


@contextlib.contextmanager
def preallocated_states(
    optimizer: torch.optim.Optimizer, states: Mapping[Any, dict[str, Tensor]]
) -> Iterator[None]:
    """Context in which a checkpoint is read: it fills `states`, whose memory exists. Those that it does not
    fill are dropped after.
    """
    optimizer.state.update(states)
    try:
        yield
    finally:
        for parameter, state in states.items():
            if optimizer.state.get(parameter) is state:
                del optimizer.state[parameter]


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> list[tuple[nn.Parameter, str, Tensor]]:
    """States of their parameter's shape: not the count of steps, which stays where torch has it."""
    return [
        (parameter, name, value)
        for parameter in parameters
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
    ]

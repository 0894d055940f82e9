"""User-written communication for --comm.*: torch's own collectives, counted or doubled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SEEN: list[tuple[str, int, str]] = []
"""(what, bytes, dtype) of each call on this rank."""


def gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    SEEN.append(("all_gather", output.nbytes, str(output.dtype)))
    return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


class Scatter:
    """As a class, with its own memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        SEEN.append(("reduce_scatter", input.nbytes, str(input.dtype)))
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)


def hook(gradient: torch.Tensor) -> None:
    SEEN.append(("hook", gradient.nbytes, str(gradient.dtype)))


def halves(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def too_few(gradient: torch.Tensor, more: int) -> None: ...


NOTHING = 3


def step_lr(step: int, total_steps: int, settings: object) -> float:
    """torch's StepLR(optimizer, 1, gamma=0.7), for --optim.schedule."""
    return 0.7 ** (step - 1)

"""Stand-ins on fake tensors for operators that keep other tensors for backward on CUDA than on a CPU.

A plan's fake tensors are a CPU's, whose rms_norm decomposes and keeps two copies in fp32, and whose dropout
keeps its mask in the input's type. So does an eager cross entropy of the loss that a run compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """_fused_rms_norm: the input, the weight, and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.new_empty(x.shape[: x.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return x * (1 if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return gradient * x, None if weight is None else torch.ones_like(weight), None


class _Dropout(torch.autograd.Function):
    """native_dropout: a mask of a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return gradient * mask


class _Entropy(torch.autograd.Function):
    """The compiled summed_entropy: the logits as they are, and a number a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        rows = logits.amax(-1).float()
        ctx.save_for_backward(logits, rows)
        return rows.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        logits, _ = ctx.saved_tensors
        return logits * gradient.to(logits.dtype)


def fused_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    result: Tensor = _Entropy.apply(logits)
    return result


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
    result: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))
    return result


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    result: Tensor = _Dropout.apply(input) if training and 0 < p < 1 else input
    return result


STAND_INS = {"rms_norm": _rms_norm, "dropout": _dropout}
"""Functions of torch.nn.functional, as modules and models call them."""


@contextlib.contextmanager
def cuda_formulas() -> Iterator[None]:
    """Context in which these functions keep what CUDA's kernels keep."""
    before = {name: getattr(F, name) for name in STAND_INS}
    for name, function in STAND_INS.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)

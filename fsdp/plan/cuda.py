"""CUDA, on a machine without: the replay of its caching allocator, and what its kernels keep for backward.

The replay follows c10's rules with expandable segments. Each stream has two pools, for blocks up to 1 MiB and
for larger ones, and each pool one segment that grows at its end by 2 or 20 MiB: 512-byte grains, best fit,
blocks split from 512 bytes on, free neighbours joined.

The stand-ins are for operators that keep other tensors on CUDA than on a CPU: a plan's fake tensors are a
CPU's, whose rms_norm decomposes and keeps two copies in fp32, and whose dropout keeps its mask in the input's
type. So does an eager cross entropy of the loss that a run compiles.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIB = 1 << 20
GRAIN = 512


def packing(events: Iterable[tuple[int, int, int]]) -> float:
    """What is reserved after all events, over the sum of the streams' peaks. An event: storage, bytes
    (negative for a free), stream; a storage that shrinks or grows is allocated anew.
    """
    pools: dict[tuple[int, bool], Pool] = {}
    taken: dict[int, tuple[Pool, int, int]] = {}
    alive, peaks = Counter[int](), Counter[int]()
    for storage, change, stream in events:
        size = change
        if storage in taken:
            pool, start, before = taken.pop(storage)
            pool.free(start)
            alive[stream] -= before
            size += before
        if size > 0:
            pool = pools.setdefault((stream, size <= MIB), Pool(2 * MIB if size <= MIB else 20 * MIB))
            taken[storage] = (pool, pool.take(size), size)
            alive[stream] += size
            peaks[stream] = max(peaks[stream], alive[stream])
    return sum(pool.reserved for pool in pools.values()) / max(1, sum(peaks.values()))


class Pool:
    """One segment that grows at its end: start → size of each block that is taken, and of each free one."""

    def __init__(self, grows_by: int) -> None:
        self.reserved = 0
        self._grows_by = grows_by
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {}

    def take(self, size: int) -> int:
        size = -(-size // GRAIN) * GRAIN
        last = next((start for start, free in self._free.items() if start + free == self.reserved), None)
        # Best fit. The last block can grow, and is taken only if no other fits.
        fits = [(free, start) for start, free in self._free.items() if free >= size and start != last]
        start = min(fits)[1] if fits else self.reserved if last is None else last
        whole = self._free.pop(start, 0)
        if whole < size:
            grown = -(-(size - whole) // self._grows_by) * self._grows_by
            self.reserved, whole = self.reserved + grown, whole + grown
        self._taken[start] = size
        if whole > size:
            self._free[start + size] = whole - size
        return start

    def free(self, start: int) -> None:
        """Neighbours that are free become one block."""
        size = self._taken.pop(start)
        size += self._free.pop(start + size, 0)
        before = next((first for first, free in self._free.items() if first + free == start), start)
        self._free[before] = self._free.pop(before, 0) + size


# ---------------------------------------------------------------- stand-ins


class _Kernel(torch.autograd.Function):
    """`compute` returns the result and what the kernel keeps for backward, of which the first is multiplied
    with the gradient.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        result, *kept = compute(x, weight)
        ctx.save_for_backward(weight, *kept)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:  # type: ignore[override]
        weight, factor, *_ = ctx.saved_tensors
        if factor.is_floating_point():  # the loss's gradient is fp32
            gradient = gradient.to(factor.dtype)
        return None, gradient * factor, None if weight is None else torch.ones_like(weight)


def _apply(compute: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
    result: Tensor = _Kernel.apply(compute, x, weight)
    return result


def fused_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """The compiled summed_entropy: the logits as they are, and a number a row."""

    def compute(logits: Tensor, _: None) -> tuple[Tensor, ...]:
        rows = logits.amax(-1).float()
        return rows.sum(), logits, rows

    return _apply(compute, logits)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """_fused_rms_norm: the input, the weight, and a number a row."""

    def compute(x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        rows = x.new_empty(x.shape[: x.dim() - len(normalized_shape)], dtype=torch.float32)
        return x * (1 if weight is None else weight), x, rows

    return _apply(compute, input, weight)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """native_dropout: a mask of a byte an element."""

    def compute(x: Tensor, _: None) -> tuple[Tensor, ...]:
        mask = torch.empty_like(x, dtype=torch.bool)
        return x * mask, mask

    return _apply(compute, input) if training and 0 < p < 1 else input


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

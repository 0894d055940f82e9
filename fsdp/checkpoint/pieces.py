"""Boxes within a tensor: their contiguous runs, their share of the tensor's digest, their overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from fsdp.base.digest import ShardDigest, digest_shard

CHUNK = 1 << 16  # as 64-bit numbers these fit a core's own cache
_POSITIONS = np.arange(1, 2 * CHUNK, 2, dtype=np.int64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sizes = tuple[int, ...]


def runs(tensor: torch.Tensor, offsets: Sizes, whole: Sizes) -> Iterator[tuple[int, torch.Tensor]]:
    """Cuts a box into runs that are contiguous in the whole; yields each run's index there, and the run."""
    if tensor.dim() == 0 or tuple(tensor.shape[1:]) == tuple(whole[1:]):
        yield (offsets[0] * math.prod(whole[1:]) if whole else 0), tensor
        return
    stride = math.prod(whole[1:])
    for row in range(tensor.shape[0]):
        for start, run in runs(tensor[row], offsets[1:], whole[1:]):
            yield (offsets[0] + row) * stride + start, run


def digest(tensor: torch.Tensor, offsets: Sizes, whole: Sizes) -> int:
    """This box's share of the whole tensor's digest; the sum of all shares modulo 2⁶⁴ is the digest."""
    return sum(_shard(run).at(start) for start, run in runs(tensor, offsets, whole)) % 2**64


def _shard(tensor: torch.Tensor) -> ShardDigest:
    """The two sums of fsdp.base.digest, by numpy on a CPU: torch would wake threads on the step's cores.

    The chunks share an array: where malloc maps large blocks, a new one for each takes four times as long.
    """
    if tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():
        return digest_shard(tensor)
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()]).numpy()
    numbers = np.empty(min(bits.size, CHUNK), dtype=np.int64)
    plain = weighted = 0
    for start in range(0, bits.size, CHUNK):
        part = numbers[: bits.size - start]
        np.copyto(part, bits[start : start + CHUNK])
        total = int(part.sum())
        plain += total
        weighted += int(np.dot(part, _POSITIONS[: part.size])) + 2 * start * total
    return ShardDigest(bits.size, plain % 2**64, weighted % 2**64, constant=False)


def overlap(a: tuple[Sizes, Sizes], b: tuple[Sizes, Sizes]) -> tuple[Sizes, Sizes] | None:
    """The box that two boxes share, in the whole tensor's coordinates; None where they are disjoint."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(n > 0 for n in sizes) else None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    return (
        tensor.detach().view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
    )

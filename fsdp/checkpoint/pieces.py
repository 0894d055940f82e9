"""Pieces of a tensor as boxes in it: where their elements lie in the whole, and their share of its digest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from fsdp.base.digest import ShardDigest, digest_shard

CHUNK = 1 << 16  # as 64-bit numbers they stay in a core's own cache
_POSITIONS = np.arange(1, 2 * CHUNK, 2, dtype=np.int64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sizes = tuple[int, ...]


def runs(tensor: torch.Tensor, offsets: Sizes, whole: Sizes) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor cut into stretches that are contiguous in the whole, each with its first element's place
    there.
    """
    if tensor.dim() == 0 or tuple(tensor.shape[1:]) == tuple(whole[1:]):
        yield (offsets[0] * math.prod(whole[1:]) if whole else 0), tensor
        return
    stride = math.prod(whole[1:])
    for row in range(tensor.shape[0]):
        for start, run in runs(tensor[row], offsets[1:], whole[1:]):
            yield (offsets[0] + row) * stride + start, run


def digest(tensor: torch.Tensor, offsets: Sizes, whole: Sizes) -> int:
    """This box's share of the whole tensor's digest; shares add up modulo 2⁶⁴."""
    return sum(_shard(run).at(start) for start, run in runs(tensor, offsets, whole)) % 2**64


def _shard(tensor: torch.Tensor) -> ShardDigest:
    """fsdp.base.digest's two sums. On a CPU by numpy, in this thread alone: torch would wake threads whose
    cores the step needs.
    """
    if tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():
        return digest_shard(tensor)
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()]).numpy()
    plain = weighted = 0
    for start in range(0, bits.size, CHUNK):
        part = bits[start : start + CHUNK].astype(np.int64)
        total = int(part.sum())
        plain += total
        weighted += int(np.dot(part, _POSITIONS[: part.size])) + 2 * start * total
    return ShardDigest(bits.size, plain % 2**64, weighted % 2**64, constant=False)


def overlap(a: tuple[Sizes, Sizes], b: tuple[Sizes, Sizes]) -> tuple[Sizes, Sizes] | None:
    """The box in both, in the whole's coordinates; None where they do not meet."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(n > 0 for n in sizes) else None

"""A digest of a tensor that is independent of its sharding.

Σ bitsᵢ·(2i+1) mod 2⁶⁴ over a tensor's elements in their global order. A shard keeps two sums, Σ bits and Σ
bits·(2j+1) with its own j from 0; a shard that starts at element s adds 2s·Σ bits. So the sums of any
sharding give the same digest, and equal shards on two ranks have equal sums. It detects accidents (a flipped
bit, mixed or swapped values), not an adversary.

Also the dtypes of --precision and --checkpoint.export_dtype by their names in flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

CHUNK = 1 << 18
_WORD = 2**64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ShardDigest:
    """The two sums of one contiguous piece. `constant`: all its elements are equal (zeros, ones)."""

    numel: int
    plain: int
    weighted: int
    constant: bool

    def at(self, start: int) -> int:
        """Its part of the whole tensor's digest; `start` is the global index of its first element."""
        return (self.weighted + 2 * start * self.plain) % _WORD


def digest_shard(tensor: torch.Tensor) -> ShardDigest:
    """The sums of a local tensor, in chunks: the extra memory is a few MB at any size.

    They stay on its device, where int64 wraps modulo 2⁶⁴: the host waits for a device once a tensor.
    """
    flat = _as_bits(tensor)
    if not flat.numel():
        return ShardDigest(0, 0, 0, True)
    first = flat[0]
    plain, weighted = (torch.zeros((), dtype=torch.int64, device=flat.device) for _ in range(2))
    constant = torch.ones((), dtype=torch.bool, device=flat.device)
    positions = torch.arange(1, 2 * CHUNK, 2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].to(torch.int64)
        total = bits.sum()
        plain += total
        weighted += (bits * positions[: bits.numel()]).sum() + 2 * start * total
        constant &= (bits == first).all()
    found = torch.stack([plain, weighted, constant.long()]).tolist()
    return ShardDigest(flat.numel(), found[0] % _WORD, found[1] % _WORD, bool(found[2]))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(-1).view(_BITS[flat.element_size()]) if flat.numel() else flat.view(-1).to(torch.int64)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same numbers; a NaN is the same as one of the same bits."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    if alike and torch.equal(_as_bits(one), _as_bits(other)):
        return True
    # 0 and -0, or of two dtypes; torch compares no numbers of 8 bits
    return one.element_size() > 1 and torch.equal(one, other)


def as_int64(word: int) -> int:
    """A word of 64 bits as torch.int64 holds it."""
    return (word + _WORD // 2) % _WORD - _WORD // 2


def combine(parts: list[int]) -> int:
    """The whole tensor's digest from its pieces' `at` values, in any order."""
    return sum(parts) % _WORD


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def widest_floating(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The widest floating-point one; float32 if there is none."""
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return max(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)

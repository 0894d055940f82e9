"""Initial values of parameters: a few distributions as data, drawn from counter-based streams.

Each parameter has its own stream, Philox keyed by (seed, name); element i of the parameter is element i of
the stream. So a rank draws its own shard alone, with the same bits however the parameter is sharded. Not
here: the distribution of each parameter (`param_inits()` of each model), or which rank draws which part
(fsdp/parallel/materialize.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

BLOCK = 1 << 15
"""Elements computed together, always at the same multiples: an element has the same bits in any request."""

_Bits: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True)
class Normal:
    """Mean 0; `clip=k` clamps at ±k·std."""

    std: float
    clip: float | None = None


@dataclass(frozen=True)
class Uniform:
    """Between -bound and bound."""

    bound: float


@dataclass(frozen=True)
class Constant:
    value: float


Init = Normal | Uniform | Constant


def draw(
    init: Init, seed: int, name: str, start: int, numel: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns elements start … start + numel of parameter `name`, flat; drawn in float32, then cast."""
    return draw_into(torch.empty(numel, dtype=dtype), init, seed, name, start)


def draw_into(out: torch.Tensor, init: Init, seed: int, name: str, start: int = 0) -> torch.Tensor:
    """Fills a contiguous tensor, on any device, with the elements from `start` on; needs about 1 MiB."""
    flat = out.detach().view(-1)
    if isinstance(init, Constant):
        flat.fill_(init.value)
        return out
    for at, values in _pieces(init, seed, name, start, flat.numel()):
        flat[at : at + len(values)] = torch.from_numpy(values)
    return out


def _pieces(
    init: Normal | Uniform, seed: int, name: str, start: int, numel: int
) -> Iterator[tuple[int, _Floats]]:
    """Yields (offset in the request, values) by blocks; the next piece overwrites the values."""
    stream = _stream(seed, name, start // BLOCK)
    # Allocated once and reused: new arrays of this size can cost a page fault per page, in every block.
    bits, values, work = (
        np.empty(BLOCK, np.uint32),
        np.empty(BLOCK, np.float32),
        np.empty((4, BLOCK // 2), np.float32),
    )
    for begin in range(start // BLOCK * BLOCK, start + numel, BLOCK):
        for at in range(0, BLOCK, BLOCK // 4):
            bits[at : at + BLOCK // 4] = stream.random_raw(BLOCK // 8).view(np.uint32)
        if isinstance(init, Normal):
            _normal(bits, values, work)
        else:
            _uniform(bits, values)
        _scale(values, init)
        low, high = max(start, begin), min(start + numel, begin + BLOCK)
        yield low - start, values[low - begin : high - begin]


def name_seed(seed: int, name: str, nbytes: int) -> int:
    """A seed for one tensor: the same on every rank and in every process, which hash() is not."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=nbytes).digest(), "little")


def _stream(seed: int, name: str, block: int) -> np.random.Philox:
    stream = np.random.Philox(key=name_seed(seed, name, 16))
    if block:
        stream.advance(block * (BLOCK // 8))  # one step of the counter is 256 bits
    return stream


def _scale(values: _Floats, init: Normal | Uniform) -> None:
    if isinstance(init, Uniform):
        values *= init.bound
        return
    values *= init.std
    if init.clip is not None:
        limit = np.float32(init.clip * init.std)
        np.clip(values, -limit, limit, out=values)


def _uniform(bits: _Bits, values: _Floats) -> None:
    values[:] = bits.view(np.int32)
    values *= 2.0**-31


# The Box-Muller transform, with logarithm, sine and cosine computed by +, -, ×, ÷ and √, each rounded
# as in IEEE 754: the bits do not depend on the processor or on numpy's choice of vector instructions, as
# those of np.log and np.sin do. Coefficients: minimax over the interval, error below 3e-8; lowest power
# first.
_LOG = (1.999999998614443, 0.6666681637195991, 0.39974756781544346, 0.2992651445744185)
_COS = (0.9999999724233197, -0.4999985669584189, 0.04165502688395579, -0.00135859085068812)
_SIN = (0.9999999969263443, -0.16666650699202976, 0.008332036875168524, -0.00019504022001240185)
_SQRT_HALF_BITS = 0x3F3504F3


def _normal(bits: _Bits, values: _Floats, work: _Floats) -> None:
    """Fills `values`: the first half of the bits gives radii, the second angles; each pair gives two values,
    one in each half.
    """
    half = len(bits) // 2
    first, second, angles = values[:half], values[half:], bits[half:]
    radius, phase, square, signs = work
    _minus_log(bits[:half], radius, work[1:])
    np.sqrt(radius, out=radius)
    phase[:] = angles.view(np.int32)
    phase *= math.pi / 4 * 2.0**-31
    np.multiply(phase, phase, out=square)
    _polynomial(square, _SIN, out=second)
    second *= phase
    cosine = phase
    _polynomial(square, _COS, out=cosine)
    # Turned by π/4 (1/√2 goes into the radius) the phase covers one quadrant; two spare bits choose among the
    # four.
    np.subtract(cosine, second, out=first)
    np.add(cosine, second, out=second)
    for part, bit in ((first, 0), (second, 1)):
        part *= radius
        np.right_shift(angles, bit, out=signs.view(np.uint32))
        np.left_shift(signs.view(np.uint32), 31, out=signs.view(np.uint32))
        np.bitwise_xor(part.view(np.uint32), signs.view(np.uint32), out=part.view(np.uint32))


def _minus_log(bits: _Bits, out: _Floats, work: _Floats) -> None:
    """-ln u of u = (k + ½)/2³¹, k the upper 31 bits: from 22.2 down to 0, and never infinite."""
    s, mantissa, spare = work
    exponent, pattern = spare.view(np.int32), out.view(np.int32)
    np.right_shift(bits, 1, out=s.view(np.uint32))
    out[:] = s.view(np.int32)
    out += 0.5
    # out = m·2ᵉ with m in [√½, √2), read off the float's bits; ln m = 2·artanh s, s = (m-1)/(m+1)
    np.subtract(pattern, _SQRT_HALF_BITS, out=exponent)
    np.right_shift(exponent, 23, out=exponent)
    np.left_shift(exponent, 23, out=s.view(np.int32))
    np.subtract(pattern, s.view(np.int32), out=pattern)
    np.subtract(out, 1, out=s)
    out += 1
    s /= out
    np.multiply(s, s, out=out)
    _polynomial(out, _LOG, out=mantissa)
    mantissa *= s
    out[:] = np.subtract(31, exponent, out=exponent)
    out *= math.log(2)
    out -= mantissa


def _polynomial(x: _Floats, coefficients: tuple[float, ...], out: _Floats) -> None:
    np.multiply(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        out += coefficient
        out *= x
    out += coefficients[0]


def fill_from_global(tensor: torch.Tensor, init: Init) -> None:
    """Draws from torch's own generator, with the same distribution: for a model that is built on its own."""
    with torch.no_grad():
        if isinstance(init, Constant):
            tensor.fill_(init.value)
        elif isinstance(init, Uniform):
            tensor.uniform_(-init.bound, init.bound)
        else:
            tensor.normal_(0.0, init.std)
            if init.clip is not None:
                tensor.clamp_(-init.clip * init.std, init.clip * init.std)

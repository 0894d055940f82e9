"""Initial values drawn on a CUDA device, with the bits of init.py, which draws them on the host.

Philox in int64, products of 64 bits in halves of 32; the normal values by +, -, ×, ÷ and √ of fp32, each an
operation of its own, so that none is contracted with the next. The first use on a device compares a block
with the host's: where a bit differs, the host draws. No CUDA device has run this yet; the tests compare it on
a CPU.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor

from fsdp.base.digest import as_int64
from fsdp.models import init as host
from fsdp.models.init import BLOCK, Constant, Init, Normal, Uniform, name_seed

log = logging.getLogger(__name__)

BLOCKS = 64
"""Blocks computed together: about 100 MiB of temporaries."""
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def draw_into(out: Tensor, init: Init, seed: int, name: str, start: int = 0) -> Tensor:
    """Draws as init.draw_into does, on the tensor's own device if that gives the host's bits."""
    if isinstance(init, Constant) or out.device.type != "cuda" or not draws_as_the_host(out.device):
        return host.draw_into(out, init, seed, name, start)
    return fill(out, init, seed, name, start)


@functools.cache
def draws_as_the_host(device: torch.device) -> bool:
    """Compares a block of each distribution. The host waits for the device."""
    for init in (Normal(0.02, clip=3.0), Uniform(0.1)):
        there = fill(torch.empty(BLOCK, device=device), init, 0, "compared").cpu()
        if not torch.equal(there, host.draw(init, 0, "compared", 0, BLOCK)):
            log.warning("%s does not draw the host's bits: initial weights are drawn on the host", device)
            return False
    return True


def fill(out: Tensor, init: Normal | Uniform, seed: int, name: str, start: int = 0) -> Tensor:
    """Fills a contiguous tensor with the elements from `start` on."""
    flat, key = out.detach().view(-1), name_seed(seed, name, 16)
    end = start + flat.numel()
    for first in range(start // BLOCK, -(-end // BLOCK), BLOCKS):
        last = min(first + BLOCKS, -(-end // BLOCK))
        values = _values(_words(key, first, last, flat.device), init).view(-1)
        low, high = max(start, first * BLOCK), min(end, last * BLOCK)
        flat[low - start : high - start] = values[low - first * BLOCK : high - first * BLOCK]
    return out


# ---------------------------------------------------------------- Philox 4×64-10, as numpy's


def _words(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """int32 words of these blocks, a row each. numpy counts before it draws."""
    steps = BLOCK // 8
    c0 = torch.arange(first * steps + 1, last * steps + 1, dtype=torch.int64, device=device)
    c1, c2, c3 = (torch.zeros_like(c0) for _ in range(3))
    keys = [key % 2**64, key >> 64]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(c, m) for c, m in zip((c0, c2), _MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ as_int64(keys[0]), low1, high0 ^ c3 ^ as_int64(keys[1]), low0
        keys = [(k + step) % 2**64 for k, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack([c0, c1, c2, c3], dim=-1).view(torch.int32).view(last - first, BLOCK)


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of a product of unsigned numbers."""
    low, high, m_low, m_high = a & _MASK, _upper(a), m & _MASK, m >> 32
    middle = high * m_low + _upper(low * m_low)
    other = low * m_high + (middle & _MASK)
    return high * m_high + _upper(middle) + _upper(other), a * as_int64(m)


def _upper(a: Tensor) -> Tensor:
    return (a >> 32) & _MASK


# ---------------------------------------------------------------- distributions: the order of init.py


def _values(words: Tensor, init: Normal | Uniform) -> Tensor:
    if isinstance(init, Uniform):
        return words.float().mul_(2.0**-31).mul_(init.bound)
    values = _normal(words).mul_(init.std)
    if init.clip is not None:
        limit = torch.tensor(init.clip * init.std, dtype=torch.float32).item()
        values.clamp_(-limit, limit)
    return values


def _normal(words: Tensor) -> Tensor:
    half = BLOCK // 2
    # By fp64, whose rounding to fp32 is exact for √: MKL's of fp32 is not, on a CPU.
    radius, angles = _minus_log(words[:, :half]).double().sqrt_().float(), words[:, half:]
    phase = angles.float().mul_(math.pi / 4 * 2.0**-31)
    square = phase * phase
    sine, cosine = _polynomial(square, host._SIN).mul_(phase), _polynomial(square, host._COS)
    parts = ((cosine - sine).mul_(radius), (cosine + sine).mul_(radius))
    signs = ((angles >> bit) << 31 for bit in (0, 1))
    return torch.cat(
        [
            (part.view(torch.int32) ^ sign).view(torch.float32)
            for part, sign in zip(parts, signs, strict=True)
        ],
        dim=1,
    )


def _minus_log(words: Tensor) -> Tensor:
    drawn = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).view(torch.int32)
    exponent = (drawn - host._SQRT_HALF_BITS) >> 23
    mantissa = (drawn - (exponent << 23)).view(torch.float32)
    s = (mantissa - 1).div_(mantissa + 1)
    series = _polynomial(s * s, host._LOG).mul_(s)
    return (31 - exponent).float().mul_(math.log(2)).sub_(series)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    out = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[0])

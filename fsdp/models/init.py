"""Initial values of parameters: a few distributions as data, drawn from counter-based streams.

Each parameter has its own stream, Philox keyed by (seed, name); element i of the parameter is element i of
the stream. So a rank draws its own shard alone, with the same bits however the parameter is sharded, and
builds a whole model alike. numpy draws the words on the host; on a CUDA device they are drawn there, in
int64. The first use on a device compares a block with the host's: where a bit differs, the host draws. Not
here: the distribution of each parameter (`param_inits()` of each model), or
which rank draws which part (fsdp/shard/materialize.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.devices import as_int64
from fsdp.base.torch_private import convert_tensors
from fsdp.models.units import all_names

log = logging.getLogger(__name__)

BLOCK = 1 << 15
"""Elements computed together, always at the same multiples: an element has the same bits in any request."""
HOST_BLOCKS, DEVICE_BLOCKS = 4, 64
"""Blocks computed together: about 100 MiB of temporaries on a device."""


@dataclass(frozen=True)
class Normal:
    """Mean 0."""

    std: float


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
) -> Tensor:
    """Returns elements start … start + numel of parameter `name`, flat; drawn in float32, then cast."""
    return draw_into(torch.empty(numel, dtype=dtype), init, seed, name, start)


def draw_into(out: Tensor, init: Init, seed: int, name: str, start: int = 0) -> Tensor:
    """Fills a contiguous tensor, on any device, with the elements from `start` on."""
    if isinstance(init, Constant):
        return out.detach().fill_(init.value)
    if out.device.type == "cuda" and draws_as_the_host(out.device):
        return _fill(out, init, name_seed(seed, name, 16), start, _device_words, DEVICE_BLOCKS)
    return _fill(out, init, name_seed(seed, name, 16), start, _host_words, HOST_BLOCKS)


def name_seed(seed: int, name: str, nbytes: int) -> int:
    """A seed for one tensor: the same on every rank and in every process, which hash() is not."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=nbytes).digest(), "little")


@functools.cache
def draws_as_the_host(device: torch.device) -> bool:
    """Compares a block of each distribution. The host waits for the device."""
    for init in (Normal(0.02), Uniform(0.1)):
        key = name_seed(0, "compared", 16)
        drawn = _fill(torch.empty(BLOCK, device=device), init, key, 0, _device_words, 1).cpu()
        if not torch.equal(drawn, draw(init, 0, "compared", 0, BLOCK)):
            log.warning("%s does not draw the host's bits: initial weights are drawn on the host", device)
            return False
    return True


def _fill(
    out: Tensor, init: Normal | Uniform, key: int, start: int, words: Callable[..., Tensor], together: int
) -> Tensor:
    flat = out.detach().view(-1)
    end = start + flat.numel()
    for first in range(start // BLOCK, -(-end // BLOCK), together):
        last = min(first + together, -(-end // BLOCK))
        device = flat.device if words is _device_words else torch.device("cpu")
        values = _values(words(key, first, last, device), init).view(-1)
        low, high = max(start, first * BLOCK), min(end, last * BLOCK)
        flat[low - start : high - start] = values[low - first * BLOCK : high - first * BLOCK]
    return out


# ---------------------------------------------------------------- Philox 4×64-10: int32 words, a row a block


def _host_words(key: int, first: int, last: int, device: torch.device) -> Tensor:
    stream = np.random.Philox(key=key)
    if first:
        stream.advance(first * (BLOCK // 8))  # one step of the counter is 256 bits
    words = stream.random_raw((last - first) * BLOCK // 2).view(np.int32)
    return torch.from_numpy(words).view(last - first, BLOCK)


_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def _device_words(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """numpy counts before it draws."""
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


# ---------------------------------------------------------------- words → values

# The Box-Muller transform, with logarithm, sine and cosine computed by +, -, ×, ÷ and √, each an operation of
# its own and rounded as in IEEE 754: the bits do not depend on the processor or on a library's vector
# instructions, as those of torch.log and torch.sin do. Coefficients: minimax over the interval, error below
# 3e-8; lowest power first.
_LOG = (1.999999998614443, 0.6666681637195991, 0.39974756781544346, 0.2992651445744185)
_COS = (0.9999999724233197, -0.4999985669584189, 0.04165502688395579, -0.00135859085068812)
_SIN = (0.9999999969263443, -0.16666650699202976, 0.008332036875168524, -0.00019504022001240185)
_SQRT_HALF_BITS = 0x3F3504F3


def _values(words: Tensor, init: Normal | Uniform) -> Tensor:
    if isinstance(init, Uniform):
        return words.float().mul_(2.0**-31).mul_(init.bound)
    return _normal(words).mul_(init.std)


def _normal(words: Tensor) -> Tensor:
    """The first half of a block gives radii, the second angles; each pair gives two values, one in each
    half.
    """
    half = BLOCK // 2
    # By fp64, whose rounding to fp32 is exact for √: MKL's of fp32 is not, on a CPU.
    radius, angles = _minus_log(words[:, :half]).double().sqrt_().float(), words[:, half:]
    # Turned by π/4 (1/√2 goes into the radius) the phase covers one quadrant; two spare bits choose among the
    # four.
    phase = angles.float().mul_(math.pi / 4 * 2.0**-31)
    square = phase * phase
    sine, cosine = _polynomial(square, _SIN).mul_(phase), _polynomial(square, _COS)
    signs = [(angles >> bit) << 31 for bit in (0, 1)]
    parts = [(cosine - sine).mul_(radius), (cosine + sine).mul_(radius)]
    signed = (part.view(torch.int32) ^ sign for part, sign in zip(parts, signs, strict=True))
    return torch.cat([part.view(torch.float32) for part in signed], dim=1)


def _minus_log(words: Tensor) -> Tensor:
    """-ln u of u = (k + ½)/2³¹, k the upper 31 bits: from 22.2 down to 0, and never infinite.

    A number is m·2ᵉ with m in [√½, √2), read off its bits; ln m = 2·artanh s, s = (m-1)/(m+1).
    """
    drawn = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).view(torch.int32)
    exponent = (drawn - _SQRT_HALF_BITS) >> 23
    mantissa = (drawn - (exponent << 23)).view(torch.float32)
    s = (mantissa - 1).div_(mantissa + 1)
    series = _polynomial(s * s, _LOG).mul_(s)
    return (31 - exponent).float().mul_(math.log(2)).sub_(series)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    out = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[0])


# ---------------------------------------------------------------- a whole model on one device


def to_empty(
    model: nn.Module, device: str | torch.device, empty: Callable[[Tensor], Tensor] | None = None
) -> None:
    """As nn.Module.to_empty, but keeps tied parameters and buffers tied, which that makes separate tensors.

    `empty` allocates each tensor, if its memory is not torch's.
    """
    tied = [names for names in all_names(model).values() if len(names) > 1]
    convert_tensors(model, empty or (lambda tensor: torch.empty_like(tensor, device=device)))
    for first, *others in tied:
        owner, _, key = first.rpartition(".")
        tensor = getattr(model.get_submodule(owner), key)
        for other in others:
            owner, _, key = other.rpartition(".")
            if getattr(model.get_submodule(owner), key) is not tensor:
                setattr(model.get_submodule(owner), key, tensor)


def persistent(model: nn.Module) -> list[str]:
    """Returns the names of the parameters and buffers in the state dict."""
    saved = model.state_dict().keys()
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in saved]


def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draws each whole parameter by its first name in named_parameters(): tied ones are drawn once."""
    inits: dict[str, Any] = model.param_inits()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        draw_into(parameter, inits[name], seed, name)


def fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    if hasattr(model, "init_buffers"):
        model.init_buffers(torch.device(device))  # type: ignore[operator]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the host's random streams, and restores them afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)

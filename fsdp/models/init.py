"""Initial values of parameters: a few distributions as data, drawn from counter-based streams.

Each parameter has its own stream, Philox keyed by (seed, name); element i of the parameter is element i of
the stream. So a rank draws its own shard alone, with the same bits however the parameter is sharded, and
builds a whole model alike. On a CUDA device the same bits are drawn there: Philox in int64, products of 64
bits in halves of 32; the normal values by +, -, ×, ÷ and √ of fp32, each an operation of its own, so that
none is contracted with the next. The first use on a device compares a block with the host's: where a bit
differs, the host draws. Not here: the distribution of each parameter (`param_inits()` of each model), or
which rank draws which part (fsdp/parallel/materialize.py).
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
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.digest import as_int64
from fsdp.base.torch_private.core import convert_tensors
from fsdp.models.units import all_names

log = logging.getLogger(__name__)

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
) -> Tensor:
    """Returns elements start … start + numel of parameter `name`, flat; drawn in float32, then cast."""
    return draw_into(torch.empty(numel, dtype=dtype), init, seed, name, start)


def draw_into(out: Tensor, init: Init, seed: int, name: str, start: int = 0) -> Tensor:
    """Fills a contiguous tensor, on any device, with the elements from `start` on; needs about 1 MiB on the
    host.
    """
    flat = out.detach().view(-1)
    if isinstance(init, Constant):
        flat.fill_(init.value)
        return out
    if out.device.type == "cuda" and draws_as_the_host(out.device):
        return fill_on_device(out, init, seed, name, start)
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


def fill_from_global(tensor: Tensor, init: Init) -> None:
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


# ---------------------------------------------------------------- on a CUDA device, in the host's order

BLOCKS = 64
"""Blocks computed together: about 100 MiB of temporaries."""
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


@functools.cache
def draws_as_the_host(device: torch.device) -> bool:
    """Compares a block of each distribution. The host waits for the device."""
    for init in (Normal(0.02, clip=3.0), Uniform(0.1)):
        there = fill_on_device(torch.empty(BLOCK, device=device), init, 0, "compared").cpu()
        if not torch.equal(there, draw(init, 0, "compared", 0, BLOCK)):
            log.warning("%s does not draw the host's bits: initial weights are drawn on the host", device)
            return False
    return True


def fill_on_device(out: Tensor, init: Normal | Uniform, seed: int, name: str, start: int = 0) -> Tensor:
    """Fills a contiguous tensor with the elements from `start` on."""
    flat, key = out.detach().view(-1), name_seed(seed, name, 16)
    end = start + flat.numel()
    for first in range(start // BLOCK, -(-end // BLOCK), BLOCKS):
        last = min(first + BLOCKS, -(-end // BLOCK))
        values = _device_values(_words(key, first, last, flat.device), init).view(-1)
        low, high = max(start, first * BLOCK), min(end, last * BLOCK)
        flat[low - start : high - start] = values[low - first * BLOCK : high - first * BLOCK]
    return out


def _words(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """int32 words of these blocks, a row each, by Philox 4×64-10. numpy counts before it draws."""
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


def _device_values(words: Tensor, init: Normal | Uniform) -> Tensor:
    if isinstance(init, Uniform):
        return words.float().mul_(2.0**-31).mul_(init.bound)
    values = _device_normal(words).mul_(init.std)
    if init.clip is not None:
        limit = torch.tensor(init.clip * init.std, dtype=torch.float32).item()
        values.clamp_(-limit, limit)
    return values


def _device_normal(words: Tensor) -> Tensor:
    half = BLOCK // 2
    # By fp64, whose rounding to fp32 is exact for √: MKL's of fp32 is not, on a CPU.
    radius, angles = _device_minus_log(words[:, :half]).double().sqrt_().float(), words[:, half:]
    phase = angles.float().mul_(math.pi / 4 * 2.0**-31)
    square = phase * phase
    sine, cosine = _device_polynomial(square, _SIN).mul_(phase), _device_polynomial(square, _COS)
    parts = ((cosine - sine).mul_(radius), (cosine + sine).mul_(radius))
    signs = ((angles >> bit) << 31 for bit in (0, 1))
    return torch.cat(
        [
            (part.view(torch.int32) ^ sign).view(torch.float32)
            for part, sign in zip(parts, signs, strict=True)
        ],
        dim=1,
    )


def _device_minus_log(words: Tensor) -> Tensor:
    drawn = ((words >> 1) & 0x7FFFFFFF).float().add_(0.5).view(torch.int32)
    exponent = (drawn - _SQRT_HALF_BITS) >> 23
    mantissa = (drawn - (exponent << 23)).view(torch.float32)
    s = (mantissa - 1).div_(mantissa + 1)
    series = _device_polynomial(s * s, _LOG).mul_(s)
    return (31 - exponent).float().mul_(math.log(2)).sub_(series)


def _device_polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
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
    kept = model.state_dict().keys()
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in kept]


def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draws each whole parameter by its first name in named_parameters(): tied ones are drawn once."""
    inits: dict[str, Any] = model.param_inits()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        draw_into(parameter, inits[name], seed, name)


def fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    if hasattr(model, "init_buffers"):
        model.init_buffers(torch.device(device))  # type: ignore[operator]


def seed_streams(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, for this device only. If CUDA is not initialised, that keeps a stack trace per
    call: a fifth of a millisecond a step. The streams of Python and numpy too, from which a forward may draw
    (SpecAugment of transformers).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


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

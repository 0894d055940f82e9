"""The kernels of --speed.attention side by side, for bench.gpu: gradients in bf16 and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_runs import Bench, need
from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.shard.compute import KERNELS, PACKAGES, attention_kernel, check_attention

SHAPES = {
    "12 heads of 64, 1024 tokens": (32, 12, 12, 1024, 64),
    "32 and 8 heads of 64, 2048 tokens": (4, 32, 8, 2048, 64),
}
"""In models of 124M and 1B parameters: batch, heads of queries and of keys, tokens, width of a head."""
SMALL = {"2 heads of 16, 64 tokens": (1, 2, 2, 64, 16)}
OVER_BEST = 1.2
"""Most that the default takes, over the fastest kernel."""
OFF = 2e-2
TIMES = 20


def attention(bench: Bench) -> dict[str, Any]:
    """Forward and backward of each kernel that computes here."""
    figures: dict[str, Any] = {}
    for name, shape in (SHAPES if bench.cuda else SMALL).items():
        times = times_of(torch.device(bench.device), shape)
        figures[name] = ", ".join(f"{kernel} {took:.3g} ms" for kernel, took in times.items())
        over = times["auto"] / min(times.values())
        need(not bench.cuda or over <= OVER_BEST, f"auto takes {over:.2f} of the fastest's time: {figures}")
    return figures


def times_of(device: torch.device, shape: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of each kernel that the device has; Failed if one's gradients are not those of fp32."""
    drawn = torch.Generator().manual_seed(0)
    batch, heads, few, *rest = shape
    query, key, value, above = (
        torch.randn(batch, n, *rest, generator=drawn).to(device) for n in (heads, few, few, heads)
    )

    def cast(dtype: torch.dtype) -> list[Tensor]:
        return [*(one.to(dtype, copy=True).requires_grad_() for one in (query, key, value)), above.to(dtype)]

    def gradients(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != few)
        return list(torch.autograd.grad(output, (q, k, v), gradient))

    halves = cast(torch.bfloat16)

    with attention_kernel(SpeedSection(attention="math")):
        exact = gradients(*cast(torch.float32))
    times = dict[str, float]()
    for name in ("auto", *KERNELS, *PACKAGES):
        speed = SpeedSection(attention=name)  # type: ignore[arg-type]
        try:
            check_attention(speed, device)
            with attention_kernel(speed):
                found = gradients(*halves)
                times[name] = milliseconds(lambda: gradients(*halves), device)
        except ConfigError:
            continue  # not installed, or a kernel of another device
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            continue  # of no such shape or GPU
        pairs = zip(found, exact, strict=True)
        off = max(float((ours.float() - right).norm() / right.norm()) for ours, right in pairs)
        need(off < OFF, f"gradients of {name} are off by {off:.1e}")
    return times


def milliseconds(call: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return 1e3 * (time.perf_counter() - began) / times

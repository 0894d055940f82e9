"""What operators take beside tensors on a CPU: the kernel's count beside the planner's rules.

    python -m bench.plan_operators       convolutions, LSTM, upsampling and products; a minute or two

One process of one thread, an operator at a time: the peak of a call above what is resident before and after
it. Products take nothing within a call: what they leave behind is measured. The rules:
fsdp/plan/scratch.py. Results: bench/results/plan_operators.md.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.plan_real import RETURNS_FREED_MEMORY
from bench.processes import reset_peak_memory
from fsdp.base import proc
from fsdp.base.torch_private.core import TorchDispatchMode, schema
from fsdp.dist.shards import tensors_in
from fsdp.plan.scratch import PRIMITIVE_CODE, RULES, scratch_bytes
from fsdp.rundir.atomic_write import write_atomically

RESULTS = Path(__file__).parent / "results" / "plan_operators.md"
MIB = 1 << 20
DTYPES = (torch.float32, torch.bfloat16)
CALLS = 3
"""The last one is measured: code is generated in the first."""

Conv = tuple[int, int, int, int, int, int, int]
CONVOLUTIONS: tuple[Conv, ...] = (
    # samples, channels in, out, height and width, kernel, stride, groups
    (4, 128, 384, 64, 3, 1, 1), (4, 64, 192, 64, 3, 1, 1), (4, 512, 512, 16, 3, 1, 1),
    (4, 1024, 512, 16, 3, 1, 1), (1, 128, 384, 128, 3, 1, 1), (4, 256, 1024, 32, 1, 1, 1),
    (4, 3, 128, 64, 3, 1, 1), (4, 128, 3, 64, 3, 1, 1), (8, 100, 200, 64, 3, 1, 1),
    (4, 256, 256, 32, 3, 1, 8), (4, 96, 96, 64, 7, 1, 96), (4, 384, 384, 16, 3, 1, 384),
)  # fmt: skip
CHANNELS_LAST: tuple[Conv, ...] = (
    (4, 96, 96, 16, 7, 1, 96), (4, 96, 96, 64, 7, 1, 96), (4, 768, 768, 8, 7, 1, 768),
    (4, 768, 768, 16, 7, 1, 768),
    (4, 384, 384, 16, 5, 1, 384), (4, 384, 384, 16, 9, 1, 384), (4, 384, 384, 16, 3, 1, 384),
    (4, 384, 768, 4, 2, 2, 1), (4, 256, 256, 32, 3, 1, 1),
)  # fmt: skip
LSTMS = ((4, 64, 1024), (8, 32, 512), (3, 50, 300))
"""Samples, steps, width."""
PRODUCTS = ((256, 512, 2048), (256, 512, 8192), (4, 1024, 3072), (4096, 96, 384), (256, 4096, 4096))
"""Rows, inputs, outputs of a linear layer."""


@dataclass(frozen=True)
class Call:
    """Bytes of one call."""

    name: str
    measured: float
    planned: float
    left: float
    """Beyond its outputs, still resident after it."""


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
        reset_peak_memory()
        before = proc.memory_bytes()
        out = func(*args, **(kwargs or {}))
        after = proc.memory_bytes()
        files = after["RssFile"] - before["RssFile"]
        measured = after["VmHWM"] - max(before["VmRSS"] + files, after["VmRSS"])
        storages = [tensor.untyped_storage() for tensor in tensors_in(out)]
        new = sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in known}.values())
        name = schema(func).name.partition("::")[2]
        left = after["VmRSS"] - files - before["VmRSS"] - new
        self.calls.append(Call(name, measured, scratch_bytes(name, args, out), left))
        return out


def measured(run: Callable[[], Tensor], calls: int = CALLS) -> list[Call]:
    for _ in range(calls):
        with Calls() as seen:
            made = run()
            made.backward(torch.ones_like(made))
        del made
    return seen.calls


def convolution(sizes: Conv, dtype: torch.dtype, *, last: bool) -> list[Call]:
    samples, before, after, side, kernel, stride, groups = sizes
    padding = kernel // 2 if stride == 1 else 0
    layer = nn.Conv2d(before, after, kernel, stride, padding, groups=groups).to(dtype)
    x = torch.randn(samples, before, side, side).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    x.requires_grad_(True)
    return measured(lambda: layer(x))


def lstm(sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Call]:
    samples, steps, width = sizes
    layer = nn.LSTM(width, width, batch_first=True, dtype=dtype)
    x = torch.randn(samples, steps, width, dtype=dtype, requires_grad=True)
    return measured(lambda: layer(x)[0])


def upsample(sizes: tuple[int, int], dtype: torch.dtype) -> list[Call]:
    channels, side = sizes
    x = torch.randn(4, channels, side, side).to(dtype).requires_grad_(True)
    return measured(lambda: nn.functional.interpolate(x, scale_factor=2.0))


def product(sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Call]:
    rows, before, after = sizes
    layer = nn.Linear(before, after, bias=False, dtype=dtype)
    x = torch.randn(rows, before, dtype=dtype, requires_grad=True)
    return measured(lambda: layer(x), calls=1)


def rows() -> Iterator[tuple[str, list[Call]]]:
    torch.set_num_threads(1)
    for dtype in DTYPES:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        for last in (False, True):
            for sizes in CHANNELS_LAST if last else CONVOLUTIONS:
                n, before, after, side, kernel, stride, groups = sizes
                name = f"convolution{', channels last' if last else ''} | {n} × {before} × {side} × {side}"
                name += f" → {after}, kernel {kernel}{f', stride {stride}' if stride > 1 else ''}"
                name += f", {groups} groups" if groups > 1 else ""
                yield f"{name} | {short}", convolution(sizes, dtype, last=last)
        for of_lstm in LSTMS:
            yield f"LSTM | {' × '.join(map(str, of_lstm))} | {short}", lstm(of_lstm, dtype)
        for picture in ((256, 32), (128, 64)):
            yield (
                f"upsampling | 4 × {picture[0]} × {picture[1]} × {picture[1]} | {short}",
                upsample(picture, dtype),
            )


def left_behind() -> list[list[float]]:
    """By dtype and size: what the products of one linear layer, forward and backward, leave."""
    torch.set_num_threads(1)
    return [[sum(call.left for call in product(p, dtype)) for p in PRODUCTS] for dtype in DTYPES]


def table(found: list[tuple[str, list[Call]]], left: list[list[float]]) -> list[str]:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    lines = [f"# Operators beside tensors ({machine})", ""]
    lines += ["`python -m bench.plan_operators`: one thread, the third call of each.", ""]
    lines += [
        "| operator | sizes | dtype | forward, MiB | planned | backward, MiB | planned |",
        "|---" * 7 + "|",
    ]
    off = []
    for name, calls in found:
        pair = [call for call in calls if call.name in RULES]
        cells = " | ".join(f"{call.measured / MIB:.2f} | {call.planned / MIB:.2f}" for call in pair)
        lines.append(f"| {name} | {cells} |")
        off += [abs(call.planned - call.measured) / MIB for call in pair]
    lines += ["", f"{len(off)} calls: median {statistics.median(off):.2f} MiB off, worst {max(off):.2f}.", ""]
    lines += ["Resident after the first forward and backward of a linear layer, beyond its tensors:", ""]
    lines += ["| rows × in × out | fp32, MiB | bf16, MiB |", "|---|---|---|"]
    lines += [
        f"| {' × '.join(map(str, sizes))} | {plain / MIB:.2f} | {halved / MIB:.2f} |"
        for sizes, plain, halved in zip(PRODUCTS, *left, strict=True)
    ]
    code = f"{PRIMITIVE_CODE / MIB:.2f} MiB for each of a layer's three bf16 products"
    return [*lines, "", f"Planned: 8 MiB once for all products of fp32, {code}."]


def main() -> int:
    os.environ |= {**RETURNS_FREED_MEMORY, "OMP_NUM_THREADS": "1"}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        left = alone.submit(left_behind).result()
        found = alone.submit(all_rows).result()
    text = "\n".join(table(found, left)) + "\n"
    print(text)
    write_atomically(RESULTS, text)
    return 0


def all_rows() -> list[tuple[str, list[Call]]]:
    return list(rows())


if __name__ == "__main__":
    sys.exit(main())

"""An update of bf16 and 8-bit moments, eager and compiled, beside torch's fused AdamW and torchao's 8 bits.

    python -m bench.small_states                     one matrix of 8M elements, CPU, one thread
    python -m bench.small_states --run.device cuda   on a GPU; milliseconds of the device

Prints the least time of a step, in milliseconds, and its ratio to fused AdamW's.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from fsdp.config import OptimSection
from fsdp.optim.optimizer import build_optimizer

KINDS: tuple[tuple[Literal["master", "bf16", "8bit"], bool], ...] = (
    ("master", False),
    ("bf16", False),
    ("bf16", True),
    ("8bit", False),
    ("8bit", True),
)
WARM_UP = 3


def torchaos(model: nn.ParameterList) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = importlib.import_module("torchao.optim").AdamW8bit(model, lr=5e-4)
    return optimizer


def least_ms(
    build: Callable[[nn.ParameterList], torch.optim.Optimizer],
    shape: tuple[int, int],
    device: str,
    steps: int,
) -> float:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape, device=device)])
    optimizer = build(model)
    model[0].grad = torch.randn(shape, device=device)
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[WARM_UP:])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.small_states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run.device", dest="device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    builds: dict[str, Callable[[nn.ParameterList], torch.optim.Optimizer]] = {}
    for state, compiled in KINDS:
        name = "fused AdamW" if state == "master" else f"{state} {'compiled' if compiled else 'eager'}"
        builds[name] = partial(build_optimizer, OptimSection(state=state), compiled=compiled)
    if importlib.util.find_spec("torchao") is not None:
        builds["8bit torchao"] = torchaos
    base = 0.0
    for name, build in builds.items():
        took = least_ms(build, (given.rows, given.columns), given.device, given.steps)
        base = base or took
        print(f"{name:<14} {took:8.2f} ms  {took / base:6.2f} × fused AdamW", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A plan against parameters and ranks, for bench/scale.py.

Processor seconds and peak memory of a process of its own: other load on the machine changes neither much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import tables
from bench.steps_done import used

PLAN_HEADS = {"cpu_s": "fsdp.plan, processor s", "peak_mib": "its peak MiB"}
PLANNED = (
    ("124m", 124e6, 8), ("1b", 1.2e9, 64), ("8b", 8e9, 512), ("70b", 70e9, 4096), ("70b", 70e9, 16_384),
)  # fmt: skip
"""Preset, its parameters, ranks."""


def by_plan(rounds: int, sizes: Sequence[tuple[str, float, int]] = PLANNED) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, list[dict[str, float]]] = {f"{name}, {ranks:,} ranks": [] for name, _, ranks in sizes}
    for _ in range(rounds):
        for name, _, ranks in sizes:
            one = used(*plan_command(name, ranks))
            numbers[f"{name}, {ranks:,} ranks"].append({"cpu_s": one.cpu_s, "peak_mib": one.peak_mib})
            print(f"{name}, {ranks:,} ranks: {one}", flush=True)
    return _shown("model", PLAN_HEADS, numbers, [count for _, count, _ in sizes]), {"by_plan": numbers}


def plan_command(preset: str, ranks: int) -> tuple[str, ...]:
    """Plans the given flags alone."""
    flags = (
        f"-m fsdp.plan --model.name transformer --model.preset {preset} --plan.gpus {ranks} --plan.gpu h100 "
        f"--plan.fix true --data.seq_len 1024 --train.global_batch {ranks} --mesh.strategy fsdp "
        "--memory.activation_checkpointing full"
    )
    return tuple(flags.split())


def _shown(
    what: str,
    heads: Mapping[str, str],
    numbers: Mapping[str, Sequence[Mapping[str, float]]],
    sizes: Sequence[float],
) -> str:
    rows = [
        [name, *(tables.spread([one[key] for one in found]) for key in heads)]
        for name, found in numbers.items()
    ]
    found = list(numbers.values())
    rows.append([tables.SLOPE, *(tables.slope_of(sizes, found, key) for key in heads)])
    return tables.table([what, *heads.values()], rows)

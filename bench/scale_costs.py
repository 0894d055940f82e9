"""A start against the number of data files, and a plan against parameters and ranks, for bench/scale.py.

Processor seconds and peak memory of a process of its own: other load on the machine changes neither much.
Data files take no room on disk: they are sparse.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.steps_done import used

TOKENS = 4096
"""Of each file."""
FILE_HEADS = {
    "first_cpu_s": "the first start on a machine, processor s", "first_mib": "its peak MiB",
    "next_cpu_s": "a later start, or another rank's, processor s", "next_mib": "its peak MiB",
}  # fmt: skip
PLAN_HEADS = {"cpu_s": "fsdp.plan, processor s", "peak_mib": "its peak MiB"}
PLANNED = (
    ("124m", 124e6, 8), ("1b", 1.2e9, 64), ("8b", 8e9, 512), ("70b", 70e9, 4096), ("70b", 70e9, 16_384),
)  # fmt: skip
"""Preset, its parameters, ranks."""


def token_files(root: Path, count: int) -> None:
    root.mkdir()
    (root / "tokens.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 50_257}))
    for nth in range(count):
        with (root / f"{nth:07}.bin").open("wb") as file:
            os.truncate(file.fileno(), 2 * TOKENS)


def files_start(place: Path, count: int) -> dict[str, float]:
    folder = place / f"files-{count}"
    found: dict[str, float] = {}
    token_files(folder, count)
    cache = {"XDG_CACHE_HOME": str(place / f"cache-{count}")}
    for which in ("first", "next"):
        words = ("-m", "bench.data_start", "tokens", str(folder), str(count * TOKENS))
        one = used(*words, environment=cache)
        found |= {f"{which}_cpu_s": one.cpu_s, f"{which}_mib": one.peak_mib}
    return found


def by_files(counts: Sequence[int], rounds: int) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, list[dict[str, float]]] = {f"{count:,}": [] for count in counts}
    for nth in range(rounds):
        for count in tables.turned(counts, nth):
            with tempfile.TemporaryDirectory(prefix="bench-files-") as place:
                numbers[f"{count:,}"].append(files_start(Path(place), count))
            print(f"{count:,} files: {numbers[f'{count:,}'][-1]}", flush=True)
    return _shown("token files", FILE_HEADS, numbers, counts), {"by_files": numbers}


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

"""The share of time that a run makes progress in, with failures, saves and restarts: a replay, and the interval that is best.

Failures come at random, as often as ranks × rate. Each costs the steps since the last sealed checkpoint, the time to notice,
and a start. A save stops the steps for its stall and is sealed when it is written: a failure before that goes back one more.
What stall and start cost is this project's own, measured (bench/results). Not here: how large a checkpoint is on a rank.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.config import Config
from fsdp.plan.watch import checkpoint_bytes

if TYPE_CHECKING:
    from fsdp.plan.predict import Plan

YEAR_S = 365.25 * 86400.0
NOTICE_S = 30.0
"""From a node's end to its ranks' restart, as tests and docs/slurm.md have it: seconds of a scheduler's own time-out."""


@dataclass(frozen=True)
class Costs:
    checkpoint_bytes: float
    write_s: float
    stall_s: float
    start_s: float
    """From a failure to the first new step: noticed, started, restored."""
    failures_per_rank_s: float


@functools.cache
def measured() -> tuple[float, float]:
    """Seconds of a save's stall for each GB of a rank's state, and of a start up to its first step: bench/results."""
    results = Path(__file__).parents[2] / "bench" / "results"
    stall, start = 0.1, 10.0
    try:
        saved = json.loads((results / "save.json").read_text(encoding="utf-8"))
        # Adam's two states beside each parameter, four bytes each, over the ranks.
        stall = saved["ways"]["ours"]["stall_s"] / (saved["parameters"] * 12 / saved["ranks"] / 1e9)
    except (OSError, KeyError, ValueError, TypeError):
        pass
    try:
        pieces = json.loads((results / "start.json").read_text(encoding="utf-8"))["pieces"].values()
        start = statistics.median(row["wall_s"] for piece in pieces for row in piece["rounds"].get("ours", ()))
    except (OSError, KeyError, ValueError, TypeError):
        pass
    return stall, start


def costs_of(plan: Plan, config: Config) -> Costs:
    """A checkpoint is parameters and optimizer once, however many replicas; restoring reads it as fast as it was written."""
    state = checkpoint_bytes(plan.config)
    write = state / (config.plan.store_gb_s * 1e9)
    stall, start = measured()
    return Costs(
        checkpoint_bytes=state, write_s=write, stall_s=stall * state / plan.sizes.ranks / 1e9,
        start_s=NOTICE_S + start + write, failures_per_rank_s=config.plan.failures_per_gpu_year / YEAR_S,
    )  # fmt: skip


def goodput(costs: Costs, ranks: int, every_s: float, *, failures: int = 400, seed: int = 0) -> float:
    """Replayed over so many failures. `every_s` is time in steps between saves."""
    rate = ranks * costs.failures_per_rank_s
    if rate <= 0:
        return every_s / (every_s + costs.stall_s)
    dice = random.Random(seed)
    useful = total = 0.0
    for _ in range(failures):
        until = dice.expovariate(rate)
        kept = _kept(costs, every_s, until)
        useful += kept
        total += until + costs.start_s
    return useful / total


def _kept(costs: Costs, every_s: float, until: float) -> float:
    """Progress that is sealed when a failure comes: steps and stalls alternate, a save seals write_s after its stall."""
    cycle = every_s + costs.stall_s
    sealed = math.floor((until - costs.write_s) / cycle) if until > costs.write_s else 0
    return max(0, sealed) * every_s


def best_interval(costs: Costs, ranks: int) -> tuple[float, float]:
    """Time between saves, and the share of useful time with it: of a grid around Young's √(2·stall/rate)."""
    rate = max(ranks * costs.failures_per_rank_s, 1e-12)
    around = math.sqrt(2 * max(costs.stall_s, 1e-3) / rate)
    tried = [max(around * 2**k, costs.write_s, 1.0) for k in (x / 2 for x in range(-6, 9))]
    best = heapq.nlargest(1, ((goodput(costs, ranks, every), -every) for every in dict.fromkeys(tried)))[0]
    return -best[1], best[0]

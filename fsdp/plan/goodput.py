"""Goodput: the share of time in which a run makes progress, with failures, saves and restarts, and the best
interval between saves.

Failures come at random, as often as ranks × rate. Each costs the steps since the last sealed checkpoint, the
time to notice, and a start. A save stops the steps for its stall and is sealed when it is written: a failure
before that goes back one more. The costs of stall and start were measured on this project itself. Not here:
the size of a checkpoint on a rank.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp.config import Config
from fsdp.plan.step_trace import checkpoint_bytes

if TYPE_CHECKING:
    from fsdp.plan.estimate import Plan

YEAR_S = 365.25 * 86400.0
NOTICE_S = 30.0
"""Seconds from a node's end to its ranks' restart, as in tests and docs/slurm.md: mostly a scheduler's
own time-out.
"""

STALL_S_A_GB = 0.016
"""Seconds that a save stops a step, for each GB of a rank's state: bench/results/save.json. A test
compares both with their results.
"""
START_S = 2.9
"""Seconds from the command to the first step, with a warm disk: bench/results/start.json."""


@dataclass(frozen=True)
class Costs:
    checkpoint_bytes: float
    write_s: float
    stall_s: float
    start_s: float
    """Seconds from a failure to the first new step: noticed, started, restored."""
    failures_per_rank_s: float


def costs_of(plan: Plan, config: Config) -> Costs:
    """Costs of a plan. A checkpoint is parameters and optimizer once, whatever the replicas; restoring
    reads it as fast as it was written.
    """
    state = checkpoint_bytes(plan.config)
    write = state / (config.plan.store_gb_s * 1e9)
    return Costs(
        checkpoint_bytes=state,
        write_s=write,
        stall_s=STALL_S_A_GB * state / plan.sizes.ranks / 1e9,
        start_s=NOTICE_S + START_S + write,
        failures_per_rank_s=config.plan.failures_per_gpu_year / YEAR_S,
    )


def goodput(costs: Costs, ranks: int, every_s: float, *, failures: int = 400, seed: int = 0) -> float:
    """Goodput replayed over many failures. `every_s` is the time in steps between saves."""
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
    """Progress that is sealed when a failure comes: steps and stalls alternate, a save seals write_s
    after its stall.
    """
    cycle = every_s + costs.stall_s
    sealed = math.floor((until - costs.write_s) / cycle) if until > costs.write_s else 0
    return max(0, sealed) * every_s


def best_interval(costs: Costs, ranks: int) -> tuple[float, float]:
    """Time between saves with the best goodput, and that goodput: of a grid around Young's
    √(2·stall/rate).
    """
    rate = max(ranks * costs.failures_per_rank_s, 1e-12)
    around = math.sqrt(2 * max(costs.stall_s, 1e-3) / rate)
    tried = [max(around * 2**k, costs.write_s, 1.0) for k in (x / 2 for x in range(-6, 9))]
    best = heapq.nlargest(1, ((goodput(costs, ranks, every), -every) for every in dict.fromkeys(tried)))[0]
    return -best[1], best[0]

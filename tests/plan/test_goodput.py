"""Failures, saves and restarts replayed."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from fsdp.plan.goodput import STALL_S_A_GB, START_S, Costs, best_interval, costs_of, goodput
from fsdp.plan.report import details
from tests.plan.asked import plan

HOUR = 3600.0
COSTS = Costs(
    checkpoint_bytes=1e11, write_s=20.0, stall_s=2.0, start_s=60.0, failures_per_rank_s=1 / (1000 * 24 * HOUR)
)


def test_measured_costs_match_the_results() -> None:
    results = Path(__file__).parents[2] / "bench" / "results"
    saved = json.loads((results / "save.json").read_text(encoding="utf-8"))
    # Adam's two states beside each parameter, four bytes each, over the ranks
    state_gb = saved["parameters"] * 12 / saved["ranks"] / 1e9
    assert saved["ways"]["ours"]["stall_s"] / state_gb == pytest.approx(STALL_S_A_GB, rel=0.05)
    pieces = json.loads((results / "start.json").read_text(encoding="utf-8"))["pieces"]
    # After a failure the packages' files are in the page cache still.
    starts = [
        row["wall_s"]
        for name, piece in pieces.items()
        if name.startswith("warm")
        for row in piece["rounds"]["ours"]
    ]
    assert statistics.median(starts) == pytest.approx(START_S, rel=0.05)


def test_without_failures_only_stalls_cost() -> None:
    calm = dataclasses.replace(COSTS, failures_per_rank_s=0.0)
    assert goodput(calm, 100_000, 98.0) == pytest.approx(0.98)


def test_the_replay_matches_the_closed_form() -> None:
    """Few failures, no write behind: stalls, half an interval lost and a start for each failure."""
    costs = dataclasses.replace(COSTS, write_s=0.0)
    mean = 24 * HOUR / 1.0  # a thousand ranks
    every = 600.0
    expected = (every / (every + 2)) * (1 - (every / 2) / mean) * (mean / (mean + 60))
    assert goodput(costs, 1000, every, failures=20_000) == pytest.approx(expected, rel=0.005)


def test_the_best_interval_is_near_youngs_and_no_worse_than_others() -> None:
    every, share = best_interval(COSTS, 1000)
    young = math.sqrt(2 * COSTS.stall_s * 24 * HOUR)
    assert young / 3 < every < young * 3
    assert share >= max(goodput(COSTS, 1000, other) for other in (30.0, young, 6 * HOUR))


def test_more_ranks_fail_more_often_and_save_more_often() -> None:
    few, many = best_interval(COSTS, 1000), best_interval(COSTS, 100_000)
    assert many[0] < few[0]
    assert many[1] < few[1]


@pytest.mark.slow
def test_a_checkpoint_has_each_parameter_once_on_any_mesh() -> None:
    many, one = (plan("--mesh.strategy", "fsdp", gpus=gpus) for gpus in (512, 1))
    assert costs_of(many, many.config).checkpoint_bytes == costs_of(one, one.config).checkpoint_bytes
    assert costs_of(one, one.config).checkpoint_bytes == pytest.approx(one.memory.state, rel=0.05)
    adapters = plan("--lora.rank", "4")
    assert (
        costs_of(adapters, adapters.config).checkpoint_bytes
        < 0.2 * costs_of(one, one.config).checkpoint_bytes
    )


def test_details_have_hours_and_write_seconds() -> None:
    words = ("--plan.tokens", "1e9", "--plan.store_gb_s", "4")
    lines = "\n".join(details(plan(*words), plan(*words).config))
    assert "at 4 GB/s" in lines
    assert "1e+09 tokens: " in lines
    assert "GPU-hours" in lines
    calm = plan(*words, "--plan.failures_per_gpu_year", "0")
    assert "with 0 failures" in "\n".join(details(calm, calm.config))

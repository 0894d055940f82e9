"""The search chooses the fastest plan that fits with its margin, on the fewest GPUs, and none that
train.py refuses.
"""

from __future__ import annotations

import functools

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.plan.__main__ import fields_set
from fsdp.plan.estimate import Plan, search
from tests.plan.asked import GIB, SMALL

KNOBS = ("--memory.activation_checkpointing", "none", "--mesh.reshard_after_forward", "true")
WIDE = "--model.args.width 768 --train.micro_batch 1 --mesh.strategy fsdp"
NO_OFFLOAD = "--memory.cpu_offload false"


@functools.cache
def searched(flags: str) -> list[Plan]:
    words = [*SMALL, *KNOBS, *flags.split()]
    return search(load(words), fields_set(words))


@pytest.mark.long
@pytest.mark.slow
def test_the_first_is_the_fastest_that_fits() -> None:
    plans = searched("--plan.gpus 8")
    speeds = [plan.samples_s for plan in plans if plan.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert len({(plan.sizes, plan.config.mesh.reshard_after_forward) for plan in plans}) == len(plans)


@pytest.mark.slow
@pytest.mark.long
def test_flags_that_are_set_stay() -> None:
    for plan in searched("--plan.gpus 8 --mesh.shard 4 --train.global_batch 32"):
        assert plan.sizes.shard == 4
        assert plan.micro_batch * plan.accumulation * 8 == 32
        assert plan.config.memory.activation_checkpointing == "none"


@pytest.mark.slow
@pytest.mark.long
def test_the_fewest_ranks_that_fit() -> None:
    whole = searched(f"{WIDE} {NO_OFFLOAD} --plan.gpus 1")[0]
    fixed = whole.rates.overhead / GIB
    half = f"{WIDE} {NO_OFFLOAD} --plan.memory_gib {fixed + 0.5 * (whole.needed / GIB - fixed):.4f}"
    least = searched(half)[0]
    assert least.sizes.ranks > 1
    assert least.fits
    assert not searched(f"{half} --plan.gpus {least.sizes.ranks // 2}")[0].fits


@pytest.mark.slow
def test_a_batch_that_ends_the_search_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--train.global_batch 3 .* HINT: "):
        searched(f"--plan.memory_gib 1.45 {NO_OFFLOAD} --train.global_batch 3")


@pytest.mark.slow
@pytest.mark.long
def test_offload_is_tried_where_nothing_else_fits() -> None:
    flags = f"{WIDE} --plan.gpus 2"
    without = min(plan.needed for plan in searched(f"{flags} {NO_OFFLOAD}"))
    best = searched(f"{flags} --plan.memory_gib {without / GIB * 0.95:.4f}")[0]
    assert best.config.memory.cpu_offload
    assert best.fits

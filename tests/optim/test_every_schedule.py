"""What holds for each of SCHEDULES, and for a name that has been added there alone: it is not computed as
constant, and a flag that would have no effect on it is refused.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import Config, OptimSection
from fsdp.config.checks import check
from fsdp.config.sections import SCHEDULES
from fsdp.optim.schedule import Schedule

WARMUP, STEPS = 4, 20


def rates(section: OptimSection, first: int = 1) -> list[float]:
    schedule = Schedule(section, STEPS)
    return [schedule.lr(step) for step in range(first, STEPS + 1)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_reaches_the_peak_and_no_later_rate_is_higher(name: str) -> None:
    found = rates(OptimSection(schedule=name, lr=0.5, warmup_steps=WARMUP))
    assert found[:WARMUP] == [0.125, 0.25, 0.375, 0.5]
    assert found[WARMUP:] == sorted(found[WARMUP:], reverse=True)
    assert found[-1] == pytest.approx(0.5 if name == "constant" else 0.05)


@pytest.mark.parametrize("warmup", [-1, 0, WARMUP, STEPS])
def test_the_cosine_ends_at_a_tenth_of_the_peak(warmup: int) -> None:
    warm = 1 if warmup < 0 else warmup  # -1: a twentieth of the steps
    rising = [(step + 1) / warm for step in range(warm)]
    parts = [(step - warm) / max(1, STEPS - warm) for step in range(warm + 1, STEPS + 1)]
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2 for part in parts]
    section = OptimSection(schedule="cosine", lr=1.0, warmup_steps=warmup)
    assert rates(section) == pytest.approx(rising + falling, rel=1e-12)


def test_no_two_names_have_the_same_rates() -> None:
    assert len({tuple(rates(OptimSection(schedule=name))) for name in SCHEDULES}) == len(SCHEDULES)


@pytest.mark.parametrize("first", [WARMUP // 2, WARMUP + 1, STEPS - 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resume_continues_the_same_rates(name: str, first: int) -> None:
    section = OptimSection(schedule=name, warmup_steps=WARMUP)
    assert rates(section, first) == rates(section)[first - 1 :]


def test_a_name_without_a_branch_is_not_computed_as_constant() -> None:
    section = OptimSection(schedule="new", warmup_steps=WARMUP)
    with pytest.raises(KeyError, match="new"):
        rates(section)


@pytest.mark.parametrize("name", [*SCHEDULES, "new", "package.module:function"])
def test_decay_share_is_for_wsd_alone_and_for_functions_which_receive_it(name: str) -> None:
    config = dataclasses.replace(Config(), optim=OptimSection(schedule=name, decay_share=0.5))
    if name == "wsd" or ":" in name:
        check(config)
    else:
        with pytest.raises(ConfigError, match=rf"decay_share 0\.5 has no effect under .* {name}\."):
            check(config)

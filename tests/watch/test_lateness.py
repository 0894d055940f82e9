"""A slow rank is found by its own work; noise and a slow step that all share are not."""

from __future__ import annotations

import random

from fsdp.watch.lateness import WINDOW, Late, Lateness, Work


def works(seed: int, ranks: int, steps: range, slow: dict[int, float], noise: float = 0.03) -> dict[int, Work]:
    dice = random.Random(seed)
    return {
        rank: {step: (0.02 * slow.get(rank, 1.0) * (1 + dice.gauss(0, noise)), 0.03) for step in steps} for rank in range(ranks)
    }


def fed(lateness: Lateness, work: dict[int, Work]) -> Late | str | None:
    for rank, steps in work.items():
        lateness.feed(rank, steps)
    return lateness.judge()


def test_a_tenth_slower_is_named_within_thirty_steps() -> None:
    for seed in range(100):
        found = fed(Lateness(7.0), works(seed, 4, range(400, 430), {3: 1.1}))
        assert isinstance(found, Late)
        assert found.rank == 3
        assert 7 < found.percent < 13


def test_noise_names_nobody() -> None:
    lateness = Lateness(7.0)
    for window in range(300):
        steps = range(window * WINDOW, (window + 1) * WINDOW)
        assert fed(lateness, works(window, 4, steps, {}, noise=0.2)) is None


def test_it_is_said_once_and_again_when_it_is_over() -> None:
    lateness = Lateness(7.0)
    assert isinstance(fed(lateness, works(1, 4, range(30, 60), {1: 1.3})), Late)
    assert fed(lateness, works(2, 4, range(60, 90), {1: 1.3})) is None
    over = fed(lateness, works(3, 4, range(90, 120), {}))
    assert isinstance(over, str)
    assert "rank 1 is not late any more" in over


def test_what_is_less_than_asked_for_is_not_named() -> None:
    assert fed(Lateness(25.0), works(5, 4, range(30, 60), {2: 1.15})) is None


def test_too_few_steps_say_nothing() -> None:
    assert fed(Lateness(7.0), works(1, 4, range(10), {1: 2.0})) is None

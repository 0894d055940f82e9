"""A slow rank is found by its own work, soon; noise, pauses and slow steps that all share are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from fsdp.watch.records import TRIM, WINDOW, Change, Stragglers, Work

NOISE: dict[str, Callable[[random.Random, float], float]] = {
    "normal": lambda dice, size: dice.gauss(0, size),
    "heavy tails": lambda dice, size: (
        size * dice.gauss(0, 1) / math.sqrt(dice.gammavariate(1.5, 2) / 3 + 1e-9) / 1.7
    ),
    "late now and then": lambda dice, size: dice.expovariate(1 / size),
    "preempted": lambda dice, size: dice.gauss(0, size / 3) + (3 * size if dice.random() < 0.2 else 0),
}
"""What is added to the logarithm of a step's work."""


def correlated(dice: random.Random, size: float) -> Iterator[float]:
    last = 0.0
    while True:
        last = 0.3 * last + dice.gauss(0, size)
        yield last


def course(
    ranks: int, steps: int, kind: str, size: float, seed: int, slow: Mapping[int, float], since: int = 1
) -> list[Work]:
    """Each rank's work, step by step; the slow ones slower from a step on."""
    dice = random.Random(seed)
    lasting = [correlated(dice, size) for _ in range(ranks)]
    works: list[Work] = []
    for rank in range(ranks):
        noise = [
            next(lasting[rank]) if kind == "correlated" else NOISE[kind](dice, size) for _ in range(steps)
        ]
        pace = [slow.get(rank, 1.0) if step >= since else 1.0 for step in range(1, steps + 1)]
        works.append(
            {n: 0.02 * p * math.exp(x) for n, (p, x) in enumerate(zip(pace, noise, strict=True), start=1)}
        )
    return works


def said(stragglers: Stragglers, works: list[Work], at_once: int = 7) -> list[Change]:
    """Fed as the monitor does: a few steps at a time."""
    told: list[Change] = []
    for until in range(at_once, len(works[0]) + at_once, at_once):
        for rank, steps in enumerate(works):
            stragglers.feed(rank, {step: work for step, work in steps.items() if step <= until})
        told += stragglers.update()
    return told


def late(told: Sequence[Change]) -> list[Change]:
    return [one for one in told if one.late]


@pytest.mark.parametrize(("ranks", "size"), [(2, 0.03), (4, 0.03), (4, 0.05)])
def test_a_tenth_slower_is_named_within_thirty_steps(ranks: int, size: float) -> None:
    soon = 0
    for seed in range(40):
        found = late(
            said(Stragglers(7.0), course(ranks, 150, "normal", size, seed, {ranks - 1: 1.1}, since=101))
        )
        assert {one.rank for one in found} <= {ranks - 1}
        soon += bool(found) and found[0].step <= 130
    assert soon >= 38  # the noise of single steps leaves a few for a little later


def test_a_straggler_has_its_percentage_and_first_step() -> None:
    (found,) = late(said(Stragglers(7.0), course(4, 200, "normal", 0.03, 1, {2: 1.3}, since=101)))
    assert found.rank == 2
    assert 25 < found.percent < 35
    assert abs(found.since_step - 101) <= 3


def test_a_rank_slow_from_the_start_is_named_once_a_window_is_full() -> None:
    (found,) = late(said(Stragglers(7.0), course(2, 35, "normal", 0.03, 1, {1: 1.15})))
    assert found.rank == 1
    assert found.since_step <= 3
    assert found.step <= 30


@pytest.mark.parametrize("kind", [*NOISE, "correlated"])
@pytest.mark.parametrize("size", [0.05, 0.2])
def test_noise_names_no_rank(kind: str, size: float) -> None:
    assert late(said(Stragglers(7.0), course(4, 4_000, kind, size, 3, {}), at_once=50)) == []


def test_a_pause_of_a_few_steps_is_not_reported() -> None:
    works = course(4, 200, "normal", 0.03, 1, {})
    works[1] = {n: 10 * own if n % 50 < TRIM else own for n, own in works[1].items()}
    assert said(Stragglers(7.0), works) == []


def test_a_straggler_is_reported_once_and_its_end_once() -> None:
    works = course(4, 400, "normal", 0.03, 1, {1: 1.3}, since=101)
    works[1] = {n: own / 1.3 if n > 250 else own for n, own in works[1].items()}
    begun, over = said(Stragglers(7.0), works)
    assert (begun.rank, begun.late, over.rank, over.late) == (1, True, 1, False)
    assert 250 < over.step <= 250 + WINDOW

"""Who arrives late at the collectives, by its own work: what a rank does between the end of one wait and its
next arrival.

How long a collective takes says nothing: all wait in it for the last one, who itself hardly waits. So the own
work of each step (data, forward, backward, optimizer, without the waiting) is compared between ranks, step by
step. A rank is late where its excess over the others is as large as asked for and stands out of the noise,
which two measures tell: how much the steps of the window differ, and how much the means of a few steps have
wandered in the run so far (noise that lasts for some steps is seen by the second alone).
"""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

WINDOW = 28
"""Steps that are looked at together."""
TRIM = 3
"""So many of them at either end count for nothing: a pause that hits one step is not lateness."""
BLOCK = 7
"""Steps whose mean is followed through the run."""
HISTORY = 480
"""Steps that are remembered of each rank, four bytes each."""
CHANCE = 2e-6
"""How rarely noise alone may make a window of any rank stand out: an hour has 100,000 windows.
tests/watch/test_stragglers.py tries it with noise of several kinds.
"""
LEAST_S = 2e-4
"""What a rank must be late by at least: less is the noise of the clocks and of the Python around a step."""

Work = Mapping[int, tuple[float, float]]
"""Step → (own work, whole step) in seconds."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    percent: float
    seconds: float
    """A step."""
    since_step: int
    step: int


@dataclass(frozen=True)
class Over:
    """A rank that was late is so no more."""

    rank: int
    step: int


@functools.cache
def odds(ranks: int) -> float:
    """Standard errors by which a late rank must stand out: 4.8 of two ranks, 5.0 of eight, 5.9 of a thousand."""
    return NormalDist().inv_cdf(1 - CHANCE / ranks)


class Lateness:
    """Fed with each rank's last steps; says when somebody begins to be late, and when that is over."""

    def __init__(self, least_percent: float) -> None:
        self._least = math.log1p(least_percent / 100)
        self._work: dict[int, dict[int, float]] = {}
        self._seen = 0
        self._excess: dict[int, array[float]] = {}
        """Of each rank, by step up to the last seen: the logarithm of its work over the median of the
        others'.
        """
        self._typical = 0.0
        self.late: dict[int, Straggler] = {}

    def feed(self, rank: int, steps: Work) -> None:
        rows = self._work.setdefault(rank, {})
        for step, (work, _) in steps.items():
            if step > self._seen:
                rows[step] = work

    def judge(self) -> list[Straggler | Over]:
        """What is new since the last call; every step is looked at, however many have come at once."""
        if len(self._work) < 2:
            return []
        said: list[Straggler | Over] = []
        for step in sorted(set.intersection(*(set(rows) for rows in self._work.values()))):
            self._note(step)
            if len(next(iter(self._excess.values()))) >= WINDOW:
                said += self._judged(step)
        return said

    def _note(self, step: int) -> None:
        if step != self._seen + 1 or self._excess.keys() != self._work.keys():
            self._excess = {}  # after steps or ranks that nobody saw, what is followed begins anew
        self._seen = step
        works = {rank: max(rows[step], LEAST_S) for rank, rows in self._work.items()}
        for rows in self._work.values():
            for old in [known for known in rows if known <= step]:
                del rows[old]
        ordered = sorted(works.values())
        self._typical = median(ordered)
        for rank, work in works.items():
            followed = self._excess.setdefault(rank, array("f"))
            followed.append(math.log(work / _median_without(ordered, work)))
            if len(followed) >= HISTORY + WINDOW:
                del followed[:WINDOW]

    def _judged(self, step: int) -> list[Straggler | Over]:
        said: list[Straggler | Over] = []
        for rank, followed in self._excess.items():
            window = sorted(followed[-WINDOW:])
            excess = _middle(window)
            if rank in self.late:
                if excess < self._least / 2:  # half as late is late still: it is not said again and again
                    del self.late[rank]
                    said.append(Over(rank, step))
            elif excess >= self._least and self._stands_out(followed, window, excess):
                self.late[rank] = _described(rank, followed, self._typical, step)
                said.append(self.late[rank])
        return said

    def _stands_out(self, followed: array[float], window: Sequence[float], excess: float) -> bool:
        half = WINDOW // 2
        if min(median(followed[-WINDOW:-half]), median(followed[-half:])) < self._least / 2:
            return False  # a burst, not a rank that is slow
        return (
            excess >= odds(len(self._excess)) * max(_error(window), _wandering(followed))
            and math.expm1(excess) * self._typical >= LEAST_S
        )


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The median of all others, without another sort for each: ranks may be thousands."""
    own, others = bisect_left(ordered, one), len(ordered) - 1
    low, high = (ordered[at + (at >= own)] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2


def _middle(window: Sequence[float]) -> float:
    """The trimmed mean of what is sorted."""
    return sum(window[TRIM:-TRIM]) / (len(window) - 2 * TRIM)


def _error(window: Sequence[float]) -> float:
    """The trimmed mean's standard error (Yuen): outliers are drawn in to the last that counts."""
    size = len(window)
    drawn_in = [min(max(one, window[TRIM]), window[-TRIM - 1]) for one in window]
    mean = sum(drawn_in) / size
    deviation = math.sqrt(sum((one - mean) ** 2 for one in drawn_in) / (size - 1))
    return deviation / math.sqrt(size) / (1 - 2 * TRIM / size)


def _wandering(followed: array[float]) -> float:
    """The same error as the run so far tells it: from one block to the next, how do means differ?"""
    ordered = sorted(followed)
    low, high = ordered[len(ordered) // 10], ordered[-len(ordered) // 10]
    drawn_in = [min(max(one, low), high) for one in followed]
    means = [sum(drawn_in[end - BLOCK : end]) / BLOCK for end in range(len(drawn_in), BLOCK - 1, -BLOCK)]
    squares = [(one - other) ** 2 for one, other in zip(means[1:], means, strict=False)]
    return math.sqrt(sum(squares) / len(squares) / 2 * BLOCK / WINDOW) / (1 - 2 * TRIM / WINDOW)


def _described(rank: int, followed: array[float], typical_s: float, step: int) -> Straggler:
    """Since when: where what lies above half of its excess begins to add up."""
    half, total, most, since = _middle(sorted(followed[-WINDOW:])) / 2, 0.0, 0.0, len(followed) - WINDOW
    for at in range(len(followed) - 1, -1, -1):
        total += followed[at] - half
        if total > most:
            most, since = total, at
    share = math.expm1(median(followed[since:]))
    return Straggler(rank, 100 * share, share * typical_s, step - len(followed) + 1 + since, step)

"""Stragglers: finds ranks that arrive late at the collectives, from each rank's own work between two waits.

The head's monitor prints them and keeps late.jsonl (TimingRecorder in records.py).

The duration of a collective does not tell who is late: all ranks wait in it for the last one, which itself
hardly waits. So the own work of each step (data, forward, backward, optimizer, without the waiting) is
compared between ranks, step by step. A rank is late if its excess over the others reaches the requested
percentage and stands out of the noise. Two measures tell the noise: how much the steps of the window differ,
and how much the means of a few steps have varied in the run so far. Only the second sees noise that lasts for
some steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev

WINDOW = 28
"""Steps that are judged together."""
TRIM = 3
"""Steps at either extreme of the window that do not count, such as one with a pause."""
BLOCK = 7
"""Steps per mean that is followed through the run."""
HISTORY = 480
"""Steps that are kept of each rank, four bytes each."""
CHANCE = 2e-6
"""Probability that noise alone makes a window of any rank stand out: an hour has 100,000 windows.
tests/watch/test_stragglers.py checks it with noise of several kinds.
"""
LEAST_S = 2e-4
"""Least lateness of a step: less is noise of the clocks and of Python."""

Work = Mapping[int, float]
"""Step → own work in seconds."""


@dataclass(frozen=True)
class Change:
    """A rank begins to be late, by `percent` since a step; or it is no longer late."""

    rank: int
    step: int
    late: bool = False
    percent: float = 0.0
    since_step: int = 0


@functools.cache
def odds(ranks: int) -> float:
    """Standard errors by which a late rank must stand out: 4.8 for 2 ranks, 5.0 for 8, 5.9 for 1,000."""
    return NormalDist().inv_cdf(1 - CHANCE / ranks)


class Stragglers:
    """Takes each rank's last steps, and returns who begins to be late and who has caught up."""

    def __init__(self, least_percent: float) -> None:
        self._least = math.log1p(least_percent / 100)
        self._work: dict[int, dict[int, float]] = {}
        self._seen = 0
        self._excess: dict[int, array[float]] = {}
        """By rank, for each step: the logarithm of its work over the median of the others'."""
        self._typical = 0.0
        self.late: set[int] = set()

    def feed(self, rank: int, steps: Work) -> None:
        rows = self._work.setdefault(rank, {})
        for step, work in steps.items():
            if step > self._seen:
                rows[step] = work

    def update(self) -> list[Change]:
        """Changes since the last call. Every step is judged, however many have come at once."""
        if len(self._work) < 2:
            return []
        changes: list[Change] = []
        for step in sorted(set.intersection(*(set(rows) for rows in self._work.values()))):
            self._note(step)
            if len(next(iter(self._excess.values()))) >= WINDOW:
                changes += self._judged(step)
        return changes

    def _note(self, step: int) -> None:
        if step != self._seen + 1 or self._excess.keys() != self._work.keys():
            self._excess = {}  # after a gap in steps or ranks the history starts again
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

    def _judged(self, step: int) -> list[Change]:
        changes: list[Change] = []
        for rank, followed in self._excess.items():
            window = sorted(followed[-WINDOW:])
            excess = _middle(window)
            if rank in self.late:
                # half as late still counts: a rank at the limit is not reported again and again
                if excess < self._least / 2:
                    self.late.remove(rank)
                    changes.append(Change(rank, step))
            elif excess >= self._least and self._stands_out(followed, window, excess):
                self.late.add(rank)
                changes.append(_described(rank, followed, step))
        return changes

    def _stands_out(self, followed: array[float], window: Sequence[float], excess: float) -> bool:
        half = WINDOW // 2
        if min(median(followed[-WINDOW:-half]), median(followed[-half:])) < self._least / 2:
            return False  # a burst
        return (
            excess >= odds(len(self._excess)) * max(_error(window), _variation(followed))
            and math.expm1(excess) * self._typical >= LEAST_S
        )


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all others, without a sort per rank: there may be thousands of ranks."""
    left_out, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[place + (place >= left_out)] for place in ((others - 1) // 2, others // 2))
    return (low + high) / 2


def _middle(window: Sequence[float]) -> float:
    """The trimmed mean of a sorted window."""
    return sum(window[TRIM:-TRIM]) / (len(window) - 2 * TRIM)


def _error(window: Sequence[float]) -> float:
    """The trimmed mean's standard error (Yuen, from the winsorized deviation)."""
    size = len(window)
    winsorized = [min(max(excess, window[TRIM]), window[-TRIM - 1]) for excess in window]
    return stdev(winsorized) / math.sqrt(size) / (1 - 2 * TRIM / size)


def _variation(followed: array[float]) -> float:
    """The same error from the run so far: by how much the means of successive blocks differ."""
    ordered = sorted(followed)
    low, high = ordered[len(ordered) // 10], ordered[-len(ordered) // 10]
    winsorized = [min(max(excess, low), high) for excess in followed]
    means = [sum(winsorized[end - BLOCK : end]) / BLOCK for end in range(len(winsorized), BLOCK - 1, -BLOCK)]
    squares = [(mean - later) ** 2 for mean, later in itertools.pairwise(means)]
    return math.sqrt(sum(squares) / len(squares) / 2 * BLOCK / WINDOW) / (1 - 2 * TRIM / WINDOW)


def _described(rank: int, followed: array[float], step: int) -> Change:
    """`since_step` is where the sum of the work above half of the excess is largest, counted from the end."""
    half, total, most, since = _middle(sorted(followed[-WINDOW:])) / 2, 0.0, 0.0, len(followed) - WINDOW
    for step_index in range(len(followed) - 1, -1, -1):
        total += followed[step_index] - half
        if total > most:
            most, since = total, step_index
    percent = 100 * math.expm1(median(followed[since:]))
    return Change(rank, step, True, percent, step - len(followed) + 1 + since)

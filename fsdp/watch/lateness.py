"""Who arrives late at the collectives, by its own work: what a rank does between the end of one wait and its next arrival.

How long a collective takes says nothing: all wait in it for the last one, who itself hardly waits. So the own work of each step
(data, forward, backward, optimizer, without the waiting) is compared between ranks, step by step: noise falls on everyone in
turn, a slow rank is the slowest nearly always.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

WINDOW = 24
"""Steps that are looked at together."""
CHANCE = 1e-5
"""How rarely chance may make one of equal ranks the slowest so often."""
LEAST_S = 2e-4
"""What a rank must be late by at least: less is the noise of the clocks and of the Python around a step."""

Work = Mapping[int, tuple[float, float]]
"""Step → (own work, whole step) in seconds."""


@dataclass(frozen=True)
class Late:
    rank: int
    percent: float
    since_step: int
    step: int


@functools.cache
def often(ranks: int) -> int:
    """The least number of steps of a window in which a rank must be the slowest: 23 of 24 with two ranks, 17 with four."""
    share = 1 / ranks
    rare = 0.0
    for count in range(WINDOW, 0, -1):
        rare += ranks * math.comb(WINDOW, count) * share**count * (1 - share) ** (WINDOW - count)
        if rare > CHANCE:
            return min(WINDOW, count + 1)
    return 1


class Lateness:
    """Fed with each rank's last steps; says when somebody begins to be late, and when that is over."""

    def __init__(self, least_percent: float) -> None:
        self._least = least_percent
        self._work: dict[int, dict[int, float]] = {}
        self._seen = 0
        self.late: Late | None = None

    def feed(self, rank: int, steps: Work) -> None:
        rows = self._work.setdefault(rank, {})
        for step, (work, _) in steps.items():
            if step > self._seen - 2 * WINDOW:
                rows[step] = work

    def judge(self) -> Late | str | None:
        """A Late when one is found or gets much worse, a line when it is over, else None."""
        window = self._window()
        if window is None:
            return None
        found = self._find(window)
        before, self.late = self.late, found if found is None or self.late is None else self._same_since(found)
        if before is not None and (found is None or found.rank != before.rank):
            if found is None and self._still_slow(window, before.rank):
                self.late = before
                return None
            return self.late if self.late is not None else f"rank {before.rank} is not late any more, at step {window[-1]}"
        return self.late if before is None else None

    def _same_since(self, found: Late) -> Late:
        assert self.late is not None
        since = self.late.since_step if self.late.rank == found.rank else found.since_step
        return Late(found.rank, found.percent, since, found.step)

    def _window(self) -> list[int] | None:
        """The newest steps that every rank has told, or None where nothing new has come."""
        if len(self._work) < 2:
            return None
        common = sorted(set.intersection(*(set(rows) for rows in self._work.values())))[-WINDOW:]
        if len(common) < WINDOW or common[-1] == self._seen:
            return None
        self._seen = common[-1]
        for rows in self._work.values():
            for step in [s for s in rows if s < common[0]]:
                del rows[step]
        return common

    def _excess(self, steps: list[int], rank: int) -> list[float]:
        """How much later than the others' median this rank came, by step, as a share of their work."""
        others = [self._work[other] for other in self._work if other != rank]
        typical = [median(rows[step] for rows in others) for step in steps]
        return [(self._work[rank][step] - at) / max(at, LEAST_S) for step, at in zip(steps, typical, strict=True)]

    def _find(self, steps: list[int]) -> Late | None:
        slowest = [max(self._work, key=lambda r: self._work[r][step]) for step in steps]
        rank = max(self._work, key=slowest.count)
        if slowest.count(rank) < often(len(self._work)):
            return None
        excess = self._excess(steps, rank)
        typical = median(excess)
        own = median(self._work[rank][step] for step in steps)
        low = sorted(excess)[len(excess) // 5]
        if 100 * typical < self._least or 200 * low < self._least or own * typical / (1 + typical) < LEAST_S:
            return None
        since = next(step for step, share in zip(steps, excess, strict=True) if 200 * share >= self._least)
        return Late(rank, 100 * typical, since, steps[-1])

    def _still_slow(self, steps: list[int], rank: int) -> bool:
        """Half as late is late still: it is not said again and again."""
        return 200 * median(self._excess(steps, rank)) >= self._least

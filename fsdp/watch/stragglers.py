"""Stragglers: finds ranks that arrive late at the collectives, from each rank's own work between two waits.

The head's monitor prints them, and keeps late.jsonl and timing.jsonl (TimingRecorder).

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
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev

from fsdp.watch.records import RecordFiles

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
class Straggler:
    rank: int
    percent: float
    seconds: float
    """Lateness per step."""
    since_step: int
    step: int


@dataclass(frozen=True)
class CaughtUp:
    """A rank that was late and is no longer."""

    rank: int
    step: int


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
        self.late: dict[int, Straggler] = {}

    def feed(self, rank: int, steps: Work) -> None:
        rows = self._work.setdefault(rank, {})
        for step, work in steps.items():
            if step > self._seen:
                rows[step] = work

    def update(self) -> list[Straggler | CaughtUp]:
        """Changes since the last call. Every step is judged, however many have come at once."""
        if len(self._work) < 2:
            return []
        changes: list[Straggler | CaughtUp] = []
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

    def _judged(self, step: int) -> list[Straggler | CaughtUp]:
        changes: list[Straggler | CaughtUp] = []
        for rank, followed in self._excess.items():
            window = sorted(followed[-WINDOW:])
            excess = _middle(window)
            if rank in self.late:
                # half as late still counts: a rank at the limit is not reported again and again
                if excess < self._least / 2:
                    del self.late[rank]
                    changes.append(CaughtUp(rank, step))
            elif excess >= self._least and self._stands_out(followed, window, excess):
                self.late[rank] = _described(rank, followed, self._typical, step)
                changes.append(self.late[rank])
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


def _described(rank: int, followed: array[float], typical_s: float, step: int) -> Straggler:
    """`since_step` is where the sum of the work above half of the excess is largest, counted from the end."""
    half, total, most, since = _middle(sorted(followed[-WINDOW:])) / 2, 0.0, 0.0, len(followed) - WINDOW
    for step_index in range(len(followed) - 1, -1, -1):
        total += followed[step_index] - half
        if total > most:
            most, since = total, step_index
    share = math.expm1(median(followed[since:]))
    return Straggler(rank, 100 * share, share * typical_s, step - len(followed) + 1 + since, step)


# ---------------------------------------------------------------- what is printed and kept

PAUSE = 20
"""Pause before the next update, as a multiple of what the last one took: with thousands of ranks an update
takes longer than the monitor's interval.
"""
TIMING_S, TIMING_SHARE = 2.0, 0.01
"""An interval of timing.jsonl: so many seconds at least, and this share of the run's duration."""
TIMING_RANKS, MOST_TIMING_SHARE = 64, 0.25
"""Above this many ranks intervals grow with them: a line of 4,096 ranks has 0.9 MB."""


@dataclass(frozen=True)
class RankTimes:
    """By rank its last steps, and its seconds by phase; how many steps are done, and up to which."""

    steps: Mapping[int, Work]
    spent: Mapping[int, Mapping[str, float]]
    count: int
    step: int


class TimingRecorder:
    def __init__(
        self,
        late_percent: float,
        nodes: Mapping[str, list[int]],
        files: RecordFiles,
        print_lines: Callable[[list[str]], None],
    ) -> None:
        self._nodes, self._files, self._print = nodes, files, print_lines
        self._stragglers = Stragglers(late_percent) if late_percent else None
        self._slow_nodes: set[str] = set()
        self._next_at = 0.0
        self._began = time.monotonic()
        self._since: tuple[float, RankTimes] | None = None

    def update(self, now: float, read: Callable[[], RankTimes], last: bool = False) -> None:
        """Calls `read` only if an update is due."""
        if now < self._next_at and not last:
            return
        began = time.perf_counter()
        times = read()
        if self._stragglers is not None:
            self._find_late(self._stragglers, times)
        self._next_at = now + PAUSE * (time.perf_counter() - began)
        self._write_timing(now, times, last)

    def _find_late(self, stragglers: Stragglers, times: RankTimes) -> None:
        for rank, steps in times.steps.items():
            stragglers.feed(rank, steps)
        for change in stragglers.update():
            record: dict[str, object] = {"time": time.time(), "step": change.step}
            if isinstance(change, CaughtUp):
                line = f"rank {change.rank} is no longer late, at step {change.step}"
                record |= {"over": line, "of": change.rank}
            else:
                node = next((name for name, ranks in self._nodes.items() if change.rank in ranks), "")
                line = f"rank {change.rank} ({node}) is late by {change.percent:.0f}%"
                line += f" since step {change.since_step}"
                record |= {"rank": change.rank, "node": node, "percent": round(change.percent, 1)}
                record["since_step"] = change.since_step
            self._print([f"watch: {line}"])
            self._files.append("late.jsonl", record)
        slow = {
            name
            for name, ranks in self._nodes.items()
            if len(ranks) > 1 and stragglers.late.keys() >= set(ranks)
        }
        for node in sorted(slow - self._slow_nodes) if len(self._nodes) > 1 else ():
            hint = "HINT: python -m fsdp.doctor compares the nodes"
            self._print([f"watch: all ranks of {node} are late: it is the node. {hint}"])
        self._slow_nodes = slow

    def _write_timing(self, now: float, times: RankTimes, last: bool) -> None:
        """One line per interval, which grows with the run and with the ranks."""
        if self._since is None or not times.spent.keys() <= self._since[1].spent.keys():
            self._since = (now, times)
            return
        then, before = self._since
        steps = times.count - before.count
        if steps <= 0 or not (last or now - then >= timing_interval_s(now - self._began, len(times.spent))):
            return
        means = {
            str(rank): {
                name: round((value - before.spent[rank][name]) / steps, 7) for name, value in values.items()
            }
            for rank, values in sorted(times.spent.items())
        }
        record = {"time": time.time(), "from_step": times.step - steps, "step": times.step}
        self._files.append("timing.jsonl", {**record, "seconds": round(now - then, 3), "ranks": means})
        self._since = (now, times)


def timing_interval_s(since_start_s: float, ranks: int) -> float:
    """Seconds between two lines of timing.jsonl: its size is bounded by the logarithm of the duration."""
    times = max(1.0, ranks / TIMING_RANKS)
    return max(TIMING_S * times, min(TIMING_SHARE * times, MOST_TIMING_SHARE) * since_start_s)

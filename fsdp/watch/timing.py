"""Times of all ranks, kept by the head: prints late ranks, writes late.jsonl and timing.jsonl.

stragglers.py decides who is late. Verdicts are in hang_verdict.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median

from fsdp.watch.records import RecordFiles
from fsdp.watch.stragglers import WINDOW, CaughtUp, Straggler, Stragglers, Work

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
        self._starved: deque[tuple[int, dict[int, float]]] = deque(maxlen=WINDOW)
        self._next_at = 0.0
        self._began = time.monotonic()
        self._since: tuple[float, RankTimes] | None = None

    def update(self, now: float, read: Callable[[], RankTimes], last: bool = False) -> None:
        """Calls `read` only if an update is due."""
        if now < self._next_at and not last:
            return
        began = time.perf_counter()
        times = read()
        self._find_late(times)
        self._next_at = now + PAUSE * (time.perf_counter() - began)
        self._write_timing(now, times, last)

    # ------------------------------------------------------------ late ranks

    def _find_late(self, times: RankTimes) -> None:
        if self._stragglers is None:
            return
        for rank, steps in times.steps.items():
            self._stragglers.feed(rank, steps)
        if not self._starved or times.step > self._starved[-1][0]:
            starved = {rank: spent.get("starved", 0.0) for rank, spent in times.spent.items()}
            self._starved.append((times.step, starved))
        for change in self._stragglers.update():
            if isinstance(change, CaughtUp):
                self._report_caught_up(change)
            else:
                self._report_late(change)
        self._report_nodes(self._stragglers.late.keys())

    def _report_nodes(self, late: AbstractSet[int]) -> None:
        """Prints once that all ranks of a node are late while other nodes have ranks that are not."""
        if len(self._nodes) < 2:
            return
        slow = {name for name, ranks in self._nodes.items() if len(ranks) > 1 and late >= set(ranks)}
        for node in sorted(slow - self._slow_nodes):
            hint = "HINT: python -m fsdp.doctor compares the nodes"
            self._print([f"watch: all ranks of {node} are late: it is the node. {hint}"])
        self._slow_nodes = slow

    def _report_late(self, late: Straggler) -> None:
        node = next((name for name, ranks in self._nodes.items() if late.rank in ranks), "")
        line = f"watch: rank {late.rank} ({node}) is late by {late.percent:.0f}% since step {late.since_step}"
        starved = self._waits_for_a_processor(late)
        hint = f"HINT: top, on {node or 'its node'}, shows which"
        why = f": it waits for a processor that other processes have. {hint}"
        self._print([line + why * starved])
        record = {
            "time": time.time(),
            "rank": late.rank,
            "node": node,
            "percent": round(late.percent, 1),
            "starved": starved,
        }
        self._files.append("late.jsonl", {**record, "since_step": late.since_step, "step": late.step})

    def _waits_for_a_processor(self, late: Straggler) -> bool:
        """Whether most of its lateness is time without a free processor, beyond the others'."""
        readings = [reading for reading in self._starved if reading[0] >= late.since_step]
        if len(readings) < 2 or late.rank not in readings[0][1]:
            return False
        (first, before), (last, now) = readings[0], readings[-1]
        grown = {rank: value - before.get(rank, value) for rank, value in now.items()}
        others = median([value for rank, value in grown.items() if rank != late.rank] or [0.0])
        return (grown[late.rank] - others) / max(1, last - first) > late.seconds / 2

    def _report_caught_up(self, change: CaughtUp) -> None:
        line = f"rank {change.rank} is no longer late, at step {change.step}"
        self._print([f"watch: {line}"])
        record = {"time": time.time(), "over": line, "of": change.rank, "step": change.step}
        self._files.append("late.jsonl", record)

    # ------------------------------------------------------------ timing.jsonl

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
        record = {
            "time": time.time(),
            "from_step": times.step - steps,
            "step": times.step,
            "seconds": round(now - then, 3),
        }
        self._files.append("timing.jsonl", {**record, "ranks": means})
        self._since = (now, times)


def timing_interval_s(since_start_s: float, ranks: int) -> float:
    """Seconds between two lines of timing.jsonl: its size is bounded by the logarithm of the duration."""
    times = max(1.0, ranks / TIMING_RANKS)
    return max(TIMING_S * times, min(TIMING_SHARE * times, MOST_TIMING_SHARE) * since_start_s)

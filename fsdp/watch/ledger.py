"""The head's books while nothing is wrong: who is late, and where each rank's time goes.

Fed every beat with what all ranks have told; says a late rank on the screen, and writes late.jsonl and timing.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdp.watch.files import Files
from fsdp.watch.lateness import Late, Lateness, Work

LOOK_S = 0.6
TIMING_S = 2.0


@dataclass(frozen=True)
class Told:
    """Of all ranks: their last steps, their seconds by phase; and how many steps are done, up to which."""

    steps: Mapping[int, Work]
    spent: Mapping[int, Mapping[str, float]]
    count: int
    step: int


class Ledger:
    def __init__(
        self, late_percent: float, nodes: Mapping[str, list[int]], files: Files, say: Callable[[list[str]], None]
    ) -> None:
        self._nodes, self._files, self._say = nodes, files, say
        self._lateness = Lateness(late_percent) if late_percent else None
        self._looked = 0.0
        self._began = time.monotonic()
        self._since: tuple[float, Told] | None = None

    def beat(self, now: float, tell: Callable[[], Told], last: bool = False) -> None:
        """`tell` is only called when something is due."""
        if now - self._looked < LOOK_S and not last:
            return
        self._looked = now
        told = tell()
        self._late(told)
        self._time(now, told, last)

    def _late(self, told: Told) -> None:
        if self._lateness is None:
            return
        for rank, steps in told.steps.items():
            self._lateness.feed(rank, steps)
        said = self._lateness.judge()
        if isinstance(said, Late):
            node = next((name for name, ranks in self._nodes.items() if said.rank in ranks), "")
            self._say([f"watch: rank {said.rank} ({node}) is late by {said.percent:.0f}% since step {said.since_step}"])
            record = {"time": time.time(), "rank": said.rank, "node": node, "percent": round(said.percent, 1)}
            self._files.append("late.jsonl", {**record, "since_step": said.since_step, "step": said.step})
        elif said is not None:
            self._say([f"watch: {said}"])
            self._files.append("late.jsonl", {"time": time.time(), "over": said})

    def _time(self, now: float, told: Told, last: bool) -> None:
        """One line an interval, which grows with the run to a hundredth of what has passed."""
        if self._since is None or not told.spent.keys() <= self._since[1].spent.keys():
            self._since = (now, told)
            return
        then, before = self._since
        steps = told.count - before.count
        if steps <= 0 or not (last or now - then >= max(TIMING_S, 0.01 * (now - self._began))):
            return
        means = {
            str(rank): {name: round((value - before.spent[rank][name]) / steps, 7) for name, value in values.items()}
            for rank, values in sorted(told.spent.items())
        }
        record = {"time": time.time(), "from_step": told.step - steps, "step": told.step, "seconds": round(now - then, 3)}
        self._files.append("timing.jsonl", {**record, "ranks": means})
        self._since = (now, told)

"""The head's books while nothing is wrong: who is late, and where each rank's time goes.

Fed every beat with what all ranks have told; says a late rank on the screen, and writes late.jsonl and
timing.jsonl.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median

from fsdp.watch.records import Files
from fsdp.watch.stragglers import WINDOW, Lateness, Over, Straggler, Work

PAUSE = 20
"""Times what a look took pass before the next one: with thousands of ranks that is more than a beat of the
monitor.
"""
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
        self,
        late_percent: float,
        nodes: Mapping[str, list[int]],
        files: Files,
        say: Callable[[list[str]], None],
    ) -> None:
        self._nodes, self._files, self._say = nodes, files, say
        self._lateness = Lateness(late_percent) if late_percent else None
        self._slow_nodes: set[str] = set()
        self._starved: deque[tuple[int, dict[int, float]]] = deque(maxlen=WINDOW)
        self._look_at = 0.0
        self._began = time.monotonic()
        self._since: tuple[float, Told] | None = None

    def beat(self, now: float, tell: Callable[[], Told], last: bool = False) -> None:
        """`tell` is only called when something is due."""
        if now < self._look_at and not last:
            return
        began = time.perf_counter()
        told = tell()
        self._late(told)
        self._look_at = now + PAUSE * (time.perf_counter() - began)
        self._time(now, told, last)

    def _late(self, told: Told) -> None:
        if self._lateness is None:
            return
        for rank, steps in told.steps.items():
            self._lateness.feed(rank, steps)
        if not self._starved or told.step > self._starved[-1][0]:
            self._starved.append(
                (told.step, {rank: spent.get("starved", 0.0) for rank, spent in told.spent.items()})
            )
        for said in self._lateness.judge():
            if isinstance(said, Over):
                self._tell_over(said)
            else:
                self._tell_late(said)
        self._tell_nodes(self._lateness.late.keys())

    def _tell_nodes(self, late: AbstractSet[int]) -> None:
        """A node all of whose ranks are late, once, where others have ranks that are not."""
        if len(self._nodes) < 2:
            return
        slow = {name for name, ranks in self._nodes.items() if len(ranks) > 1 and late >= set(ranks)}
        for node in sorted(slow - self._slow_nodes):
            self._say(
                [
                    f"watch: all ranks of {node} are late: it is the node. HINT: python -m fsdp.doctor compares the nodes"
                ]
            )
        self._slow_nodes = slow

    def _tell_late(self, said: Straggler) -> None:
        node = next((name for name, ranks in self._nodes.items() if said.rank in ranks), "")
        line = f"watch: rank {said.rank} ({node}) is late by {said.percent:.0f}% since step {said.since_step}"
        starved = self._waits_for_a_processor(said)
        why = f": it waits for a processor that other processes have. HINT: top, on {node or 'its node'}, shows which"
        self._say([line + why * starved])
        record = {
            "time": time.time(),
            "rank": said.rank,
            "node": node,
            "percent": round(said.percent, 1),
            "starved": starved,
        }
        self._files.append("late.jsonl", {**record, "since_step": said.since_step, "step": said.step})

    def _waits_for_a_processor(self, late: Straggler) -> bool:
        """Whether most of its lateness is time in which it could have run, more than the others had of that."""
        looks = [look for look in self._starved if look[0] >= late.since_step]
        if len(looks) < 2 or late.rank not in looks[0][1]:
            return False
        (first, before), (last, now) = looks[0], looks[-1]
        grown = {rank: value - before.get(rank, value) for rank, value in now.items()}
        others = median([value for rank, value in grown.items() if rank != late.rank] or [0.0])
        return (grown[late.rank] - others) / max(1, last - first) > late.seconds / 2

    def _tell_over(self, said: Over) -> None:
        line = f"rank {said.rank} is not late any more, at step {said.step}"
        self._say([f"watch: {line}"])
        self._files.append(
            "late.jsonl", {"time": time.time(), "over": line, "of": said.rank, "step": said.step}
        )

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
            str(rank): {
                name: round((value - before.spent[rank][name]) / steps, 7) for name, value in values.items()
            }
            for rank, values in sorted(told.spent.items())
        }
        record = {
            "time": time.time(),
            "from_step": told.step - steps,
            "step": told.step,
            "seconds": round(now - then, 3),
        }
        self._files.append("timing.jsonl", {**record, "ranks": means})
        self._since = (now, told)

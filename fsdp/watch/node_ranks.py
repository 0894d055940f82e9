"""The ranks of one node as their monitor handles them: all looked at, all asked, their stacks kept, let go,
ended.

What one rank shows is look.py's. Not here: what follows from it (verdict.py, monitor.py) and the other nodes
(nodes.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.watch import status_page
from fsdp.watch.observation import Evidence
from fsdp.watch.observe import ANSWER_S, LocalRank
from fsdp.watch.records import Files
from fsdp.watch.status_page import FAILED, OVER
from fsdp.watch.stragglers import Work

ENDED_BY_THE_WATCH = 7
LEAVE_S = 1.0
"""A rank that was told to leave has so long before the kernel ends it."""


class Crew:
    """`paths`: the page of each rank. `seen`: what the last look, or the last question, found."""

    def __init__(self, paths: Mapping[int, str], node: str, files: Files) -> None:
        # a run of a few steps may be over before this process is there
        there = {rank: Path(path) for rank, path in paths.items() if Path(path).exists()}
        self.ranks = [LocalRank(rank, path, node) for rank, path in there.items()]
        for one in self.ranks:
            one.cells.numbers[status_page.MONITOR] = os.getpid()
        self.seen: list[Evidence] = []
        self._files = files

    # ------------------------------------------------------------ looking

    def look(self, now: float, lost_s: float) -> None:
        self.seen = [one.look(now, lost_s) for one in self.ranks]

    @property
    def gone(self) -> bool:
        """None of them runs any more."""
        return all(e.over or not e.alive for e in self.seen)

    @property
    def leaving(self) -> bool:
        """All of them are through, one way or the other, though they may still be there."""
        return all(one.beat.state in (OVER, FAILED) or not one.evidence.alive for one in self.ranks)

    @property
    def step_s(self) -> float:
        return max((one.beat.step_s for one in self.ranks), default=0.0)

    def steps(self) -> dict[int, Work]:
        return {one.rank: status_page.ring(one.cells.numbers) for one in self.ranks}

    def spent(self) -> dict[int, dict[str, float]]:
        return {
            one.rank: {**status_page.spent(one.cells.numbers), "starved": one.starved_s} for one in self.ranks
        }

    def report(self, asked: bool = False) -> dict[str, Any]:
        """What the head is told; `asked`: it follows from a question."""
        ranks = [e.encoded() for e in self.seen]
        return {
            "ranks": ranks,
            "step_s": self.step_s,
            "steps": self.steps(),
            "spent": self.spent(),
            "asked": asked,
        }

    # ------------------------------------------------------------ asking

    def ask(self) -> None:
        """Look again, and ask each where it stands: what its witness says, or the kernel for it, is then in
        `seen`.
        """
        answers = self._answers("look")
        self.seen = [
            one.with_answer(answers[one.rank]) if one.evidence.alive else one.evidence for one in self.ranks
        ]

    def _answers(self, word: str) -> dict[int, dict[str, Any] | None]:
        asked = [(one, one.ask(word) if self._can_answer(one) else None) for one in self.ranks]
        deadline = time.monotonic() + ANSWER_S
        return {one.rank: one.hear(pipe, deadline) for one, pipe in asked}

    @staticmethod
    def _can_answer(one: LocalRank) -> bool:
        """One that is stopped cannot: its state says so, and nobody waits for it."""
        return one.evidence.alive and not one.evidence.over and one.evidence.state != "T"

    def keep(self, folder: str) -> None:
        """The stacks of all threads of these ranks, and their flight recorders."""
        answers = self._answers("dump")
        for one in self.ranks:
            answer = answers[one.rank]
            if answer is None:
                trace = one.evidence.words["trace"] if one.evidence.words else ""
                self._files.write(
                    f"{folder}/rank-{one.rank}.txt", trace or one.all_stacks() or "did not answer\n"
                )
                continue
            stacks = {"training": answer["training"], **answer["threads"]}
            text = "".join(
                f"{name}:\n" + "".join(f"  {file}:{line} {what}\n" for file, line, what in stack)
                for name, stack in stacks.items()
            )
            self._files.write(f"{folder}/rank-{one.rank}.txt", text)
            self._files.write(f"{folder}/rank-{one.rank}.fr.json", json.dumps(answer["calls"]))

    # ------------------------------------------------------------ ending

    def let_go(self) -> None:
        for one in self.ranks:
            one.hear_that_it_is_said()

    def end(self, failed: bool = False) -> bool:
        """By a word, so that the exit code tells; by the kernel where nobody hears. Those that have failed
        leave by themselves, unless their teardown holds them: `failed` ends them as well. Whether there was
        any to end.
        """
        spared = (OVER,) if failed else (OVER, FAILED)
        ending = [one for one in self.ranks if one.evidence.alive and one.beat.state not in spared]
        for one in ending:
            asked = one.ask(f"leave {ENDED_BY_THE_WATCH}")
            if asked is not None:
                asked.close()
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(one.look(time.monotonic()).alive for one in ending):
            time.sleep(0.05)
        for one in ending:
            if one.beat.state not in spared:
                one.end()
        return bool(ending)

    def forget(self) -> None:
        for one in self.ranks:
            one.forget()

"""The ranks of one node, as their monitor handles them: observe all, keep their stacks, release or end them.

One rank is in observe.py. What follows from the observations is in hang_verdict.py and monitor.py, and the
other nodes are in monitor_links.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.watch import status_page
from fsdp.watch.observation import Observation
from fsdp.watch.observe import ANSWER_S, LocalRank
from fsdp.watch.records import RecordFiles
from fsdp.watch.status_page import FAILED, LEFT, OVER
from fsdp.watch.stragglers import Work

ENDED_BY_THE_WATCH = 7
EXIT_S = 1.0
"""Time for a rank to end after the command to exit; then it is killed."""


class NodeRanks:
    """`paths`: the status page of each rank. `seen`: the last observations, with answers after a request."""

    def __init__(self, paths: Mapping[int, str], node: str, files: RecordFiles) -> None:
        self.ranks: list[LocalRank] = []
        for rank, path in paths.items():
            with contextlib.suppress(FileNotFoundError):  # a run of a few steps may be over already
                self.ranks.append(LocalRank(rank, Path(path), node))
                self.ranks[-1].page.numbers[status_page.MONITOR] = os.getpid()
        self.seen: list[Observation] = []
        self._files = files

    # ------------------------------------------------------------ observing

    def observe(self, now: float, lost_s: float) -> None:
        self.seen = [one.observe(now, lost_s) for one in self.ranks]

    @property
    def all_gone(self) -> bool:
        """None of them runs any more."""
        return all(one.seen.over or one.status.state == LEFT or not one.seen.alive for one in self.ranks)

    @property
    def all_ending(self) -> bool:
        """All have ended their run or failed; their processes may still exist."""
        return all(one.status.state in (OVER, FAILED, LEFT) or not one.seen.alive for one in self.ranks)

    @property
    def step_s(self) -> float:
        return max((one.status.step_s for one in self.ranks), default=0.0)

    def steps(self) -> dict[int, Work]:
        return {one.rank: status_page.ring(one.page.numbers) for one in self.ranks}

    def spent(self) -> dict[int, dict[str, float]]:
        return {
            one.rank: {**status_page.spent(one.page.numbers), "starved": one.starved_s} for one in self.ranks
        }

    def report(self, asked: bool = False) -> dict[str, Any]:
        """The message to the head. `asked`: it follows a request to the responders."""
        return {
            "ranks": [e.encoded() for e in self.seen],
            "step_s": self.step_s,
            "steps": self.steps(),
            "spent": self.spent(),
            "asked": asked,
        }

    # ------------------------------------------------------------ requests

    def ask(self) -> None:
        """Complete `seen` with each responder's answer, or without one with the stack by signal."""
        answers = self._answers("stacks")
        self.seen = [one.with_answer(answers[one.rank]) if one.seen.alive else one.seen for one in self.ranks]

    def _answers(self, command: str) -> dict[int, dict[str, Any] | None]:
        sent = [(one, one.request(command) if self._can_answer(one) else None) for one in self.ranks]
        deadline = time.monotonic() + ANSWER_S
        return {one.rank: one.answer(connection, deadline) for one, connection in sent}

    @staticmethod
    def _can_answer(one: LocalRank) -> bool:
        """A stopped process cannot: its state shows it, so nothing waits for it."""
        return one.seen.alive and not one.seen.over and not one.seen.stopped

    def keep(self, folder: str) -> None:
        """Write the stacks of all threads and the flight recorders of these ranks."""
        answers = self._answers("dump")
        for one in self.ranks:
            answer = answers[one.rank]
            if answer is None:
                trace = one.seen.failure["trace"] if one.seen.failure else ""
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

    # ------------------------------------------------------------ the end

    def mark_printed(self) -> None:
        for one in self.ranks:
            one.mark_printed()

    def to_end(self, failed: bool = False) -> list[LocalRank]:
        """The ranks that still run. Ranks that have failed end by themselves, unless their teardown hangs:
        `failed` includes them, but not those whose processes live on.
        """
        spared = (OVER, LEFT) if failed else (OVER, LEFT, FAILED)
        return [one for one in self.ranks if one.seen.alive and one.status.state not in spared]

    def end(self, failed: bool = False) -> bool:
        """End the ranks by the responder's exit command, which gives the exit code, then by SIGKILL.

        True if there were any to end.
        """
        ending = self.to_end(failed)
        for one in ending:
            connection = one.request(f"exit {ENDED_BY_THE_WATCH}")
            if connection is not None:
                connection.close()
        deadline = time.monotonic() + EXIT_S
        while time.monotonic() < deadline and any(one.observe(time.monotonic()).alive for one in ending):
            time.sleep(0.05)
        for one in self.to_end(failed):  # the others have ended meanwhile
            one.kill()
        return bool(ending)

    def remove_names(self) -> None:
        """Those of ranks that were killed. Until then a monitor that is started again opens them."""
        for one in self.ranks:
            for suffix in (".page", ".stacks", ".sock"):
                one.path.with_suffix(suffix).unlink(missing_ok=True)

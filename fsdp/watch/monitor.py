"""Monitor: one process on each node, without torch, that observes the node's ranks from outside.

Several times a second it reads each rank's status page (status_page.py) and the kernel's counts. When all
ranks stand still or one fails it judges who is at fault (verdict.py), prints that, writes the evidence to
RUN/watch/ and ends the job. A process of its own because a rank that is stopped, dead or stuck cannot report
itself.

The first rank of a node starts it, and again if it was killed. Its standard input is a pipe from that rank,
which carries its options, a line of JSON, and closes with the rank; the monitor ends when its ranks have
ended. On several nodes the monitor of rank 0's node, the head, judges for all; a node that is cut off judges
for itself.

This file holds the order of observing, judging, printing and ending, and how long each is waited for. Actions
on the ranks of this node are in observe.py, connections between nodes in links.py.

Exit code of the ranks that it ends: 7, or 137 (killed) of one that does not respond.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.phases import SIGNALS
from fsdp.distributed.env import launcher_hints
from fsdp.watch.links import Head, Peer
from fsdp.watch.observe import ANSWER_S, NodeRanks, Observation, Watched
from fsdp.watch.records import ENDED, EVIDENCE, RecordFiles, TimingRecorder
from fsdp.watch.status_page import FAILED
from fsdp.watch.verdict import Verdict, judge

INTERVAL_S = 0.15
"""A round costs half a millisecond."""
ASK_S, ASK_AGAIN_S = 1.5, 0.4
"""Least stillness before requests go to the responders; a verdict comes with the second answer."""
STEPS_STILL = 6
"""The same in slow steps of this run."""
ENDLESS = 2
"""Multiple of that stillness, in processor time of one rank: more than any step computes."""
NO_STEP_YET_S = 20.0
HANG_LEAST_S, HANG_STEPS = 60.0, 30
"""The shortest wait for a rank that may recover, in seconds and in steps; the longer of the two counts."""
STORAGE_LEAST_S = 600.0
"""A restart needs the same storage, and would lose the save that waits for it."""
FIRST_S = 600.0
"""The same wait in a start's first step, which does lazy work: a data set builds an index, a library compiles
its kernels. There is no measured step yet that tells a long computation from an endless one. An evaluation's
data are prepared as lazily.
"""
UNREACHED_S = 10.0
"""A node that has not reached the head by then judges for itself."""
CERTAIN_S, SETTLE_S, ECHO_S = 0.5, 1.5, 3.0
"""Wait after a first failure for other ranks' reports: if a rank has an error of its own or is dead, as an
earlier error may still arrive; if none has, or gloo has aborted it; if all failures are consequences of
others.
"""
GRACE_S, FAILED_S = 5.0, 15.0
"""From the verdict until ranks that have not failed are ended; until failed ranks that hang are."""
PR_SET_PDEATHSIG = 1
BY_THE_HEAD = Verdict("shown", (), "by the head")
"""On the other nodes: the head has printed a verdict."""


@dataclass(frozen=True)
class MonitorOptions:
    """Ranks send them; they do not import this module."""

    node: str
    run: str
    ranks: dict[int, Watched]
    """Of this node: open descriptors of a rank's status page and stacks, and its responder's address."""
    nodes: dict[str, list[int]]
    """Node → its ranks, of the whole run."""
    hang_s: float
    late_percent: float
    token: str
    """Identifies this run's monitors to each other."""
    launcher: str = "torchrun"
    """DistEnv's, for hints. Ray's driver prints its ranks' failures, and ends them after it has read them."""
    listener: int = -1
    """The head's: an open descriptor on which other nodes' monitors connect; -1 without other nodes."""
    head: tuple[str, int] | None = None
    """Where the head listens; None on the head itself."""


class Monitor:
    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.files = RecordFiles(Path(options.run) / "watch")
        self.ranks = NodeRanks(options.ranks, options.node)
        self.head = Head(options.listener, options.token) if options.listener >= 0 else None
        self.peer = Peer(options.head, options.token, options.node) if options.head else None
        self.hints = launcher_hints(options.launcher, len(options.nodes))
        self.timing = TimingRecorder(options.late_percent, self.files, print_lines)
        self.prints_failures = options.launcher != "ray"
        self.shown: Verdict | None = None
        self.shown_at = 0.0
        self._candidate: tuple[str, tuple[int, ...]] | None = None
        self._asked_at = self._decided_at = self._trouble_at = self._shown_still = 0.0
        self._first_rank_gone = self._head_done = False
        self._began = time.monotonic()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            lost = max(0.0, now - before - INTERVAL_S - 2 * ANSWER_S)
            before = now
            self.ranks.observe(now, lost)
            failed = any(e.has_failed for e in self.ranks.seen)
            if self._stand_still(self.ranks.seen) and now - self._asked_at >= ASK_AGAIN_S and not failed:
                self._asked_at = now
                self.ranks.ask()
            self._exchange()
            if self._judges(now):
                self._judge(now)
            if not self.ranks.running() and self._nothing_left(now):
                break
            if not self.ranks.running(FAILED) or (self._trouble_at and self.shown is None):
                time.sleep(0.02)
            elif self._first_rank_gone:
                time.sleep(INTERVAL_S)
            elif select.select([0], [], [], INTERVAL_S)[0]:
                self._first_rank_gone = not os.read(0, 4096)
        self._finish()

    def _nothing_left(self, now: float) -> bool:
        """All ranks of this node have ended: whether nothing remains to be printed."""
        waited = self._trouble_at > 0 and now - self._trouble_at > ECHO_S + 1
        return all(e.over for e in self.ranks.seen) or self.shown is not None or waited

    def _finish(self) -> None:
        if self.peer is not None:
            self.peer.exchange(self.ranks.seen)
            self.peer.close()
        else:
            if self.head is not None:
                self.head.exchange()  # bytes left unread at a connection's end would discard the last order
                self.head.broadcast(done=True)
            if self.shown is None:
                self.timing.update(time.monotonic(), self._all_observations(), last=True)
        self.files.close()
        if self.head is not None:
            self.head.close()

    # ------------------------------------------------------------ several nodes

    def _exchange(self) -> None:
        if self.head is not None:
            self.head.exchange()
        if self.peer is None:
            return
        for order in self.peer.exchange(self.ranks.seen):
            if order.get("printed") or order.get("end"):
                if self.shown is not BY_THE_HEAD:
                    self.shown, self.shown_at = BY_THE_HEAD, time.monotonic()
                self.ranks.mark_printed()
            self._head_done |= order.get("done", False)
            if order.get("end"):
                self._end_ranks(order.get("failed", False))

    def _judges(self, now: float) -> bool:
        """True on the head, and on a node that is cut off from it or never reached it."""
        if self.peer is None or self._cut_off():
            return True
        return self.peer.link is None and now - self._began > UNREACHED_S

    def _cut_off(self) -> dict[str, Any]:
        """What is unseen of the head's ranks; empty while the head is in reach."""
        return self.peer.link.unseen() if self.peer is not None and self.peer.link is not None else {}

    def _all_observations(self) -> list[Observation]:
        """This node's ranks; on the head all; on a node that is cut off, the head's ranks as unseen."""
        seen = self.ranks.seen
        if self.head is not None:
            seen += self.head.observations()
        elif (unseen := self._cut_off()) and not self._head_done:
            head, of_head = next((node, ranks) for node, ranks in self.options.nodes.items() if 0 in ranks)
            seen += [Observation(rank, head, **unseen) for rank in of_head]
        return sorted(seen, key=lambda e: e.rank)

    # ------------------------------------------------------------ judging

    def _judge(self, now: float) -> None:
        observations = self._all_observations()
        if any(e.has_failed for e in observations) and (self.shown is None or self.shown.recoverable):
            self._judge_failure(now, observations)
        elif self.shown is not None and not self.shown.recoverable:
            if now - self.shown_at > GRACE_S:
                self._end_everyone(failed=now - self.shown_at > FAILED_S and self.prints_failures)
        else:
            self._judge_stillness(now, observations)
            self.timing.update(now, observations)

    def _verdict(self, observations: Sequence[Observation], endless_s: float = math.inf) -> Verdict | None:
        ranks = sum(map(len, self.options.nodes.values()))
        return judge(observations, ranks=ranks, endless_s=endless_s, hints=self.hints)

    def _judge_failure(self, now: float, observations: Sequence[Observation]) -> None:
        """Wait a moment for every rank's report; longer if all failures are consequences of another's end."""
        self._trouble_at = self._trouble_at or now
        waited = now - self._trouble_at
        certain = any(
            not e.failure["secondary"] if e.failure else not (e.alive or e.over or e.aborted)
            for e in observations
        )
        # If all have ended a second observation is enough: a rank may write its failure and die between two
        # reads of the first.
        all_ended = all(e.has_left for e in observations) and waited > 0
        if waited < (CERTAIN_S if certain else SETTLE_S) and not all_ended:
            return
        verdict = self._verdict(observations)
        if verdict is not None and verdict.kind != "network":
            self._show(verdict, observations)
        elif waited > ECHO_S:
            failed = [(e.rank, e.failure) for e in observations if e.failure]
            rank, failure = min(failed, key=lambda pair: pair[1]["time"])
            self._show(Verdict("lost", (rank,), failure["print"], "", failure["hint"]), observations)

    def _judge_stillness(self, now: float, observations: list[Observation]) -> None:
        still_s = _still_s(observations)
        if self.shown is not None and still_s < ASK_S:
            stood_s = now - self.shown_at + self._shown_still
            print_lines([f"watch: the run continues, {stood_s:.0f} s after it stood still"])
            self.shown = None
        if not self._stand_still(observations):
            self._candidate = None
        elif now - self._decided_at >= ASK_AGAIN_S:
            self._decided_at = now
            self._decide(still_s, observations, ENDLESS * _suspicious_s(observations))

    def _stand_still(self, observations: Sequence[Observation]) -> bool:
        """Whether all these ranks do, for longer than a slow step of this run."""
        # before the first step loading and compiling have no measure of their own
        least_s = _suspicious_s(observations) if any(e.step_s for e in observations) else NO_STEP_YET_S
        return self.options.hang_s != 0 and _still_s(observations) >= least_s

    def _decide(self, still: float, observations: list[Observation], endless_s: float = math.inf) -> None:
        """Print a verdict that comes twice in a row; end the job when its time is up."""
        verdict = self._verdict(observations, endless_s)
        before = self._candidate
        self._candidate = (verdict.kind, verdict.ranks) if verdict is not None else None
        if verdict is None or self._candidate != before:
            return
        longest = self._hang_s(verdict, observations)
        if self.shown is None:
            self._shown_still = still
            self._show(verdict, observations, ends_in_s=max(0.0, longest - still))
        if not verdict.recoverable or still > longest:
            self._end_everyone()

    def _hang_s(self, verdict: Verdict, observations: Sequence[Observation]) -> float:
        """The longest stillness of a run in this state."""
        if self.options.hang_s > 0:
            return self.options.hang_s
        step_s = max(e.step_s for e in observations)
        evaluates = verdict.kind == "data" and any(e.phase == "evaluate" for e in observations)
        if evaluates or (not step_s and verdict.kind != "stopped"):
            return FIRST_S
        return max(STORAGE_LEAST_S if verdict.kind == "storage" else HANG_LEAST_S, HANG_STEPS * step_s)

    # ------------------------------------------------------------ printing and ending

    def _show(self, verdict: Verdict, observations: Sequence[Observation], ends_in_s: float = 0.0) -> None:
        self.shown, self.shown_at = verdict, time.monotonic()
        step = max((e.step for e in observations), default=0)
        folder = f"{verdict.kind.replace(' ', '-')}-{step:06d}"
        failure = _failure_of(verdict, observations)
        others = [f"  {verdict.others}"] if verdict.others else []
        if failure is None:
            hint = [f"  HINT: {verdict.hint}"] if verdict.hint else []
            ends = [f"  ends the job in {ends_in_s:.0f} s unless it continues"] if verdict.recoverable else []
            print_lines([f"watch: {verdict.what}", *others, *hint, *ends])
        elif self.prints_failures:
            print_lines([failure["print"], *others])
        nodes = sorted({e.node for e in observations if e.rank in verdict.ranks})
        record = {"time": time.time(), "by": self.options.node, "nodes": nodes, "step": step}
        self.files.put("verdicts.jsonl", {**record, "folder": folder, **vars(verdict)})
        if verdict.kind != "config":
            evidence = json.dumps(observations, indent=1, default=vars)
            self.files.put(f"{folder}/{EVIDENCE}", evidence)
            for e in observations:
                self.files.put(f"{folder}/rank-{e.rank}.txt", _stacks_text(e))
        if not verdict.recoverable:
            # failed ranks wait for this: with the last of them the terminal may be gone
            if self.head is not None:
                self.head.broadcast(printed=True)
            self.ranks.mark_printed()

    def _end_everyone(self, *, failed: bool = False) -> None:
        """`failed`: also the ranks that have reported a failure and do not end."""
        if self.head is not None:
            self.head.broadcast(end=True, failed=failed)
        self._end_ranks(failed)

    def _end_ranks(self, failed: bool) -> None:
        if self.ranks.to_end(failed):
            # before the ranks end: their launcher reads it when they have
            ended = {"time": time.time(), "kind": ENDED, "ranks": list(self.options.ranks)}
            self.files.put("verdicts.jsonl", {**ended, "what": "by the watch"})
            self.ranks.end(failed)


def _still_s(observations: Sequence[Observation]) -> float:
    """Since when none of the ranks that run has moved."""
    return min((e.still_s for e in observations if e.runs and not e.silent_node_s), default=0.0)


def _suspicious_s(observations: Sequence[Observation]) -> float:
    return max(ASK_S, STEPS_STILL * max((e.step_s for e in observations), default=0.0))


def _stacks_text(e: Observation) -> str:
    if e.failure is not None and not (e.failure["ours"] or e.failure["secondary"]):
        return str(e.failure["print"])
    stacks = {"training": e.stack, **e.threads} if e.answered is not None else {}
    text = "".join(
        f"{thread}:\n" + "".join(f"  {file}:{line} {function}\n" for file, line, function in stack)
        for thread, stack in stacks.items()
        if stack
    )
    return e.fatal or text or "did not answer\n"


def _failure_of(verdict: Verdict, observations: Sequence[Observation]) -> dict[str, Any] | None:
    """The failure report of the rank at fault; else one with the same message."""
    failures = [(e.rank, e.failure) for e in observations if e.failure]
    own = [failure for rank, failure in failures if rank == verdict.ranks[0] and not failure["secondary"]]
    same = [failure for _, failure in failures if failure["message"] == verdict.what]
    return next(iter(own + same), None)


def print_lines(lines: Sequence[str]) -> None:
    """Plain lines on standard error; on a terminal they replace the run's live line, which is drawn again."""
    clear = "\r\x1b[2K" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""
    with contextlib.suppress(OSError):  # the terminal is gone; verdicts.jsonl has the same
        # a file's name in a message may have bytes that are not UTF-8
        os.write(2, (clear + "\n".join(lines) + "\n").encode(errors="backslashreplace"))


def main() -> None:
    # Ctrl-C and the scheduler's SIGTERM are for the ranks; this process ends with them
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # after a SIGSTOP it still ends with its run
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    data = json.loads(sys.stdin.readline() or sys.exit())  # nothing: the rank has ended
    data["ranks"] = {int(rank): watched for rank, watched in data["ranks"].items()}
    Monitor(MonitorOptions(**data)).run()


if __name__ == "__main__":
    main()

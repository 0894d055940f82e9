"""Monitor: one process on each node, without torch, that observes the node's ranks from outside.

Several times a second it reads each rank's status page (status_page.py) and the kernel's counts. When all
ranks stand still or one fails it judges who is at fault (hang_verdict.py), prints that, writes the evidence
to RUN/watch/ and ends the job. A process of its own because a rank that is stopped, dead or stuck cannot
report itself.

The first rank of a node starts it, and again if it was killed. Its standard input is a pipe from that rank,
which carries its options (monitor_options.py) and closes with the rank; the monitor ends when its ranks have
ended. On several nodes the monitor of
rank 0's node, the head, judges for all; a node that is cut off judges for itself.

This file holds the order of observing, judging, printing and ending, and how long each is waited for. Actions
on the ranks of this node are in node_ranks.py, connections between nodes in monitor_links.py.

Exit code of the ranks that it ends: 7, or 137 (killed) of one that does not respond.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp.base.stop_signals import SIGNALS
from fsdp.dist.launcher_hints import launcher_hints
from fsdp.watch.hang_verdict import Verdict, judge
from fsdp.watch.messages import times_of
from fsdp.watch.monitor_links import SILENT_S, Head, MonitorConnection, Peer
from fsdp.watch.monitor_options import MonitorOptions
from fsdp.watch.node_ranks import NodeRanks
from fsdp.watch.observation import Observation, decode
from fsdp.watch.observe import ANSWER_S
from fsdp.watch.records import ENDED, EVIDENCE, RecordFiles
from fsdp.watch.timing import RankTimes, TimingRecorder

INTERVAL_S = 0.2
SHORT_STEP_S, SHORT_INTERVAL_S = 0.05, 0.1
"""With short steps, so that a late rank is named after few of them. A round costs half a millisecond."""
ASK_S = 1.5
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


class Monitor:
    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.files = RecordFiles(Path(options.run) / "watch")
        self.ranks = NodeRanks(options.ranks, options.node, self.files)
        self.head = Head(options.listener, options.token) if options.listener >= 0 else None
        self.peer = Peer(options.head, options.token, options.node) if options.head else None
        self.hints = launcher_hints(options.launcher, len(options.nodes))
        self.timing = TimingRecorder(options.late_percent, options.nodes, self.files, print_lines)
        self.shown: Verdict | None = None
        self.shown_at = 0.0
        self._candidate: tuple[str, tuple[int, ...]] | None = None
        self._asked_at = self._trouble_at = self._shown_still = 0.0
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
            self._exchange()
            if self._judges():
                self._judge(now)
            if self.ranks.all_gone and self._nothing_left(now):
                break
            if self.ranks.all_ending or (self._trouble_at and self.shown is None):
                time.sleep(0.02)
            else:
                self._rest()
        self._finish()

    def _rest(self) -> None:
        """Until the next interval, or until the first rank closes the pipe."""
        short = 0 < self.ranks.step_s < SHORT_STEP_S and self.peer is None
        interval_s = SHORT_INTERVAL_S if short else INTERVAL_S
        if self._first_rank_gone:
            time.sleep(interval_s)
        elif select.select([0], [], [], interval_s)[0]:
            self._first_rank_gone = not os.read(0, 4096)

    def _nothing_left(self, now: float) -> bool:
        """All ranks of this node have ended: whether nothing remains to be printed."""
        bad = any(not e.over for e in self.ranks.seen)
        return (
            not bad
            or self.shown is not None
            or (self._trouble_at > 0 and now - self._trouble_at > ECHO_S + 1)
        )

    def _finish(self) -> None:
        if self.peer is not None:
            self.peer.exchange(self.ranks.report())
        if self.head is not None:
            self.head.exchange()  # bytes left unread when a connection closes would discard the last message
            self.head.broadcast({"done": True})
        if self.shown is None and self.peer is None:
            self.timing.update(time.monotonic(), self._rank_times, last=True)
        self.files.close()
        self.ranks.remove_names()
        for side in (self.head, self.peer):
            if side is not None:
                side.close()

    # ------------------------------------------------------------ several nodes

    def _exchange(self) -> None:
        if self.head is not None:
            self.head.exchange()
        if self.peer is None:
            return
        for message in self.peer.exchange(self.ranks.report()):
            if message.get("ask"):
                self.ranks.ask()
                self.peer.exchange(self.ranks.report(asked=True))
            if message.get("keep"):
                self.ranks.keep(message["keep"])
            if message.get("printed"):
                if self.shown is None:
                    self.shown, self.shown_at = BY_THE_HEAD, time.monotonic()
                self._release()
            self._head_done |= message.get("done", False)
            if message.get("end"):
                self.shown = BY_THE_HEAD
                self._end_ranks(message["failed"])

    def _judges(self) -> bool:
        """True on the head, and on a node that is cut off from it or never reached it."""
        if self.peer is None or self._cut_off():
            return True
        return self.peer.connection is None and time.monotonic() - self._began > UNREACHED_S

    def _cut_off(self) -> bool:
        connection = self.peer.connection if self.peer is not None else None
        return connection is not None and (connection.silent_s > SILENT_S or connection.gone)

    def _all_observations(self) -> list[Observation]:
        """This node's ranks; on the head all; on a node that is cut off, the head's ranks as unseen."""
        found = list(self.ranks.seen)
        if self.head is not None:
            for node, report in self.head.reports.items():
                connection = self.head.connections[node]
                ranks = [decode(data) for data in report["ranks"]]
                found += [e if e.has_left else replace(e, **_unseen_since(connection)) for e in ranks]
        elif self._cut_off() and not self._head_done:
            assert self.peer is not None
            assert self.peer.connection is not None
            head, of_head = next((node, own) for node, own in self.options.nodes.items() if 0 in own)
            found += [Observation(rank, head, **_unseen_since(self.peer.connection)) for rank in of_head]
        return sorted(found, key=lambda e: e.rank)

    # ------------------------------------------------------------ judging

    def _step_s(self) -> float:
        reports = self.head.reports.values() if self.head is not None else ()
        return max(self.ranks.step_s, *(report["step_s"] for report in reports), 0.0)

    def _judge(self, now: float) -> None:
        found = self._all_observations()
        if any(e.has_failed for e in found) and (self.shown is None or self.shown.recoverable):
            self._judge_failure(now, found)
        elif self.shown is not None and not self.shown.recoverable:
            if now - self.shown_at > GRACE_S:
                # Ray ends its workers itself, after it has read their errors
                late = now - self.shown_at > FAILED_S and self.options.prints_failures
                self._end_everyone(failed=late)
        else:
            self._judge_stillness(now, found)
            self.timing.update(now, self._rank_times)

    def _judge_failure(self, now: float, found: Sequence[Observation]) -> None:
        """Wait a moment for every rank's report; longer if all failures are consequences of another's end."""
        self._trouble_at = self._trouble_at or now
        waited = now - self._trouble_at
        certain = any(
            not e.failure["secondary"] if e.failure else not (e.alive or e.over or e.aborted) for e in found
        )
        all_ended = all(e.has_left for e in found)
        # If all have ended a second observation is enough: a rank may write its failure and die between two
        # reads of the first.
        if waited < (CERTAIN_S if certain else SETTLE_S) and not (all_ended and waited > 0):
            return
        verdict = judge(found, ranks=self.options.world_size, hints=self.hints)
        if verdict is not None and verdict.kind != "network":
            self._show(verdict, found)
        elif waited > ECHO_S:
            failed = [(e.rank, e.failure) for e in found if e.failure]
            rank, failure = min(failed, key=lambda one: one[1]["time"])
            self._show(Verdict("lost", (rank,), failure["print"], "", failure["hint"]), found)

    def _judge_stillness(self, now: float, found: list[Observation]) -> None:
        live = [e for e in found if e.alive and not e.over and not e.silent_node_s]
        still = min((e.still_s for e in live), default=0.0)
        steps = self._step_s()
        if self.shown is not None and still < ASK_S:
            stood_s = now - self.shown_at + self._shown_still
            print_lines([f"watch: the run continues, {stood_s:.0f} s after it stood still"])
            self.shown = None
        if still < self._suspicious_s() or self.options.hang_s == 0:
            self._candidate = None
            return
        if not steps and still < NO_STEP_YET_S:
            return  # before the first step: loading and compiling have no measure of their own
        if now - self._asked_at < 0.4:
            return
        self._asked_at = now
        self._decide(still, self._ask_all_ranks())

    def _suspicious_s(self) -> float:
        """Stillness of all ranks before requests go to the responders."""
        return max(ASK_S, STEPS_STILL * self._step_s())

    def _decide(self, still: float, found: list[Observation]) -> None:
        """Print a verdict that comes twice in a row; end the job when its time is up."""
        verdict = judge(
            found,
            ranks=self.options.world_size,
            endless_s=ENDLESS * self._suspicious_s(),
            hints=self.hints,
        )
        key = (verdict.kind, verdict.ranks) if verdict is not None else None
        same, self._candidate = key == self._candidate, key
        if verdict is None or not same:
            return
        longest = self._hang_s(verdict, evaluates=any(e.phase == "evaluate" for e in found))
        if self.shown is None:
            self._shown_still = still
            self._show(verdict, found, ends_in_s=max(0.0, longest - still))
        if not verdict.recoverable or still > longest:
            self._end_everyone()

    def _hang_s(self, verdict: Verdict, *, evaluates: bool) -> float:
        """The longest stillness of a run in this state."""
        if self.options.hang_s > 0:
            return self.options.hang_s
        first = not self._step_s() and verdict.kind != "stopped"
        if first or (verdict.kind == "data" and evaluates):
            return FIRST_S
        least = STORAGE_LEAST_S if verdict.kind == "storage" else HANG_LEAST_S
        return max(least, HANG_STEPS * self._step_s())

    def _ask_all_ranks(self) -> list[Observation]:
        """Observations with the responders' answers, of all nodes in reach."""
        if self.head is not None and self.head.connections:
            self.head.broadcast({"ask": True})
            self.ranks.ask()
            self.head.wait_for_answers(time.monotonic() + ANSWER_S + 0.5)
        else:
            self.ranks.ask()
        return self._all_observations()

    # ------------------------------------------------------------ printing and ending

    def _show(self, verdict: Verdict, found: Sequence[Observation], ends_in_s: float = 0.0) -> None:
        self.shown, self.shown_at = verdict, time.monotonic()
        step = max((e.step for e in found), default=0)
        folder = f"{verdict.kind.replace(' ', '-')}-{step:06d}"
        self._print(verdict, _failure_of(verdict, found), ends_in_s)
        record = {
            "time": time.time(),
            "by": self.options.node,
            "kind": verdict.kind,
            "ranks": list(verdict.ranks),
            "what": verdict.what,
            "nodes": sorted({e.node for e in found if e.rank in verdict.ranks}),
            "others": verdict.others,
            "hint": verdict.hint,
            "step": step,
            "still_s": min((e.still_s for e in found if e.alive and not e.over), default=0.0),
            "folder": folder,
        }
        self.files.append("verdicts.jsonl", record)
        if verdict.kind != "config":
            self._keep_all(folder, found)
        self._release()

    def _print(self, verdict: Verdict, failure: dict[str, Any] | None, ends_in_s: float) -> None:
        if failure is None:
            ends = f"  ends the job in {ends_in_s:.0f} s unless it continues"
            first, *more = verdict.lines()
            print_lines([f"watch: {first}", *more, *([ends] if verdict.recoverable else [])])
        elif self.options.prints_failures:
            print_lines([failure["print"], *([f"  {verdict.others}"] if verdict.others else [])])

    def _keep_all(self, folder: str, found: Sequence[Observation]) -> None:
        self.files.write(f"{folder}/{EVIDENCE}", json.dumps([e.encoded() for e in found], indent=1))
        if self.head is not None:
            self.head.broadcast({"keep": folder})
        self.ranks.keep(folder)

    def _release(self) -> None:
        """Failed ranks wait for this: with the last of them the terminal may be gone."""
        if self.shown is None or self.shown.recoverable:
            return
        if self.head is not None:
            self.head.broadcast({"printed": True})
        self.ranks.mark_printed()

    def _end_everyone(self, *, failed: bool = False) -> None:
        """`failed`: also the ranks that have reported a failure and do not end."""
        if self.head is not None:
            self.head.broadcast({"end": True, "failed": failed})
            self.head.exchange()
        self._end_ranks(failed)

    def _end_ranks(self, failed: bool) -> None:
        if not self.ranks.to_end(failed):
            return
        # before the ranks end: their launcher reads it when they have
        self.files.append(
            "verdicts.jsonl",
            {"time": time.time(), "kind": ENDED, "ranks": list(self.options.ranks), "what": "by the watch"},
        )
        self.ranks.end(failed)

    def _rank_times(self) -> RankTimes:
        reports = self.head.reports.values() if self.head is not None else ()
        steps, spent = self.ranks.steps(), self.ranks.spent()
        names = frozenset(next(iter(spent.values())))
        for report in reports:
            steps_there, spent_there = times_of(report, names)
            steps |= steps_there
            spent |= spent_there
        first = self.ranks.ranks[0].status
        return RankTimes(steps, spent, count=first.steps, step=first.step)


def _unseen_since(connection: MonitorConnection) -> dict[str, Any]:
    """Fields for the observations of a node's ranks; none while its monitor reports."""
    if connection.gone:
        return {"silent_node_s": connection.silent_s, "monitor_ended": True}
    return {"silent_node_s": connection.silent_s} if connection.silent_s > SILENT_S else {}


def _failure_of(verdict: Verdict, found: Sequence[Observation]) -> dict[str, Any] | None:
    """The failure report of the rank at fault; else one with the same message."""
    failures = [(e.rank, e.failure) for e in found if e.failure]
    own = (one for rank, one in failures if rank == verdict.ranks[0] and not one["secondary"])
    same = (one for _, one in failures if one["message"] == verdict.what)
    return next(own, None) or next(same, None)


def print_lines(lines: Sequence[str]) -> None:
    """Plain lines on standard error; on a terminal they replace the run's live line, which is drawn again."""
    clear = "\r\x1b[2K" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""
    with contextlib.suppress(OSError):  # the terminal is gone; verdicts.jsonl has the same
        # a file's name in a message may have bytes that are not UTF-8
        os.write(2, (clear + "\n".join(lines) + "\n").encode(errors="backslashreplace"))


def main() -> None:
    # Ctrl-C and the scheduler's SIGTERM are for the ranks; this process ends with them
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    # after a SIGSTOP it still ends with its run
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    data = json.loads(sys.stdin.readline() or sys.exit())  # nothing: the rank has ended
    data["ranks"] = {int(rank): path for rank, path in data["ranks"].items()}
    monitor = Monitor(MonitorOptions(**data))
    if monitor.ranks.ranks:
        monitor.run()


if __name__ == "__main__":
    main()

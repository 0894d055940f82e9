"""A process of its own on each node, without torch: it looks at its ranks, judges what it sees, says it, and
ends the job.

Started by the first rank of a node with what it must know as one JSON argument; its standard input is that
rank's, and closes with it. It ends when its ranks have. On several nodes the head's judges for all; a node
that is cut off judges for itself.

Here lives the order of looking, judging, saying and ending, and how long each is waited for. What is done to
the ranks of the node is crew.py's; what the evidence means, verdict.py's; the lines between nodes are
nodes.py's.

Exit code of the ranks that it ends: 7, or 137 (killed) of one that cannot hear any more.
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

from fsdp.watch.hang_verdict import Verdict, judge
from fsdp.watch.monitor_links import SILENT_S, Head, Line, Peer
from fsdp.watch.monitor_options import Orders
from fsdp.watch.node_ranks import Crew
from fsdp.watch.observation import Evidence, decode
from fsdp.watch.observe import ANSWER_S
from fsdp.watch.records import Files
from fsdp.watch.timing import Ledger, Told

BEAT_S = 0.2
SHORT_STEP_S, SHORT_BEAT_S = 0.05, 0.1
"""Where steps are short a late rank is to be named before many of them have passed. A look costs half a
millisecond.
"""
ASK_S = 1.5
"""Stillness after which the ranks are asked, at least; a verdict comes with the second answer."""
STEPS_STILL = 6
"""Or this many of the run's own slow steps."""
ENDLESS = 2
"""Times that stillness, in processor time of one rank: more than any step computes."""
NO_STEP_YET_S = 20.0
HANG_LEAST_S, HANG_STEPS = 60.0, 30
"""A rank that may come back is waited for at least so long, or so many steps."""
UNREACHED_S = 10.0
"""A node that has not reached the head by then judges for itself what it sees."""
CERTAIN_S, SETTLE_S, ECHO_S = 0.5, 1.5, 3.0
"""Wait after a first failure for the words of other ranks: if a rank has told an error of its own or is dead,
when those of an earlier error are on their way; if none has, or gloo has aborted it; if all words are echoes.
"""
GRACE_S, FAILED_S = 5.0, 15.0
"""After the verdict, until the ranks that have not failed are ended; until those are that have, and do not
leave.
"""
PR_SET_PDEATHSIG = 1


class Monitor:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.files = Files(Path(orders.run) / "watch")
        self.crew = Crew(orders.ranks, orders.node, self.files)
        self.head = Head(orders.ear, orders.token) if orders.ear >= 0 else None
        self.peer = Peer(orders.addresses, orders.token, orders.node) if orders.addresses else None
        self.ledger = Ledger(orders.late_percent, orders.nodes, self.files, say)
        self.shown: Verdict | None = None
        self.shown_at = 0.0
        self._candidate: tuple[str, tuple[int, ...]] | None = None
        self._asked_at = self._trouble_at = self._shown_still = 0.0
        self._lead_gone = self._head_over = False
        self._began = time.monotonic()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            lost = max(0.0, now - before - BEAT_S - 2 * ANSWER_S)
            before = now
            self.crew.look(now, lost)
            self._exchange()
            if self._judges():
                self._judge(now)
            if self.crew.gone and self._nothing_left(now):
                break
            if self.crew.leaving or (self._trouble_at and self.shown is None):
                time.sleep(0.02)
            else:
                self._rest()
        self._leave()

    def _rest(self) -> None:
        """Until the next beat, or until the first rank closes the pipe."""
        beat_s = SHORT_BEAT_S if 0 < self.crew.step_s < SHORT_STEP_S and not self.orders.addresses else BEAT_S
        if self._lead_gone:
            time.sleep(beat_s)
        elif select.select([0], [], [], beat_s)[0]:
            self._lead_gone = not os.read(0, 4096)

    def _nothing_left(self, now: float) -> bool:
        """All have ended here: is there still something to be said?"""
        bad = any(not e.over for e in self.crew.seen)
        return (
            not bad
            or self.shown is not None
            or (self._trouble_at > 0 and now - self._trouble_at > ECHO_S + 1)
        )

    def _leave(self) -> None:
        if self.peer is not None:
            self.peer.beat(self.crew.report())
        if self.head is not None:
            self.head.beat()  # what is left unread when a line closes would take the last word with it
            self.head.tell({"bye": True})
        if self.shown is None and self.peer is None:
            self.ledger.beat(time.monotonic(), self._told, last=True)
        self.files.close()
        self.crew.forget()
        for line in (self.head, self.peer):
            if line is not None:
                line.close()

    # ------------------------------------------------------------ several nodes

    def _exchange(self) -> None:
        if self.head is not None:
            self.head.beat()
        if self.peer is None:
            return
        for word in self.peer.beat(self.crew.report()):
            if word.get("look"):
                self.crew.ask()
                self.peer.beat(self.crew.report(asked=True))
            if word.get("keep"):
                self.crew.keep(word["keep"])
            if word.get("said"):
                if self.shown is None:
                    self.shown, self.shown_at = Verdict("told", (), "by the head"), time.monotonic()
                self._let_go()
            self._head_over |= word.get("bye", False)
            if word.get("end"):
                self.shown = Verdict("told", (), "by the head")
                self._end_ranks(word["failed"])

    def _judges(self) -> bool:
        """The head does, and a node that is cut off from it or never reached it, for itself."""
        if self.peer is None or self._cut_off():
            return True
        return self.peer.line is None and time.monotonic() - self._began > UNREACHED_S

    def _cut_off(self) -> bool:
        line = self.peer.line if self.peer is not None else None
        return line is not None and (line.silent_s > SILENT_S or line.closed)

    def _everyone(self) -> list[Evidence]:
        found = list(self.crew.seen)
        if self.head is not None:
            for node, word in self.head.said.items():
                line = self.head.lines[node]
                ranks = [decode(data) for data in word["ranks"]]
                found += [e if e.has_left else replace(e, **_unseen_since(line)) for e in ranks]
        elif self._cut_off() and not self._head_over:
            assert self.peer is not None
            assert self.peer.line is not None
            head, of_head = next((node, own) for node, own in self.orders.nodes.items() if 0 in own)
            found += [Evidence(rank, head, **_unseen_since(self.peer.line)) for rank in of_head]
        return sorted(found, key=lambda e: e.rank)

    # ------------------------------------------------------------ judging

    def _step_s(self) -> float:
        others = [word["step_s"] for word in self.head.said.values()] if self.head is not None else []
        return max(self.crew.step_s, *others, 0.0)

    def _judge(self, now: float) -> None:
        found = self._everyone()
        bad = [
            e for e in found if e.words is not None or (not e.alive and not e.over and not e.silent_node_s)
        ]
        if bad and (self.shown is None or self.shown.recoverable):
            self._judge_failure(now, found)
        elif self.shown is not None and not self.shown.recoverable:
            if now - self.shown_at > GRACE_S:
                # Ray ends its workers itself, and reads their errors from them before
                late = now - self.shown_at > FAILED_S and self.orders.tells_failures
                self._end_everyone(failed=late)
        else:
            self._judge_stillness(now, found)
            self.ledger.beat(now, self._told)

    def _judge_failure(self, now: float, found: Sequence[Evidence]) -> None:
        """Wait a moment for everyone's words; longer where all that was said is that somebody else is gone."""
        self._trouble_at = self._trouble_at or now
        waited = now - self._trouble_at
        certain = any(
            not e.words["secondary"] if e.words else not (e.alive or e.over or e.aborted) for e in found
        )
        all_ended = all(e.words is not None or e.over or not e.alive for e in found)
        # Where all have ended a second look is enough: one may have left its words and died between two reads
        # of the first.
        if waited < (CERTAIN_S if certain else SETTLE_S) and not (all_ended and waited > 0):
            return
        verdict = judge(found, ranks=self.orders.world_size)
        if verdict is not None and verdict.kind != "network":
            self._show(verdict, found)
        elif waited > ECHO_S:
            first = min((e for e in found if e.words), key=lambda e: e.words["time"] if e.words else 0.0)
            assert first.words is not None
            self._show(Verdict("lost", (first.rank,), first.words["print"], "", first.words["hint"]), found)

    def _judge_stillness(self, now: float, found: list[Evidence]) -> None:
        live = [e for e in found if e.alive and not e.over and not e.silent_node_s]
        still = min((e.still_s for e in live), default=0.0)
        steps = self._step_s()
        if self.shown is not None and still < ASK_S:
            say(
                [
                    f"watch: the run goes on, {now - self.shown_at + self._shown_still:.0f} s after it stood still"
                ]
            )
            self.shown = None
        if still < self._suspicious_s() or self.orders.hang_s == 0:
            self._candidate = None
            return
        if not steps and still < NO_STEP_YET_S:
            return  # before the first step: loading and compiling have no measure of their own
        if now - self._asked_at < 0.4:
            return
        self._asked_at = now
        self._decide(now, still, self._ask_everyone())

    def _suspicious_s(self) -> float:
        """How long all may stand still before anybody is asked."""
        return max(ASK_S, STEPS_STILL * self._step_s())

    def _decide(self, now: float, still: float, found: list[Evidence]) -> None:
        verdict = judge(found, ranks=self.orders.world_size, endless_s=ENDLESS * self._suspicious_s())
        key = (verdict.kind, verdict.ranks) if verdict is not None else None
        same, self._candidate = key == self._candidate, key
        if verdict is None or not same:
            return
        if self.shown is None:
            self._shown_still = still
            self._show(verdict, found, ends_in=self._hang_s() - still)
        if not verdict.recoverable or still > self._hang_s():
            self._end_everyone()

    def _hang_s(self) -> float:
        return (
            self.orders.hang_s if self.orders.hang_s > 0 else max(HANG_LEAST_S, HANG_STEPS * self._step_s())
        )

    def _ask_everyone(self) -> list[Evidence]:
        if self.head is not None and self.head.lines:
            self.head.tell({"look": True})
            self.crew.ask()
            self.head.wait_for_looks(time.monotonic() + ANSWER_S + 0.5)
        else:
            self.crew.ask()
        return self._everyone()

    # ------------------------------------------------------------ saying and ending

    def _show(self, verdict: Verdict, found: Sequence[Evidence], ends_in: float = 0.0) -> None:
        self.shown, self.shown_at = verdict, time.monotonic()
        step = max((e.step for e in found), default=0)
        folder = f"{verdict.kind.replace(' ', '-')}-{step:06d}"
        self._say(verdict, _told_by(verdict, found), ends_in)
        record = {
            "time": time.time(), "by": self.orders.node, "kind": verdict.kind, "ranks": list(verdict.ranks),
            "what": verdict.what, "nodes": sorted({e.node for e in found if e.rank in verdict.ranks}), "others": verdict.others,
            "hint": verdict.hint, "step": step,
            "still_s": min((e.still_s for e in found if e.alive and not e.over), default=0.0), "folder": folder,
        }  # fmt: skip
        self.files.append("verdicts.jsonl", record)
        if verdict.kind != "config":
            self._keep_all(folder, found)
        self._let_go()

    def _say(self, verdict: Verdict, words: dict[str, Any] | None, ends_in: float) -> None:
        if words is None:
            ends = f"  ends the job in {ends_in:.0f} s unless it goes on" if verdict.recoverable else ""
            say(["watch: " + verdict.lines()[0], *verdict.lines()[1:], *([ends] if ends else [])])
        elif self.orders.tells_failures:
            say([words["print"], *([f"  {verdict.others}"] if verdict.others else [])])

    def _keep_all(self, folder: str, found: Sequence[Evidence]) -> None:
        self.files.write(f"{folder}/evidence.json", json.dumps([e.encoded() for e in found], indent=1))
        if self.head is not None:
            self.head.tell({"keep": folder})
        self.crew.keep(folder)

    def _let_go(self) -> None:
        """Ranks that have failed wait until their story is told: with the last of them the screen may be
        gone.
        """
        if self.shown is None or self.shown.recoverable:
            return
        if self.head is not None:
            self.head.tell({"said": True})
        self.crew.let_go()

    def _end_everyone(self, *, failed: bool = False) -> None:
        """`failed`: those too that have said how they failed, and do not leave."""
        if self.head is not None:
            self.head.tell({"end": True, "failed": failed})
            self.head.beat()
        self._end_ranks(failed)

    def _end_ranks(self, failed: bool) -> None:
        if not self.crew.end(failed):
            return
        self.files.append(
            "verdicts.jsonl",
            {"time": time.time(), "kind": "ended", "ranks": list(self.orders.ranks), "what": "by the watch"},
        )

    def _told(self) -> Told:
        words = list(self.head.said.values()) if self.head is not None else []
        steps, spent = self.crew.steps(), self.crew.spent()
        for word in words:
            # JSON has no numbers for keys and no tuples
            steps |= {
                int(rank): {int(step): (a, b) for step, (a, b) in rows.items()}
                for rank, rows in word["steps"].items()
            }
            spent |= {int(rank): values for rank, values in word["spent"].items()}
        first = self.crew.ranks[0].beat
        return Told(steps, spent, count=first.steps, step=first.step)


def _unseen_since(line: Line) -> dict[str, Any]:
    """What a connection adds to the evidence of its node's ranks; nothing while the node's monitor is heard
    of.
    """
    if line.closed:
        return {"silent_node_s": max(line.silent_s, 1e-3), "monitor_ended": True}
    return {"silent_node_s": line.silent_s} if line.silent_s > SILENT_S else {}


def _told_by(verdict: Verdict, found: Sequence[Evidence]) -> dict[str, Any] | None:
    """The last words of whoever is blamed; else those that say the same."""
    words = next(
        (e.words for e in found if e.words and e.rank == verdict.ranks[0] and not e.words["secondary"]), None
    )
    return words or next((e.words for e in found if e.words and e.words["message"] == verdict.what), None)


def say(lines: Sequence[str]) -> None:
    """Plain lines; on a terminal in the place of the run's live line, which is drawn anew."""
    clear = "\r\x1b[2K" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""
    with contextlib.suppress(OSError):  # the screen is gone; verdicts.jsonl is not
        os.write(2, (clear + "\n".join(lines) + "\n").encode())


def main(argument: str) -> None:
    # Ctrl-C and the scheduler's TERM are for the ranks; this process ends with them
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    # stopped by somebody, it still ends with its run
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    data = json.loads(argument)
    data["ranks"] = {int(rank): path for rank, path in data["ranks"].items()}
    data["addresses"] = tuple((host, port) for host, port in data["addresses"])
    monitor = Monitor(Orders(**data))
    if monitor.crew.ranks:
        monitor.run()


if __name__ == "__main__":
    main(sys.argv[1])

"""From what was found of every rank to who it was. Pure: nothing is read here, nothing done, no clock asked.

The order of the questions is the point. Words come before silence (an exception names itself), a death before
a stillness, a stopped process before one that waits; and where every rank waits in a collective, the one that
waits in another than most. A rank that computes slowly because the machine is full is none of these: it
waited for a processor, and the kernel counted. What can be said of one rank alone is evidence.py's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fsdp.base.phases import PHASES
from fsdp.watch.observation import BUSY_S, Evidence, prepares, spot, waits, waits_for_save, writes

AT_ONCE_S = 0.05
"""Found dead by the same look: of these nobody was first."""
NETWORK_S = 10.0
"""All in one collective: on a full machine its transport may only be waiting for a processor."""
RECOVERABLE = ("stopped", "data", "loop", "lock", "blocked", "storage", "network")
"""Of these a rank may come back by itself: they are said at once, and end the job later."""
NOT_YET = ("start", "end")
"""Phases without steps, in which one rank may work for long while others wait: loading, the export."""


@dataclass(frozen=True)
class Verdict:
    kind: str
    ranks: tuple[int, ...]
    what: str
    """A line: who and where."""
    others: str = ""
    hint: str = ""
    trace: str = ""

    @property
    def recoverable(self) -> bool:
        return self.kind in RECOVERABLE

    def lines(self) -> list[str]:
        return [
            self.what,
            *([f"  {self.others}"] if self.others else []),
            *([f"  HINT: {self.hint}"] if self.hint else []),
        ]


# ---------------------------------------------------------------- judging


def judge(found: Sequence[Evidence], *, ranks: int = 0, endless_s: float = math.inf) -> Verdict | None:
    """None if the evidence does not prove anything. `ranks`: how many the run has; some may be missing from
    `found`. `endless_s`: processor time that no step takes, which proves a loop where other processes have
    the processors too.
    """
    live = [e for e in found if e.alive and not e.over]
    if live and all(e.state == "T" for e in live):
        return None  # the scheduler has suspended the job
    # Ranks that are not seen may be the ones at fault: comparing the collectives of the others would blame
    # one of these.
    all_seen = len(found) >= ranks and not any(e.silent_node_s for e in found)
    absent = partial(_absent, endless_s=endless_s)
    for one in (_words, _dead, _echoes, _unseen, _stopped, _apart, absent, _network):
        verdict = one(found) if all_seen or one not in COMPARING else None
        if verdict is not None:
            return verdict
    return None


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _who(e: Evidence) -> str:
    return f"rank {e.rank}" + (f" ({e.node})" if e.node else "")


def _at(e: Evidence) -> str:
    where = spot(e.stack)
    return f"step {e.step}, {e.phase}" + (f", at {where}" if where else "")


def _waiting(found: Sequence[Evidence], culprits: Sequence[int]) -> str:
    """What the others wait for, in one line."""
    rest = [e for e in found if e.rank not in culprits and e.alive and e.words is None]
    if not rest:
        return ""
    op = Counter((e.op if e.in_call else "its end", e.step, e.phase) for e in rest).most_common(1)[0][0]
    verb = "waits" if len(rest) == 1 else "wait"
    return f"{_named([e.rank for e in rest])} {verb} in {op[0]} (step {op[1]}, {op[2]})"


def _words(found: Sequence[Evidence]) -> Verdict | None:
    """The first failure that is not only another's echo."""
    own = [(e, e.words) for e in found if e.words is not None and not e.words["secondary"]]
    if not own:
        return None
    first, words = min(own, key=lambda one: one[1]["time"])
    message, about = words["message"], tuple(words["ranks"]) or (first.rank,)
    named = re.match(r"(rank|step) ", message) or words["ours"]
    alike = {e.rank for e, one in own if one["message"] == message}
    others = _beside(found, about, alike)
    what = message if named else f"{_who(first)} failed: {message}"
    return Verdict(words["kind"], about, what, others, words["hint"], words["trace"])


def _beside(found: Sequence[Evidence], about: Sequence[int], alike: set[int]) -> str:
    """Who ended after them, or waits; nothing where all have said the same."""
    if all(e.rank in alike for e in found):
        return ""
    late = [e.rank for e in found if e.rank not in about and (e.words is not None or not (e.alive or e.over))]
    return _after([] if alike.issuperset(late) else late) or _waiting(found, about)


def _dead(found: Sequence[Evidence]) -> Verdict | None:
    dead = [e for e in found if not e.alive and not e.over and e.words is None and not e.silent_node_s]
    unseen = any(e.silent_node_s for e in found)
    if unseen:  # gloo may abort where the other side of a connection is gone
        dead = [e for e in dead if not e.aborted]
    if not dead:
        return None
    longest = max(e.dead_s for e in dead)
    first = [e for e in dead if e.dead_s > longest - AT_ONCE_S]
    who = tuple(e.rank for e in first)
    others = _waiting(found, [e.rank for e in dead]) or _after(
        [e.rank for e in found if e.rank not in who and not e.over]
    )
    faults = [e for e in first if e.fatal]
    if faults and faults[0].aborted and not unseen and (verdict := _differing(_called(found))) is not None:
        return verdict
    if faults:
        one, how = faults[0], faults[0].fatal.splitlines()[0].removeprefix("Fatal Python error: ")
        what = f"{_who(one)} died of a fault in C ({how}): {_at(one)}"
        return Verdict("fault", (one.rank,), what, others, "the stacks are in its file under RUN/watch/")
    name = _who(first[0]) if len(who) == 1 else _named(who)
    what = f"{name} died without a word (killed, or out of memory): {_at(first[0])}"
    return Verdict(
        "died", who, what, others, "dmesg or the scheduler says who killed it; memory is the usual reason"
    )


def _called(found: Sequence[Evidence]) -> list[Evidence]:
    """Those whose last collective is known: they are in it, or it was what failed. gloo ends a rank that is
    sent more than it asked for, and that is a neighbour of the one to blame.
    """
    return [e for e in found if e.in_call or (e.words is not None and e.words["secondary"])]


def _echoes(found: Sequence[Evidence]) -> Verdict | None:
    """Nobody is dead and all have failed in a collective: not in the same one?"""
    return _differing(found) if all(e.words is not None and e.words["secondary"] for e in found) else None


def _after(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} ended after it" if ranks else ""


def _unseen(found: Sequence[Evidence]) -> Verdict | None:
    """Ranks whose node's monitor is not heard of: the node is out of reach, or it answers and the processes
    are gone.
    """
    unseen = [e for e in found if e.silent_node_s]
    if not unseen:
        return None
    killed = [e for e in unseen if e.monitor_ended]
    return _killed(found, killed) if killed else _partition(found, unseen)


def _killed(found: Sequence[Evidence], killed: Sequence[Evidence]) -> Verdict:
    who = [e.rank for e in killed]
    nodes = _nodes(killed)
    what = f"the processes of {nodes} ({_named(who)}) are gone, and the node can still be reached: {_at(killed[0])}"
    left = [e.rank for e in found if e.rank not in who and e.has_left and not e.over]
    others = _waiting(found, who) or _after(left)
    return Verdict("died", tuple(who), what, others, f"who killed them: sacct, or dmesg on {nodes}")


def _partition(found: Sequence[Evidence], silent: Sequence[Evidence]) -> Verdict:
    nodes = _nodes(silent)
    here = {e.node for e in found} - {e.node for e in silent}
    from_here = f" from {here.pop()}" if len(here) == 1 else ""
    ranks, seconds = _named([e.rank for e in silent]), silent[0].silent_node_s
    what = f"node {nodes} ({ranks}) cannot be reached{from_here} for {seconds:.1f} s"
    return Verdict(
        "partition",
        tuple(e.rank for e in silent),
        what,
        _waiting(found, [e.rank for e in silent]),
        f"its network or its power; leave it out: sbatch --exclude={nodes.replace(', ', ',')}",
    )


def _nodes(found: Sequence[Evidence]) -> str:
    return ", ".join(sorted({e.node for e in found}))


def _stopped(found: Sequence[Evidence]) -> Verdict | None:
    stopped = [e for e in found if e.alive and e.state == "T"]
    if not stopped:
        return None
    who = [e.rank for e in stopped]
    what = f"{', '.join(_who(e) for e in stopped)} is stopped (SIGSTOP): {_at(stopped[0])}"
    return Verdict(
        "stopped", tuple(who), what, _waiting(found, who), f"kill -CONT {stopped[0].pid} on {stopped[0].node}"
    )


def _apart(found: Sequence[Evidence]) -> Verdict | None:
    """All wait, but not for the same."""
    alive = [e for e in found if e.alive]
    if len(alive) < 2 or not all(e.in_call for e in alive):
        return None
    return _differing(alive)


def _differing(calling: Sequence[Evidence]) -> Verdict | None:
    if len(calling) < 2:
        return None
    most = Counter((e.place, e.op, e.numel) for e in calling).most_common()
    if len(most) < 2 or most[0][1] == most[1][1]:
        return _differing_pair(calling) if len(calling) == 2 and len(most) == 2 else None
    place, op, numel = most[0][0]
    odd = [e for e in calling if (e.place, e.op, e.numel) != most[0][0]]
    return _odd(odd, place, op, numel, _waiting(calling, [e.rank for e in odd]))


def _differing_pair(calling: Sequence[Evidence]) -> Verdict | None:
    """Of two nobody is the majority: the one further on has left something out; else both are named."""
    behind, ahead = sorted(calling, key=lambda e: (e.place, e.begun))
    if behind.place == ahead.place:
        what = (
            f"{_who(behind)} is in {behind.op} of {behind.numel} numbers, {_who(ahead)} in {ahead.op} of {ahead.numel}: "
            f"{_at(behind)}"
        )
        hint = "do both ranks run the same layers (LayerDrop, experts)? What is left out must be the same on every rank"
        return Verdict(
            "shapes" if behind.op == ahead.op else "collective", (behind.rank, ahead.rank), what, hint=hint
        )
    return _odd([ahead], behind.place, behind.op, behind.numel, _waiting(calling, [ahead.rank]))


def _odd(odd: Sequence[Evidence], place: tuple[int, int], op: str, numel: int, others: str) -> Verdict:
    who, one = tuple(e.rank for e in odd), odd[0]
    name = _who(one) if len(odd) == 1 else _named(who)
    if one.place > place:
        what = f"{name} has left out {op} of step {place[0]}, {PHASES[place[1]]}, and is already in {one.op}: {_at(one)}"
        hint = "a collective under an `if` that is not true on every rank?"
        return Verdict("skipped", who, what, others, hint)
    if one.op != op:
        what = f"{name} entered another collective, {one.op}, where the others entered {op}: {_at(one)}"
        return Verdict("collective", who, what, others, "a branch that is not the same on every rank?")
    what = f"{name} came to {op} with {one.numel} numbers, the others with {numel}: {_at(one)}"
    return Verdict("shapes", who, what, others, "a size that depends on the rank's own data?")


def _absent(found: Sequence[Evidence], endless_s: float) -> Verdict | None:
    """Some wait, some have not come: what do these do?"""
    storage = _storage(found)
    if storage is not None:
        return storage
    there = [e for e in found if waits(e)] or _behind_the_front(found)
    absent = [e for e in found if e.alive and not e.over and e not in there]
    if not absent or (not there and len(found) > 1):
        return None
    reasons = [(e, _reason(e, endless_s)) for e in absent]
    if any(kind == "" for _, (kind, _) in reasons):
        return None  # one that only takes its time may be why another waits
    one, (kind, doing) = reasons[0]
    who = tuple(e.rank for e in absent)
    name = _who(one) if len(absent) == 1 else _named(who)
    return Verdict(kind, who, f"{name} {doing}: {_at(one)}", _waiting(found, who), HINTS[kind])


def _behind_the_front(found: Sequence[Evidence]) -> list[Evidence]:
    """On CUDA the host waits for the device and not in the call: those furthest on are the ones who wait."""
    if not all(e.cuda for e in found):
        return []
    front = max((e.place, e.begun) for e in found)
    there = [e for e in found if (e.place, e.begun) == front]
    return there if len(there) < len(found) else []


HINTS = {
    "data": "its data's storage, or --data.workers and --data.prefetch for more in hand",
    "loop": "the line above does not end",
    "lock": "code in C waits or works with Python's lock in its hand; its stack is in RUN/watch/",
    "blocked": "the line above waits for something that does not come",
}


def _reason(e: Evidence, endless_s: float) -> tuple[str, str]:
    """Kind and words; empty where it may well be at work."""
    endless = e.cpu_s > endless_s
    if e.phase in NOT_YET or prepares(e) or (e.starved_s > 0.3 * e.still_s and not endless):
        return "", ""
    if e.answered is False:
        return "lock", "holds Python's lock in C and does not answer"
    if e.answered is None:
        return "", ""
    if e.phase == "data":
        return "data", f"waits for its data, {e.still_s:.1f} s by now"
    if endless or e.cpu_s > max(BUSY_S, 0.6 * e.still_s):
        return "loop", f"computes without end, {e.cpu_s:.1f} s by now" + (", in Python" if e.moving else "")
    if e.state in "SD" and e.cpu_s < BUSY_S:
        return "blocked", f"waits outside of any collective, {e.still_s:.1f} s by now"
    return "", ""


def _storage(found: Sequence[Evidence]) -> Verdict | None:
    """All stand in a save, and some are at the storage."""
    live = [e for e in found if e.alive]
    at_it = [e for e in live if writes(e)]
    if not at_it or not all(writes(e) or waits_for_save(e) or waits(e) for e in live):
        return None
    if any(e.phase in NOT_YET and not waits_for_save(e) and not writes(e) for e in live):
        return None
    one = at_it[0]
    who = tuple(e.rank for e in at_it)
    stack = next((s for s in (one.threads.get("checkpoint", ()), one.stack) if s), ())
    name = _who(one) if len(at_it) == 1 else _named(who)
    what = f"{name} is in a save and its storage is slow, {one.still_s:.1f} s by now: step {one.step}, at {spot(stack)}"
    return Verdict("storage", who, what, _waiting(found, who), "its storage; --checkpoint.dir elsewhere")


def _network(found: Sequence[Evidence]) -> Verdict | None:
    """All in the same collective, and it does not end."""
    live = [e for e in found if e.alive]
    if len(live) < 2 or not all(e.in_call for e in live) or len({(e.place, e.op, e.numel) for e in live}) > 1:
        return None
    if any(e.still_s < NETWORK_S or e.starved_s > 0.3 * e.still_s or e.phase in NOT_YET for e in live):
        return None
    e = live[0]
    what = f"all ranks are in {e.op} and it does not end, {e.still_s:.1f} s by now: {_at(e)}"
    return Verdict("network", tuple(r.rank for r in live), what, "", "the network between the ranks")


COMPARING = (_echoes, _apart, _network)
"""Questions that compare the ranks' collectives: answered only if every rank is seen."""

"""Verdict: which rank is at fault, from the observations of all ranks.

Pure functions, without I/O or a clock. The checks run in a fixed order, and the first that finds something
decides: a rank's own exception, a dead rank, an unreachable node, a stopped process, collectives that differ
between ranks, a rank that has not come to the collective where the others wait, and last a network that moves
nothing. A verdict rests on evidence, not on time alone: a rank that compiles, imports, loads or waits for a
free processor (the kernel counts that time) is not at fault. What one rank's observation shows by itself is
in observation.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fsdp.base.phases import PHASES, Activity
from fsdp.base.text import named_ranks
from fsdp.base.units import byte_size
from fsdp.dist.launcher_hints import LauncherHints
from fsdp.watch.observation import (
    BUSY_S,
    Observation,
    own_line,
    place_of,
    prepares,
    reads_data,
    waits,
    waits_for_save,
    writes,
)
from fsdp.watch.recorded_calls import StuckCall, find_stuck

AT_ONCE_S = 0.05
"""Ranks found dead within this time of each other: none of them counts as the first."""
NETWORK_S = 10.0
"""All ranks in one collective: on a full machine its transport may only be waiting for a processor."""
SLOW_STORAGE = 50 << 20
"""Bytes a second of one rank; at more, a large save or load goes on as it should."""
RECOVERABLE = ("stopped", "data", "loop", "lock", "blocked", "storage", "device", "network")
"""Kinds from which a rank may recover by itself: printed at once, and the job ends later."""
NOT_YET = ("start", "end")
"""Phases without steps, in which one rank may work for long while others wait: loading, the export."""
SAME_PARTS = (
    "draw what is left out from a generator with the same seed on every rank, "
    "or add 0 * part(x).sum() to the loss for a part that a rank does not use"
)


@dataclass(frozen=True)
class Verdict:
    kind: str
    ranks: tuple[int, ...]
    what: str
    """One line: which rank, what it does and where."""
    others: str = ""
    hint: str = ""
    final: bool = False
    """A rank has failed: what the others recover from does not continue the run."""

    @property
    def recoverable(self) -> bool:
        return self.kind in RECOVERABLE and not self.final

    def lines(self) -> list[str]:
        return [
            self.what,
            *([f"  {self.others}"] if self.others else []),
            *([f"  HINT: {self.hint}"] if self.hint else []),
        ]


# ---------------------------------------------------------------- judging


OF_TORCHRUN = LauncherHints()


def judge(
    found: Sequence[Observation],
    *,
    ranks: int = 0,
    endless_s: float = math.inf,
    hints: LauncherHints = OF_TORCHRUN,
) -> Verdict | None:
    """None if the observations prove nothing. A dead rank of a node that is seen always has a verdict.

    `ranks`: how many the run has; some may be missing from `found`. `endless_s`: processor time that no step
    takes, which proves a loop even where other processes share the processors. `hints`: its launcher's.
    """
    live = [e for e in found if e.alive and not e.over]
    failed = any(e.has_failed for e in found)
    if live and all(e.stopped for e in live) and not failed:
        return None  # the scheduler has suspended the job
    # An unseen rank may be at fault: comparing the collectives of the others would blame one of those.
    all_seen = len(found) >= ranks and not any(e.silent_node_s for e in found)
    dead, unseen = partial(_dead, hints=hints), partial(_unseen, hints=hints)
    absent, recorded = partial(_absent, endless_s=endless_s), partial(_recorded, endless_s=endless_s)
    comparing = (_echoes, _apart, recorded, _network)  # the ranks' collectives
    for one in (_failed, dead, _echoes, unseen, _stopped, _apart, _storage, recorded, absent, _network):
        verdict = one(found) if all_seen or one not in comparing else None
        if verdict is not None:
            return replace(_with_parameters(verdict, found), final=failed)
    return None


def _who(e: Observation) -> str:
    return f"rank {e.rank}" + (f" ({e.node})" if e.node else "")


def _names(some: Sequence[Observation]) -> str:
    """The subject of a verb in the singular."""
    return _who(some[0]) if len(some) == 1 else f"each of {named_ranks([e.rank for e in some])}"


def _at(e: Observation) -> str:
    where = place_of(e)
    return f"step {e.step}, {e.phase}" + (f", at {where}" if where else "")


def _waiting(found: Sequence[Observation], culprits: Sequence[int]) -> str:
    """One line: what the others wait for."""
    rest = [e for e in found if e.rank not in culprits and e.alive and e.failure is None]
    if not rest:
        return ""
    op = Counter((e.op if e.in_call else "its end", e.step, e.phase) for e in rest).most_common(1)[0][0]
    verb = "waits" if len(rest) == 1 else "wait"
    return f"{named_ranks([e.rank for e in rest])} {verb} in {op[0]} (step {op[1]}, {op[2]})"


def _failed(found: Sequence[Observation]) -> Verdict | None:
    """The first failure that is no consequence of another rank's."""
    own = [(e, e.failure) for e in found if e.failure is not None and not e.failure["secondary"]]
    if not own:
        return None
    first, failure = min(own, key=lambda one: one[1]["time"])
    message, culprits = failure["message"], tuple(failure["ranks"]) or (first.rank,)
    alike = {e.rank for e, one in own if one["message"] == message}
    others = _beside(found, culprits, alike)
    what = message if failure["ours"] else f"{_who(first)} failed: {message}"
    return Verdict(failure["kind"], culprits, what, others, failure["hint"])


def _beside(found: Sequence[Observation], culprits: Sequence[int], alike: set[int]) -> str:
    """Which ranks ended after them, or wait; empty if all raised the same error."""
    if all(e.rank in alike for e in found):
        return ""
    rest = [e for e in found if e.rank not in culprits]
    late = [e.rank for e in rest if e.failure is not None or not (e.alive or e.over)]
    return _after([] if alike.issuperset(late) else late) or _waiting(found, culprits)


def _dead(found: Sequence[Observation], hints: LauncherHints) -> Verdict | None:
    dead = [e for e in found if not e.alive and not e.over and e.failure is None and not e.silent_node_s]
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
    killed = [e for e in first if e.oom_kills and not e.fatal]
    if killed and len(killed) <= max(e.oom_kills for e in killed):  # else a launcher has killed some of them
        what = f"{_names(killed)} was killed by the kernel, out of memory: {_at(killed[0])}"
        return Verdict("died", tuple(e.rank for e in killed), what, others, _room(killed[0], hints))
    if faults and faults[0].aborted and not unseen and (verdict := _differing(_called(found))) is not None:
        return verdict
    if faults:
        one, how = faults[0], faults[0].fatal.splitlines()[0].removeprefix("Fatal Python error: ")
        what = f"{_who(one)} died of a fault in C ({how}): {_at(one)}"
        return Verdict("fault", (one.rank,), what, others, "its stacks are in RUN/watch/")
    what = f"{_names(first)} died without an error message (killed, or out of memory): {_at(first[0])}"
    hint = "dmesg or the scheduler's log shows what killed it, such as memory; os._exit in code is silent too"
    return Verdict("died", who, what, others, hint)


def _room(e: Observation, hints: LauncherHints) -> str:
    """A hint for a rank that the kernel has killed for lack of memory."""
    less = "less on the host: --data.prefetch 1, --checkpoint.mode blocking (docs/oom.md)"
    if not e.memory_limit:
        return f"the node had no memory left: fewer ranks a node, or {less}"
    limit = byte_size(e.memory_limit)
    return f"its cgroup allows {limit}: a larger limit ({hints.more_memory}), or {less}"


def _called(found: Sequence[Observation]) -> list[Observation]:
    """Ranks whose last collective is known: they are in it, or it failed.

    gloo ends a rank that receives more than it expects, and that rank is a neighbour of the one at fault.
    """
    return [e for e in found if e.in_call or (e.failure is not None and e.failure["secondary"])]


def _echoes(found: Sequence[Observation]) -> Verdict | None:
    """All have failed in a collective and none is dead: compares the collectives."""
    all_echo = all(e.failure is not None and e.failure["secondary"] for e in found)
    return _differing(found) if all_echo else None


def _after(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} ended after it" if ranks else ""


def _unseen(found: Sequence[Observation], hints: LauncherHints) -> Verdict | None:
    """Ranks whose node's monitor is silent: the node is out of reach, or only its processes are gone."""
    unseen = [e for e in found if e.silent_node_s]
    if not unseen:
        return None
    killed = [e for e in unseen if e.monitor_ended]
    return _killed(found, killed, hints) if killed else _partition(found, unseen, hints)


def _killed(found: Sequence[Observation], killed: Sequence[Observation], hints: LauncherHints) -> Verdict:
    who = [e.rank for e in killed]
    nodes = _nodes(killed)
    gone = f"the processes of {nodes} ({named_ranks(who)}) are gone, and the node can still be reached"
    what = f"{gone}: {_at(killed[0])}"
    left = [e.rank for e in found if e.rank not in who and e.has_left and not e.over]
    others = _waiting(found, who) or _after(left)
    return Verdict("died", tuple(who), what, others, f"{hints.killer(nodes)} shows what killed them")


def _partition(found: Sequence[Observation], silent: Sequence[Observation], hints: LauncherHints) -> Verdict:
    nodes = _nodes(silent)
    here = {e.node for e in found} - {e.node for e in silent}
    from_here = f" from {here.pop()}" if len(here) == 1 else ""
    ranks, seconds = named_ranks([e.rank for e in silent]), silent[0].silent_node_s
    what = f"node {nodes} ({ranks}) cannot be reached{from_here} for {seconds:.1f} s"
    return Verdict(
        "partition",
        tuple(e.rank for e in silent),
        what,
        _waiting(found, [e.rank for e in silent]),
        f"check its network and power, or leave it out: {hints.without(nodes.split(', '))}",
    )


def _nodes(found: Sequence[Observation]) -> str:
    return ", ".join(sorted({e.node for e in found}))


def _stopped(found: Sequence[Observation]) -> Verdict | None:
    stopped = [e for e in found if e.alive and e.stopped]
    if not stopped:
        return None
    who, first = [e.rank for e in stopped], stopped[0]
    how, hint = "SIGSTOP", f"kill -CONT {first.pid} on {first.node}"
    if first.state == "t":
        how, hint = "a debugger", f"detach the debugger from process {first.pid} on {first.node}"
    what = f"{', '.join(_who(e) for e in stopped)} is stopped ({how}): {_at(first)}"
    return Verdict("stopped", tuple(who), what, _waiting(found, who), hint)


def _apart(found: Sequence[Observation]) -> Verdict | None:
    """All are in collectives, and these differ."""
    alive = [e for e in found if e.alive]
    if len(alive) < 2 or not all(e.in_call for e in alive):
        return None
    mute = [e for e in alive if e.answered is False]
    if mute:
        # The call may have ended: its thread waits for Python's lock, and the others are in the next one.
        return _not_come(mute, _waiting(found, [e.rank for e in mute]), math.inf)
    return _differing(alive)


def _differing(calling: Sequence[Observation]) -> Verdict | None:
    if len(calling) < 2:
        return None
    most = Counter((e.place, e.op, e.numel) for e in calling).most_common()
    if len(most) < 2 or most[0][1] == most[1][1]:
        return _differing_pair(calling) if len(calling) == 2 and len(most) == 2 else None
    place, op, numel = most[0][0]
    odd = [e for e in calling if (e.place, e.op, e.numel) != most[0][0]]
    return _odd(odd, place, op, numel, _waiting(calling, [e.rank for e in odd]))


def _differing_pair(calling: Sequence[Observation]) -> Verdict | None:
    """Of two ranks the one further on has left a collective out; at the same place both are named."""
    behind, ahead = sorted(calling, key=lambda e: (e.place, e.begun))
    if behind.place == ahead.place:
        theirs = f"{_who(ahead)} in {ahead.op} of {ahead.numel}"
        what = f"{_who(behind)} is in {behind.op} of {behind.numel} numbers, {theirs}: {_at(behind)}"
        hint = "LayerDrop and expert routing must leave out the same layers on every rank"
        kind = "shapes" if behind.op == ahead.op else "collective"
        return Verdict(kind, (behind.rank, ahead.rank), what, hint=hint)
    return _odd([ahead], behind.place, behind.op, behind.numel, _waiting(calling, [ahead.rank]))


def _odd(odd: Sequence[Observation], place: tuple[int, int], op: str, numel: int, others: str) -> Verdict:
    who, one = tuple(e.rank for e in odd), odd[0]
    name = _names(odd)
    if one.place > place:
        skipped = f"{op} of step {place[0]}, {PHASES[place[1]]}"
        what = f"{name} has left out {skipped}, and is already in {one.op}: {_at(one)}"
        hint = "look for a collective under an `if` that is not true on every rank"
        return Verdict("skipped", who, what, others, hint)
    if one.op != op:
        what = f"{name} entered another collective, {one.op}, where the others entered {op}: {_at(one)}"
        return Verdict("collective", who, what, others, "look for a branch that differs between ranks")
    what = f"{name} came to {op} with {one.numel} numbers, the others with {numel}: {_at(one)}"
    return Verdict("shapes", who, what, others, "look for a size that depends on the rank's own data")


def _with_parameters(verdict: Verdict, found: Sequence[Observation]) -> Verdict:
    """Of sizes that differ: the parameters that one rank leaves out of its reduction and another does not."""
    if verdict.kind != "shapes" or len({e.left_out for e in found}) < 2:
        return verdict
    one = next(e for e in found if e.left_out)
    what = f"{verdict.what}; {_who(one)} has no gradient of {one.left_out}"
    return replace(verdict, what=what, hint=SAME_PARTS)


def _absent(found: Sequence[Observation], endless_s: float) -> Verdict | None:
    """Some ranks wait and others have not come: names those by what they do."""
    if _stuck_on_cuda(found) is not None:
        return None  # hosts run ahead of their devices: the records alone tell who waits for whom
    there = [e for e in found if waits(e)] or _behind_the_front(found)
    absent = [e for e in found if e.alive and not e.over and e not in there]
    if not absent or (not there and len(found) > 1):
        return None
    return _not_come(absent, _waiting(found, [e.rank for e in absent]), endless_s)


def _not_come(absent: Sequence[Observation], others: str, endless_s: float) -> Verdict | None:
    reasons = [(e, _reason(e, endless_s)) for e in absent]
    if any(kind == "" for _, (kind, _) in reasons):
        return None  # a rank that is at work may be the reason why another waits
    one, (kind, doing) = reasons[0]
    who = tuple(e.rank for e in absent)
    return Verdict(kind, who, f"{_names(absent)} {doing}: {_at(one)}", others, HINTS[kind])


def _recorded(found: Sequence[Observation], endless_s: float) -> Verdict | None:
    """On CUDA, from the flight recorders: hosts wait for their device, not in the call."""
    stuck = _stuck_on_cuda(found)
    if stuck is None:
        return None
    live = {e.rank: e for e in found if e.alive and not e.over}
    others = f"{named_ranks(stuck.waiting)} wait{'s' * (len(stuck.waiting) == 1)} in {stuck.call.shown}"
    mute = [e for e in live.values() if not e.answered]
    if mute or (stuck.absent and stuck.crossing is None):
        return _not_come(mute or [live[rank] for rank in stuck.absent], others, endless_s)
    return _all_came(live, stuck, others)


def _stuck_on_cuda(found: Sequence[Observation]) -> StuckCall | None:
    live = [e for e in found if e.alive and not e.over]
    if len(live) < 2 or not all(e.cuda and e.answered is not None for e in live):
        return None
    return find_stuck({e.rank: e.calls for e in live if e.answered})


def _all_came(live: Mapping[int, Observation], stuck: StuckCall, others: str) -> Verdict | None:
    """No rank is absent: the calls differ, a device is busy, or the network moves nothing."""
    call, first = stuck.call, live[stuck.waiting[0]]
    if stuck.crossing is not None:
        what = f"{_names([live[rank] for rank in stuck.absent])} waits in {stuck.crossing.shown}"
        return Verdict("collective", stuck.absent, f"{what}: {_at(live[stuck.absent[0]])}", others, CROSSED)
    if stuck.odd:
        # On CUDA hosts run ahead of their device: of the place only what the call itself has counts.
        odd = [replace(live[rank], op=one.op, numel=one.numel) for rank, one in stuck.odd.items()]
        return _odd(odd, odd[0].place, call.op, call.numel, others)
    if stuck.not_started:
        busy = [live[rank] for rank in stuck.not_started]
        what = f"the GPU of {_names(busy)} has not begun {call.shown}, that of the others has: {_at(busy[0])}"
        return Verdict("device", stuck.not_started, what, others, HINTS["device"])
    if any(e.still_s < NETWORK_S or e.phase in NOT_YET for e in live.values()):
        return None
    what = (
        f"{named_ranks(stuck.waiting)} are in {call.shown} and it does not end, {first.still_s:.1f} s by now"
    )
    return Verdict(
        "network", stuck.waiting, f"{what}: {_at(first)}", "", "check the network between the ranks"
    )


def _behind_the_front(found: Sequence[Observation]) -> list[Observation]:
    """On CUDA the host waits for the device, not in the call: the ranks furthest on are waiting."""
    if not all(e.cuda for e in found):
        return []
    front = max((e.place, e.begun) for e in found)
    there = [e for e in found if (e.place, e.begun) == front]
    return there if len(there) < len(found) else []


HINTS = {
    "data": "check the storage of its data; higher --data.workers and --data.prefetch read further ahead; "
    "--watch.hang_s 1800 waits half an hour",
    "loop": "the line above does not end",
    "lock": "C code waits or computes while it holds Python's lock; its stack is in RUN/watch/",
    "blocked": "the line above waits for something that does not come",
    "device": "nvidia-smi shows whether its GPU computes, dmesg its Xid errors",
}
CROSSED = "call the collectives of two groups in the same order on every rank"


def _reason(e: Observation, endless_s: float) -> tuple[str, str]:
    """Kind, and what it does; both empty if it may be at work."""
    endless = e.cpu_s > endless_s
    if e.phase in NOT_YET or prepares(e) or (e.starved_s > 0.3 * e.still_s and not endless):
        return "", ""
    if e.answered is None:
        return "", ""
    if reads_data(e) and e.process_cpu_s > max(BUSY_S, 0.3 * e.still_s):  # it may share its processor
        return "data", f"prepares its data, {e.still_s:.1f} s by now"
    if e.answered is False:
        return "lock", "holds Python's lock in C and does not answer"
    if reads_data(e):
        return "data", f"waits for its data, {e.still_s:.1f} s by now"
    if endless or e.cpu_s > max(BUSY_S, 0.6 * e.still_s):
        if e.cuda and not e.moving:  # a host that waits for its device spins: processor time is no evidence
            return "device", f"computes without end or waits for its GPU, {e.still_s:.1f} s by now"
        return "loop", f"computes without end, {e.cpu_s:.1f} s by now" + (", in Python" if e.moving else "")
    if e.state in "SD" and e.cpu_s < BUSY_S:
        return "blocked", f"waits outside of any collective, {e.still_s:.1f} s by now"
    return "", ""


def _storage(found: Sequence[Observation]) -> Verdict | None:
    """All are in a save or wait, and some are at the storage: of checkpoints, or of the run's records."""
    live = [e for e in found if e.alive]
    at_it = [e for e in live if writes(e)]
    if not at_it or not all(writes(e) or waits_for_save(e) or waits(e) for e in live):
        return None
    if any(e.answered is False for e in live):
        return (
            None  # calls to the storage let go of Python's lock: other code holds it, and the save waits too
        )
    if any(e.phase in NOT_YET and not waits_for_save(e) and not writes(e) for e in live):
        return None
    slow = [e for e in at_it if e.io_bytes < SLOW_STORAGE * e.still_s]
    if not slow:
        return None
    one = slow[0]
    who = tuple(e.rank for e in slow)
    saves = any(e.phase == "save" or Activity.SAVE in e.activity or e.save_activity for e in at_it)
    stack = next((s for s in (one.threads.get("checkpoint", ()), one.stack) if s and saves), one.stack)
    does, hint = "is in a save and its storage is slow", "check its storage, or --checkpoint.dir elsewhere"
    if not saves:
        does, hint = "waits for the storage of its records", "check the storage of --run.dir"
    speed = f"{byte_size(one.io_bytes / max(one.still_s, 1e-3))}/s"
    what = (
        f"{_names(slow)} {does}, {speed}, {one.still_s:.1f} s by now: step {one.step}, at {own_line(stack)}"
    )
    return Verdict("storage", who, what, _waiting(found, who), hint)


def _network(found: Sequence[Observation]) -> Verdict | None:
    """All are in the same collective, and it does not end."""
    live = [e for e in found if e.alive]
    if len(live) < 2 or not all(e.in_call for e in live) or len({(e.place, e.op, e.numel) for e in live}) > 1:
        return None
    if any(e.still_s < NETWORK_S or e.starved_s > 0.3 * e.still_s or e.phase in NOT_YET for e in live):
        return None
    e = live[0]
    what = f"all ranks are in {e.op} and it does not end, {e.still_s:.1f} s by now: {_at(e)}"
    return Verdict("network", tuple(r.rank for r in live), what, "", "check the network between the ranks")

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

from fsdp.base.phases import PHASES, Activity
from fsdp.base.text import byte_size, named_ranks
from fsdp.dist.env import LauncherHints
from fsdp.watch.observe import (
    BUSY_S,
    GroupCalls,
    Observation,
    own_line,
    place_of,
    prepares,
    reads_data,
    waits,
    waits_for_save,
    writes,
)

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
HINTS = {
    "data": "check the storage of its data; higher --data.workers and --data.prefetch read further ahead; "
    "--watch.hang_s 1800 waits half an hour",
    "loop": "the line above does not end",
    "lock": "C code waits or computes while it holds Python's lock; its stack is in RUN/watch/",
    "blocked": "the line above waits for something that does not come",
    "device": "nvidia-smi shows whether its GPU computes, dmesg its Xid errors",
    "network": "check the network between the ranks",
}


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


@dataclass(frozen=True)
class _Case:
    """The observations of all ranks."""

    all: Sequence[Observation]
    endless_s: float
    hints: LauncherHints

    @property
    def live(self) -> list[Observation]:
        return [e for e in self.all if e.runs]

    def verdict(
        self, kind: str, some: Sequence[Observation], does: str, hint: str, others: str = ""
    ) -> Verdict:
        """These ranks are at fault: what each does, where the first does it, and what the others wait for."""
        what = f"{_names(some)} {does}: {_at(some[0])}"
        return Verdict(kind, _ranks(some), what, others or self.waiting(_ranks(some)), hint)

    def waiting(self, culprits: Sequence[int]) -> str:
        """One line: what the others wait for."""
        rest = [e for e in self.all if e.rank not in culprits and e.alive and e.failure is None]
        if not rest:
            return ""
        calls = Counter((e.op if e.in_call else "its end", e.step, e.phase) for e in rest)
        op, step, phase = calls.most_common(1)[0][0]
        return f"{_wait([e.rank for e in rest])} in {op} (step {step}, {phase})"

    def ended_after(self, culprits: Sequence[int]) -> list[int]:
        return [e.rank for e in self.all if e.rank not in culprits and e.has_left and not e.over]


def judge(
    observations: Sequence[Observation],
    *,
    ranks: int = 0,
    endless_s: float = math.inf,
    hints: LauncherHints | None = None,
) -> Verdict | None:
    """None if the observations prove nothing. A dead rank of a node that is seen always has a verdict.

    `ranks`: how many the run has; some may be missing here. `endless_s`: processor time that no step takes,
    which proves a loop even where other processes share the processors. `hints`: its launcher's.
    """
    case = _Case(observations, endless_s, hints or LauncherHints())
    failed = any(e.has_failed for e in observations)
    if case.live and all(e.stopped for e in case.live) and not failed:
        return None  # the scheduler has suspended the job
    # An unseen rank may be at fault: comparing the collectives of the others would blame one of those.
    all_seen = len(observations) >= ranks and not any(e.silent_node_s for e in observations)
    comparing = (_echoes, _apart, _recorded, _network)  # the ranks' collectives
    for check in (_failed, _dead, _echoes, _unseen, _stopped, _apart, _storage, _recorded, _absent, _network):
        verdict = check(case) if all_seen or check not in comparing else None
        if verdict is not None:
            return replace(verdict, final=failed)
    return None


# ---------------------------------------------------------------- wording


def _name(e: Observation) -> str:
    return f"rank {e.rank}" + (f" ({e.node})" if e.node else "")


def _names(some: Sequence[Observation]) -> str:
    """The subject of a verb in the singular."""
    return _name(some[0]) if len(some) == 1 else f"each of {named_ranks([e.rank for e in some])}"


def _ranks(some: Sequence[Observation]) -> tuple[int, ...]:
    return tuple(e.rank for e in some)


def _at(e: Observation) -> str:
    line = place_of(e)
    return f"step {e.step}, {e.phase}" + (f", at {line}" if line else "")


def _wait(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"


def _ended_after(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} ended after it" if ranks else ""


# ---------------------------------------------------------------- ranks that have failed, died or stopped


def _failed(case: _Case) -> Verdict | None:
    """The first failure that is no consequence of another rank's."""
    own = [(e, e.failure) for e in case.all if e.failure is not None and not e.failure["secondary"]]
    if not own:
        return None
    first, failure = min(own, key=lambda pair: pair[1]["time"])
    message, culprits = failure["message"], tuple(failure["ranks"]) or (first.rank,)
    alike = {e.rank for e, report in own if report["message"] == message}
    others = ""
    if len(alike) < len(case.all):
        late = case.ended_after(culprits)
        others = _ended_after([] if alike.issuperset(late) else late) or case.waiting(culprits)
    what = message if failure["ours"] else f"{_name(first)} failed: {message}"
    return Verdict(failure["kind"], culprits, what, others, failure["hint"])


def _dead(case: _Case) -> Verdict | None:
    dead = [e for e in case.all if not e.alive and not e.over and e.failure is None and not e.silent_node_s]
    # gloo aborts the neighbour of a rank whose sizes differ, and where the other side of a connection is gone
    unseen = any(e.silent_node_s for e in case.all)
    if unseen:
        dead = [e for e in dead if not e.aborted]
    if not dead:
        return None
    longest = max(e.dead_s for e in dead)
    first = [e for e in dead if e.dead_s > longest - AT_ONCE_S]
    others = case.waiting(_ranks(dead)) or _ended_after(case.ended_after(_ranks(first)))
    killed = [e for e in first if e.oom_kills and not e.fatal]
    if killed and len(killed) <= max(e.oom_kills for e in killed):  # else a launcher has killed some of them
        does = "was killed by the kernel, out of memory"
        return case.verdict("died", killed, does, _more_memory(killed[0], case.hints), others)
    if faults := [e for e in first if e.fatal]:
        differing = _differing(case, _called(case)) if faults[0].aborted and not unseen else None
        signal = faults[0].fatal.splitlines()[0].removeprefix("Fatal Python error: ")
        does = f"died of a fault in C ({signal})"
        return differing or case.verdict("fault", faults[:1], does, "its stacks are in RUN/watch/", others)
    does = "died without an error message (killed, or out of memory)"
    hint = "dmesg or the scheduler's log shows what killed it, such as memory; os._exit in code is silent too"
    return case.verdict("died", first, does, hint, others)


def _more_memory(e: Observation, hints: LauncherHints) -> str:
    less = "less on the host: --data.prefetch 1, --checkpoint.mode blocking (docs/oom.md)"
    if not e.memory_limit:
        return f"the node had no memory left: fewer ranks a node, or {less}"
    return f"its cgroup allows {byte_size(e.memory_limit)}: a larger limit ({hints.more_memory}), or {less}"


def _unseen(case: _Case) -> Verdict | None:
    """Ranks whose node's monitor is silent: the node is out of reach, or only its processes are gone."""
    unseen = [e for e in case.all if e.silent_node_s]
    gone = [e for e in unseen if e.monitor_ended]
    some = gone or unseen
    if not some:
        return None
    who, nodes = _ranks(some), sorted({e.node for e in some})
    of_them, others = f"{', '.join(nodes)} ({named_ranks(who)})", case.waiting(who)
    if gone:
        what = f"the processes of {of_them} are gone, and the node can still be reached: {_at(gone[0])}"
        hint = f"{case.hints.killer(', '.join(nodes))} shows what killed them"
        return Verdict("died", who, what, others or _ended_after(case.ended_after(who)), hint)
    here = {e.node for e in case.all} - {e.node for e in unseen}
    from_here = f" from {here.pop()}" if len(here) == 1 else ""
    what = f"node {of_them} cannot be reached{from_here} for {unseen[0].silent_node_s:.1f} s"
    hint = f"check its network and power, or leave it out: {case.hints.without(nodes)}"
    return Verdict("partition", who, what, others, hint)


def _stopped(case: _Case) -> Verdict | None:
    stopped = [e for e in case.all if e.alive and e.stopped]
    if not stopped:
        return None
    first = stopped[0]
    does, hint = "is stopped (SIGSTOP)", f"kill -CONT {first.pid} on {first.node}"
    if first.state == "t":
        does = "is stopped (a debugger)"
        hint = f"detach the debugger from process {first.pid} on {first.node}"
    return case.verdict("stopped", stopped, does, hint)


# ---------------------------------------------------------------- collectives that differ


def _called(case: _Case) -> list[Observation]:
    """Ranks whose last collective is known: they are in it, or it failed.

    gloo ends a rank that receives more than it expects, and that rank is a neighbour of the one at fault.
    """
    return [e for e in case.all if e.in_call or (e.failure is not None and e.failure["secondary"])]


def _echoes(case: _Case) -> Verdict | None:
    """All have failed in a collective and none is dead: compares the collectives."""
    all_echo = all(e.failure is not None and e.failure["secondary"] for e in case.all)
    return _differing(case, case.all) if all_echo else None


def _apart(case: _Case) -> Verdict | None:
    """All are in collectives, and these differ."""
    alive = [e for e in case.all if e.alive]
    if len(alive) < 2 or not all(e.in_call for e in alive):
        return None
    # Without an answer its call may have ended: it waits for Python's lock, and the others are in the next.
    mute = [e for e in alive if e.answered is False]
    return _not_come(case, mute) if mute else _differing(case, alive)


def _differing(case: _Case, calling: Sequence[Observation]) -> Verdict | None:
    calls = Counter((e.place, e.op, e.numel) for e in calling).most_common()
    if len(calls) < 2:
        return None
    if len(calling) == 2:
        # the one further on has left a collective out; at the same place both are named
        behind, ahead = sorted(calling, key=lambda e: (e.place, e.begun))
        if behind.place != ahead.place:
            return _odd(case, [ahead], behind.place, behind.op, behind.numel)
        other = f"{_name(ahead)} in {ahead.op} of {ahead.numel}"
        what = f"{_name(behind)} is in {behind.op} of {behind.numel} numbers, {other}: {_at(behind)}"
        hint = "LayerDrop and expert routing must leave out the same layers on every rank"
        kind = "shapes" if behind.op == ahead.op else "collective"
        return Verdict(kind, (behind.rank, ahead.rank), what, hint=hint)
    usual, count = calls[0]
    odd = [e for e in calling if (e.place, e.op, e.numel) != usual]
    return _odd(case, odd, *usual) if count > calls[1][1] else None


def _odd(
    case: _Case, odd: Sequence[Observation], place: tuple[int, int], op: str, numel: int, others: str = ""
) -> Verdict:
    """These ranks are in another collective than the others, who are in this one."""
    first = odd[0]
    if first.place > place:
        does = f"has left out {op} of step {place[0]}, {PHASES[place[1]]}, and is already in {first.op}"
        hint = "look for a collective under an `if` that is not true on every rank"
        return case.verdict("skipped", odd, does, hint, others)
    if first.op != op:
        does = f"entered another collective, {first.op}, where the others entered {op}"
        return case.verdict("collective", odd, does, "look for a branch that differs between ranks", others)
    does = f"came to {op} with {first.numel} numbers, the others with {numel}"
    hint = "look for a size that depends on the rank's own data, or a layer that one rank leaves out"
    return case.verdict("shapes", odd, does, hint, others)


# ---------------------------------------------------------------- ranks that have not come


def _absent(case: _Case) -> Verdict | None:
    """Some ranks wait and others have not come: names those by what they do."""
    if _stuck_on_cuda(case) is not None:
        return None  # hosts run ahead of their devices: the records alone tell who waits for whom
    there = [e for e in case.all if waits(e)]
    absent = [e for e in case.live if e not in there]
    return _not_come(case, absent) if absent and (there or len(case.all) == 1) else None


def _not_come(case: _Case, absent: Sequence[Observation], others: str = "") -> Verdict | None:
    reasons = [_reason(e, case.endless_s) for e in absent]
    if ("", "") in reasons:
        return None  # a rank that is at work may be the reason why another waits
    kind, does = reasons[0]
    return case.verdict(kind, absent, does, HINTS[kind], others)


def _reason(e: Observation, endless_s: float) -> tuple[str, str]:
    """Kind, and what it does; both empty if it may be at work."""
    endless, by_now = e.cpu_s > endless_s, f"{e.still_s:.1f} s by now"
    if e.phase in NOT_YET or e.answered is None or prepares(e):
        return "", ""
    if e.starved_s > 0.3 * e.still_s and not endless:
        return "", ""
    if reads_data(e) and e.process_cpu_s > max(BUSY_S, 0.3 * e.still_s):  # it may share its processor
        return "data", f"prepares its data, {by_now}"
    if not e.answered:
        return "lock", "holds Python's lock in C and does not answer"
    if reads_data(e):
        return "data", f"waits for its data, {by_now}"
    if endless or e.cpu_s > max(BUSY_S, 0.6 * e.still_s):
        if e.cuda and not e.moving:  # a host that waits for its device spins: processor time is no evidence
            return "device", f"computes without end or waits for its GPU, {by_now}"
        return "loop", f"computes without end, {e.cpu_s:.1f} s by now" + (", in Python" if e.moving else "")
    if e.state in "SD" and e.cpu_s < BUSY_S:
        return "blocked", f"waits outside of any collective, {by_now}"
    return "", ""


def _storage(case: _Case) -> Verdict | None:
    """All are in a save or wait, and some are at the storage: of checkpoints, or of the run's records."""
    live = [e for e in case.all if e.alive]
    at_storage = [e for e in live if writes(e)]
    if not at_storage or not all(writes(e) or waits_for_save(e) or waits(e) for e in live):
        return None
    # calls to the storage release Python's lock: without an answer other code holds it
    busy = (e.phase in NOT_YET and not waits_for_save(e) and not writes(e) for e in live)
    slow = [e for e in at_storage if e.io_bytes < SLOW_STORAGE * e.still_s]
    if any(e.answered is False for e in live) or any(busy) or not slow:
        return None
    first = slow[0]
    does, hint = "waits for the storage of its records", "check the storage of --run.dir"
    stack = first.stack
    if any(e.phase == "save" or Activity.SAVE in e.activity or e.save_activity for e in at_storage):
        does = "is in a save and its storage is slow"
        hint = "check its storage, or --checkpoint.dir elsewhere"
        stack = first.threads.get("checkpoint", ()) or stack
    speed = f"{byte_size(first.io_bytes / max(first.still_s, 1e-3))}/s, {first.still_s:.1f} s by now"
    what = f"{_names(slow)} {does}, {speed}: step {first.step}, at {own_line(stack)}"
    return Verdict("storage", _ranks(slow), what, case.waiting(_ranks(slow)), hint)


def _network(case: _Case) -> Verdict | None:
    """All are in the same collective, and it does not end."""
    live = [e for e in case.all if e.alive]
    if len(live) < 2 or not all(e.in_call for e in live) or len({(e.place, e.op, e.numel) for e in live}) > 1:
        return None
    return _not_ending(case, live, f"all ranks are in {live[0].op}")


def _not_ending(case: _Case, ranks: Sequence[Observation], are_in: str) -> Verdict | None:
    alive = [e for e in case.all if e.alive]
    still_s = min(e.still_s for e in alive)
    if still_s < NETWORK_S or any(e.starved_s > 0.3 * e.still_s or e.phase in NOT_YET for e in alive):
        return None
    what = f"{are_in} and it does not end, {still_s:.1f} s by now: {_at(ranks[0])}"
    return Verdict("network", _ranks(ranks), what, "", HINTS["network"])


# ---------------------------------------------------------------- on CUDA, from the flight recorders


@dataclass(frozen=True)
class StuckCall:
    """A collective that does not end, and what its ranks have done about it."""

    call: GroupCalls
    """As most of the waiting ranks have it."""
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks of the group that have not queued it."""
    odd: Mapping[int, GroupCalls]
    """Ranks that have queued something else under this number."""
    not_started: tuple[int, ...]
    """Ranks whose kernel does not run yet, where that of others does."""
    crossing: GroupCalls | None = None
    """The call of another group in which the absent ranks wait, and for which these are absent."""


def _recorded(case: _Case) -> Verdict | None:
    """Hosts wait for their device, not in the call."""
    stuck = _stuck_on_cuda(case)
    if stuck is None:
        return None
    by_rank = {e.rank: e for e in case.live}
    call, others = stuck.call, f"{_wait(stuck.waiting)} in {stuck.call.shown}"
    absent = [by_rank[rank] for rank in stuck.absent]
    if mute := [e for e in case.live if not e.answered]:
        return _not_come(case, mute, others)
    if stuck.crossing is not None:
        hint = "call the collectives of two groups in the same order on every rank"
        return case.verdict("collective", absent, f"waits in {stuck.crossing.shown}", hint, others)
    if absent:
        return _not_come(case, absent, others)
    if stuck.odd:
        # Hosts run ahead of their device: of the place only what the call itself has counts.
        odd = [replace(by_rank[rank], op=queued.op, numel=queued.numel) for rank, queued in stuck.odd.items()]
        return _odd(case, odd, odd[0].place, call.op, call.numel, others)
    if stuck.not_started:
        busy = [by_rank[rank] for rank in stuck.not_started]
        what = f"the GPU of {_names(busy)} has not begun {call.shown}, that of the others has: {_at(busy[0])}"
        return Verdict("device", stuck.not_started, what, others, HINTS["device"])
    waiting = [by_rank[rank] for rank in stuck.waiting]
    return _not_ending(case, waiting, f"{named_ranks(stuck.waiting)} are in {call.shown}")


def _stuck_on_cuda(case: _Case) -> StuckCall | None:
    if len(case.live) < 2 or not all(e.cuda and e.answered is not None for e in case.live):
        return None
    return find_stuck({e.rank: e.calls for e in case.live if e.answered})


def find_stuck(recorded: Mapping[int, Sequence[GroupCalls]]) -> StuckCall | None:
    """The call for which the others wait, from the records of ranks; None if all calls have ended."""
    by_group: dict[str, dict[int, GroupCalls]] = {}
    for rank, calls in recorded.items():
        for call in calls:
            by_group.setdefault(call.group, {})[rank] = call
    stuck = [found for calls in by_group.values() if (found := _stuck_in(calls)) is not None]
    waiting = {rank for found in stuck for rank in found.waiting}
    # Who waits elsewhere is not the cause: the chain ends at a rank that waits nowhere, or at a call that all
    # of its ranks have queued.
    for found in stuck:
        if absent := tuple(rank for rank in found.absent if rank not in waiting):
            return replace(found, absent=absent)
    complete = next((found for found in stuck if not found.absent), None)
    if complete is not None or not stuck:
        return complete
    # each stuck call lacks ranks that wait in another one
    first = stuck[0]
    other = next((found.call for found in stuck[1:] if set(found.waiting) & set(first.absent)), None)
    return replace(first, crossing=other)


def _stuck_in(calls: Mapping[int, GroupCalls]) -> StuckCall | None:
    """Of one group."""
    number = min((call.unfinished for call in calls.values() if call.unfinished), default=None)
    if number is None:
        return None
    here = {rank: call for rank, call in calls.items() if call.unfinished == number}
    (op, numel), _ = Counter((call.op, call.numel) for call in here.values()).most_common(1)[0]
    usual = {rank: call for rank, call in here.items() if (call.op, call.numel) == (op, numel)}
    started = [rank for rank, call in here.items() if call.started]
    return StuckCall(
        next(iter(usual.values())),
        waiting=tuple(sorted(usual)),
        absent=tuple(sorted(rank for rank, call in calls.items() if call.newest < number)),
        odd={rank: call for rank, call in here.items() if rank not in usual},
        not_started=tuple(sorted(here.keys() - started)) if started else (),
    )

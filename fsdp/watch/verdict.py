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
from dataclasses import dataclass, field, replace

from fsdp.base.phases import PHASES, Activity
from fsdp.base.text import byte_size, named_ranks
from fsdp.dist.launcher_hints import LauncherHints
from fsdp.watch.observation import (
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
OF_TORCHRUN = LauncherHints()


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
        others = [f"  {self.others}"] if self.others else []
        return [self.what, *others, *([f"  HINT: {self.hint}"] if self.hint else [])]


@dataclass(frozen=True)
class _Case:
    """The observations of all ranks."""

    all: Sequence[Observation]
    endless_s: float = math.inf
    hints: LauncherHints = OF_TORCHRUN
    live: list[Observation] = field(init=False)
    """Of processes that run and have not ended their training."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "live", [e for e in self.all if e.alive and not e.over])

    def waiting(self, culprits: Sequence[int]) -> str:
        """One line: what the others wait for."""
        rest = [e for e in self.all if e.rank not in culprits and e.alive and e.failure is None]
        if not rest:
            return ""
        calls = Counter((e.op if e.in_call else "its end", e.step, e.phase) for e in rest)
        op, step, phase = calls.most_common(1)[0][0]
        return f"{_wait([e.rank for e in rest])} in {op} (step {step}, {phase})"


def judge(
    observations: Sequence[Observation],
    *,
    ranks: int = 0,
    endless_s: float = math.inf,
    hints: LauncherHints = OF_TORCHRUN,
) -> Verdict | None:
    """None if the observations prove nothing. A dead rank of a node that is seen always has a verdict.

    `ranks`: how many the run has; some may be missing here. `endless_s`: processor time that no step takes,
    which proves a loop even where other processes share the processors. `hints`: its launcher's.
    """
    case = _Case(observations, endless_s, hints)
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


def _after(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} ended after it" if ranks else ""


def _nodes(some: Sequence[Observation]) -> str:
    return ", ".join(sorted({e.node for e in some}))


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
    if any(e.rank not in alike for e in case.all):
        late = [e.rank for e in case.all if e.rank not in culprits and e.has_left and not e.over]
        others = _after([] if alike.issuperset(late) else late) or case.waiting(culprits)
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
    who = _ranks(first)
    others = case.waiting(_ranks(dead)) or _after(
        [e.rank for e in case.all if e.rank not in who and not e.over]
    )
    faults = [e for e in first if e.fatal]
    killed = [e for e in first if e.oom_kills and not e.fatal]
    if killed and len(killed) <= max(e.oom_kills for e in killed):  # else a launcher has killed some of them
        what = f"{_names(killed)} was killed by the kernel, out of memory: {_at(killed[0])}"
        return Verdict("died", _ranks(killed), what, others, _room(killed[0], case.hints))
    if (
        faults
        and faults[0].aborted
        and not unseen
        and (verdict := _differing(case, _called(case))) is not None
    ):
        return verdict
    if faults:
        how = faults[0].fatal.splitlines()[0].removeprefix("Fatal Python error: ")
        what = f"{_name(faults[0])} died of a fault in C ({how}): {_at(faults[0])}"
        return Verdict("fault", (faults[0].rank,), what, others, "its stacks are in RUN/watch/")
    what = f"{_names(first)} died without an error message (killed, or out of memory): {_at(first[0])}"
    hint = "dmesg or the scheduler's log shows what killed it, such as memory; os._exit in code is silent too"
    return Verdict("died", who, what, others, hint)


def _room(e: Observation, hints: LauncherHints) -> str:
    """A hint for a rank that the kernel has killed for lack of memory."""
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
    who, nodes = _ranks(some), _nodes(some)
    others = case.waiting(who)
    if gone:
        what = f"the processes of {nodes} ({named_ranks(who)}) are gone, and the node can still be reached"
        left = [e.rank for e in case.all if e.rank not in who and e.has_left and not e.over]
        hint = f"{case.hints.killer(nodes)} shows what killed them"
        return Verdict("died", who, f"{what}: {_at(gone[0])}", others or _after(left), hint)
    here = {e.node for e in case.all} - {e.node for e in unseen}
    from_here = f" from {here.pop()}" if len(here) == 1 else ""
    seconds = unseen[0].silent_node_s
    what = f"node {nodes} ({named_ranks(who)}) cannot be reached{from_here} for {seconds:.1f} s"
    hint = f"check its network and power, or leave it out: {case.hints.without(nodes.split(', '))}"
    return Verdict("partition", who, what, others, hint)


def _stopped(case: _Case) -> Verdict | None:
    stopped = [e for e in case.all if e.alive and e.stopped]
    if not stopped:
        return None
    first = stopped[0]
    how, hint = "SIGSTOP", f"kill -CONT {first.pid} on {first.node}"
    if first.state == "t":
        how, hint = "a debugger", f"detach the debugger from process {first.pid} on {first.node}"
    what = f"{', '.join(map(_name, stopped))} is stopped ({how}): {_at(first)}"
    return Verdict("stopped", _ranks(stopped), what, case.waiting(_ranks(stopped)), hint)


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
    mute = [e for e in alive if e.answered is False]
    # Its call may have ended: its thread waits for Python's lock, and the others are in the next one.
    return _not_come(mute, case.waiting(_ranks(mute)), math.inf) if mute else _differing(case, alive)


def _differing(case: _Case, calling: Sequence[Observation]) -> Verdict | None:
    calls = Counter((e.place, e.op, e.numel) for e in calling).most_common()
    if len(calls) < 2:
        return None
    if len(calling) == 2:
        # the one further on has left a collective out; at the same place both are named
        behind, ahead = sorted(calling, key=lambda e: (e.place, e.begun))
        if behind.place == ahead.place:
            other = f"{_name(ahead)} in {ahead.op} of {ahead.numel}"
            what = f"{_name(behind)} is in {behind.op} of {behind.numel} numbers, {other}: {_at(behind)}"
            hint = "LayerDrop and expert routing must leave out the same layers on every rank"
            kind = "shapes" if behind.op == ahead.op else "collective"
            return Verdict(kind, (behind.rank, ahead.rank), what, hint=hint)
        return _odd([ahead], behind.place, behind.op, behind.numel, case.waiting([ahead.rank]))
    if calls[0][1] == calls[1][1]:
        return None
    odd = [e for e in calling if (e.place, e.op, e.numel) != calls[0][0]]
    return _odd(odd, *calls[0][0], case.waiting(_ranks(odd)))


def _odd(odd: Sequence[Observation], place: tuple[int, int], op: str, numel: int, others: str) -> Verdict:
    first, name = odd[0], _names(odd)
    if first.place > place:
        skipped = f"{op} of step {place[0]}, {PHASES[place[1]]}"
        kind, does = "skipped", f"has left out {skipped}, and is already in {first.op}"
        hint = "look for a collective under an `if` that is not true on every rank"
    elif first.op != op:
        kind, does = "collective", f"entered another collective, {first.op}, where the others entered {op}"
        hint = "look for a branch that differs between ranks"
    else:
        kind, does = "shapes", f"came to {op} with {first.numel} numbers, the others with {numel}"
        hint = "look for a size that depends on the rank's own data, or a layer that one rank leaves out"
    return Verdict(kind, _ranks(odd), f"{name} {does}: {_at(first)}", others, hint)


# ---------------------------------------------------------------- ranks that have not come


def _absent(case: _Case) -> Verdict | None:
    """Some ranks wait and others have not come: names those by what they do."""
    if _stuck_on_cuda(case) is not None:
        return None  # hosts run ahead of their devices: the records alone tell who waits for whom
    there = [e for e in case.all if waits(e)] or _furthest_on(case)
    absent = [e for e in case.live if e not in there]
    if not absent or (not there and len(case.all) > 1):
        return None
    return _not_come(absent, case.waiting(_ranks(absent)), case.endless_s)


def _furthest_on(case: _Case) -> list[Observation]:
    """On CUDA the host waits for the device, not in the call: the ranks furthest on are waiting."""
    front = max((e.place, e.begun) for e in case.all)
    there = [e for e in case.all if (e.place, e.begun) == front]
    return there if all(e.cuda for e in case.all) and len(there) < len(case.all) else []


def _not_come(absent: Sequence[Observation], others: str, endless_s: float) -> Verdict | None:
    reasons = [_reason(e, endless_s) for e in absent]
    if ("", "") in reasons:
        return None  # a rank that is at work may be the reason why another waits
    kind, does = reasons[0]
    return Verdict(kind, _ranks(absent), f"{_names(absent)} {does}: {_at(absent[0])}", others, HINTS[kind])


def _reason(e: Observation, endless_s: float) -> tuple[str, str]:
    """Kind, and what it does; both empty if it may be at work."""
    endless, by_now = e.cpu_s > endless_s, f"{e.still_s:.1f} s by now"
    if e.phase in NOT_YET or prepares(e) or (e.starved_s > 0.3 * e.still_s and not endless):
        return "", ""
    if e.answered is None:
        return "", ""
    if reads_data(e) and e.process_cpu_s > max(BUSY_S, 0.3 * e.still_s):  # it may share its processor
        return "data", f"prepares its data, {by_now}"
    if e.answered is False:
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
    # calls to the storage release Python's lock: other code holds it, and the save waits too
    if any(e.answered is False for e in live):
        return None
    if any(e.phase in NOT_YET and not waits_for_save(e) and not writes(e) for e in live):
        return None
    slow = [e for e in at_storage if e.io_bytes < SLOW_STORAGE * e.still_s]
    if not slow:
        return None
    first = slow[0]
    saves = any(e.phase == "save" or Activity.SAVE in e.activity or e.save_activity for e in at_storage)
    does, hint = "waits for the storage of its records", "check the storage of --run.dir"
    stack = first.stack
    if saves:
        does, hint = (
            "is in a save and its storage is slow",
            "check its storage, or --checkpoint.dir elsewhere",
        )
        stack = first.threads.get("checkpoint", ()) or stack
    speed = f"{byte_size(first.io_bytes / max(first.still_s, 1e-3))}/s"
    what = f"{_names(slow)} {does}, {speed}, {first.still_s:.1f} s by now: step {first.step}, at "
    what += own_line(stack)
    return Verdict("storage", _ranks(slow), what, case.waiting(_ranks(slow)), hint)


def _network(case: _Case) -> Verdict | None:
    """All are in the same collective, and it does not end."""
    live = [e for e in case.all if e.alive]
    if len(live) < 2 or not all(e.in_call for e in live) or len({(e.place, e.op, e.numel) for e in live}) > 1:
        return None
    if any(e.still_s < NETWORK_S or e.starved_s > 0.3 * e.still_s or e.phase in NOT_YET for e in live):
        return None
    e = live[0]
    what = f"all ranks are in {e.op} and it does not end, {e.still_s:.1f} s by now: {_at(e)}"
    return Verdict("network", _ranks(live), what, "", HINTS["network"])


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
    call, first = stuck.call, by_rank[stuck.waiting[0]]
    others = f"{_wait(stuck.waiting)} in {call.shown}"
    absent = [by_rank[rank] for rank in stuck.absent]
    mute = [e for e in case.live if not e.answered]
    if mute or (absent and stuck.crossing is None):
        return _not_come(mute or absent, others, case.endless_s)
    if stuck.crossing is not None:
        what = f"{_names(absent)} waits in {stuck.crossing.shown}: {_at(absent[0])}"
        hint = "call the collectives of two groups in the same order on every rank"
        return Verdict("collective", stuck.absent, what, others, hint)
    if stuck.odd:
        # Hosts run ahead of their device: of the place only what the call itself has counts.
        odd = [replace(by_rank[rank], op=queued.op, numel=queued.numel) for rank, queued in stuck.odd.items()]
        return _odd(odd, odd[0].place, call.op, call.numel, others)
    if stuck.not_started:
        busy = [by_rank[rank] for rank in stuck.not_started]
        what = f"the GPU of {_names(busy)} has not begun {call.shown}, that of the others has: {_at(busy[0])}"
        return Verdict("device", stuck.not_started, what, others, HINTS["device"])
    if any(e.still_s < NETWORK_S or e.phase in NOT_YET for e in case.live):
        return None
    what = (
        f"{named_ranks(stuck.waiting)} are in {call.shown} and it does not end, {first.still_s:.1f} s by now"
    )
    return Verdict("network", stuck.waiting, f"{what}: {_at(first)}", "", HINTS["network"])


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

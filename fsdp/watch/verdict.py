"""Verdict: which rank is at fault, from the observations of all ranks.

Pure functions, without I/O or a clock. The checks run in a fixed order, and the first that finds something
decides: a rank's own exception, a dead rank, an unreachable node, a stopped process, collectives that differ
between ranks, a rank that has not come to the collective where the others wait, and last a network that moves
nothing. A verdict rests on evidence, not on time alone: a rank that compiles, imports, loads or waits for a
free processor (the kernel counts that time) is not at fault. What one rank's observation shows by itself is
in observe.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp.base.phases import PHASES
from fsdp.base.text import byte_size, named_ranks
from fsdp.distributed.env import LauncherHints
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
    "died": "dmesg or the scheduler's log shows what killed it; os._exit in code is silent too",
    "fault": "its stacks are in RUN/watch/; a part that a rank skips needs --mesh.unsharded 'NAME.*'",
    "skipped": "look for a collective under an `if` that is not true on every rank",
    "collective": "look for a branch that differs between ranks, or two groups called in another order",
    "shapes": "look for a size that depends on the rank's own data, or a layer that one rank leaves out",
    "storage": "check the storage of --checkpoint.dir, and of --run.dir for its records",
}
LESS_MEMORY = "less on the host: --data.prefetch 1, --checkpoint.mode blocking (docs/oom.md)"


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
        self, kind: str, some: Sequence[Observation], does: str, others: str = "", hint: str = ""
    ) -> Verdict:
        """These ranks are at fault: what each does, where the first does it, and what the others wait for."""
        line, culprits = f"{_names(some)} {does}: {_at(some[0])}", _ranks(some)
        return Verdict(kind, culprits, line, others or self.waiting(culprits), hint or HINTS[kind])

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
    line = message if failure["ours"] else f"{_name(first)} failed: {message}"
    return Verdict(failure["kind"], culprits, line, others, failure["hint"])


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
        limit = killed[0].memory_limit
        allowed = f"its cgroup allows {byte_size(limit)}" if limit else "the node had no memory left"
        hint = f"{allowed}: a larger limit ({case.hints.more_memory}), fewer ranks a node, or {LESS_MEMORY}"
        return case.verdict("died", killed, "was killed by the kernel, out of memory", others, hint)
    if faults := [e for e in first if e.fatal]:
        differing = _differing(case, _called(case)) if faults[0].aborted and not unseen else None
        signal = faults[0].fatal.splitlines()[0].removeprefix("Fatal Python error: ")
        return differing or case.verdict("fault", faults[:1], f"died of a fault in C ({signal})", others)
    return case.verdict("died", first, "died without an error message (killed, or out of memory)", others)


def _unseen(case: _Case) -> Verdict | None:
    """Ranks whose node's monitor is silent: the node is out of reach, or only its processes are gone."""
    unseen = [e for e in case.all if e.silent_node_s]
    some = [e for e in unseen if e.monitor_ended] or unseen
    if not some:
        return None
    culprits, nodes = _ranks(some), sorted({e.node for e in some})
    named, others = f"{', '.join(nodes)} ({named_ranks(culprits)})", case.waiting(culprits)
    if some[0].monitor_ended:
        line = f"the processes of {named} are gone, and the node can still be reached: {_at(some[0])}"
        hint = f"dmesg on {', '.join(nodes)} shows what killed them, under Slurm sacct too"
        return Verdict("died", culprits, line, others or _ended_after(case.ended_after(culprits)), hint)
    line = f"node {named} cannot be reached for {some[0].silent_node_s:.1f} s"
    hint = f"check its network and power, or leave it out: {case.hints.without(nodes)}"
    return Verdict("partition", culprits, line, others, hint)


def _stopped(case: _Case) -> Verdict | None:
    stopped = [e for e in case.all if e.alive and e.stopped]
    if not stopped:
        return None
    first = stopped[0]
    by, command = (
        ("SIGSTOP", "kill -CONT") if first.state == "T" else ("a debugger", "detach it from process")
    )
    hint = f"{command} {first.pid} on {first.node}"
    return case.verdict("stopped", stopped, f"is stopped ({by})", hint=hint)


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


def _together(case: _Case) -> list[Observation]:
    """All that live, if all are in collectives."""
    alive = [e for e in case.all if e.alive]
    return alive if len(alive) > 1 and all(e.in_call for e in alive) else []


def _apart(case: _Case) -> Verdict | None:
    """All are in collectives, and these differ."""
    together = _together(case)
    # Without an answer its call may have ended: it waits for Python's lock, and the others are in the next.
    mute = [e for e in together if e.answered is False]
    return _not_come(case, mute) if mute else _differing(case, together)


WITHIN_LAYERS = {
    "all_to_all_single": "an exchange of tokens over context or expert ranks (all_to_all_single)",
    "all_reduce": "a sum over tensor ranks or replicas (all_reduce)",
}


def _changed(case: _Case, some: Sequence[Observation]) -> Verdict | None:
    """Ranks whose step has other collectives than the one before, or no forward of some units, if that is not
    so of all.
    """
    if len({(*e.skipped,) for e in some}) > 1:
        skipping = [e for e in some if e.skipped]
        units, pattern = skipping[0].skipped
        hint = f"--mesh.unsharded '{pattern}' for a tower that a batch may leave out: docs/models.md"
        return case.verdict("skipped", skipping, f"has left out {units} in forward", hint=hint)
    changed = [e for e in some if e.left_out != "none"]
    if not changed or len(changed) == len(some):
        return None
    what, first = WITHIN_LAYERS.get(changed[0].left_out, changed[0].left_out), changed[0]
    return _left_out(case, changed, what, first.place, "")


def _differing(case: _Case, calling: Sequence[Observation]) -> Verdict | None:
    if changed := _changed(case, calling):
        return changed
    calls = Counter((e.place, e.op, e.numel) for e in calling).most_common()
    if len(calls) < 2:
        return None
    if len(calling) == 2:
        # the one further on has left a collective out; at the same place both are named
        behind, ahead = sorted(calling, key=lambda e: (e.place, e.begun))
        if behind.place != ahead.place:
            return _odd(case, [ahead], behind.place, behind.op, behind.numel)
        other = f"{_name(ahead)} in {ahead.op} of {ahead.numel}"
        line = f"{_name(behind)} is in {behind.op} of {behind.numel} numbers, {other}: {_at(behind)}"
        kind = "shapes" if behind.op == ahead.op else "collective"
        return Verdict(kind, (behind.rank, ahead.rank), line, hint=HINTS[kind])
    usual, count = calls[0]
    odd = [e for e in calling if (e.place, e.op, e.numel) != usual]
    return _odd(case, odd, *usual) if count > calls[1][1] else None


def _odd(
    case: _Case, odd: Sequence[Observation], place: tuple[int, int], op: str, numel: int, others: str = ""
) -> Verdict:
    """These ranks are in another collective than the others, who are in this one."""
    first = odd[0]
    if first.place > place:
        return _left_out(case, odd, op, place, others)
    if first.op != op:
        does = f"entered another collective, {first.op}, where the others entered {op}"
        return case.verdict("collective", odd, does, others)
    does = f"came to {op} with {first.numel} numbers, the others with {numel}"
    return case.verdict("shapes", odd, does, others)


def _left_out(
    case: _Case, some: Sequence[Observation], what: str, place: tuple[int, int], others: str
) -> Verdict:
    does = f"has left out {what} of step {place[0]}, {PHASES[place[1]]}, and is already in {some[0].op}"
    return case.verdict("skipped", some, does, others)


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
    return case.verdict(kind, absent, does, others)


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
    speed = f"{byte_size(first.io_bytes / max(first.still_s, 1e-3))}/s, {first.still_s:.1f} s by now"
    writers = [stack for name, stack in first.threads.items() if name.startswith("checkpoint ")]
    line = own_line((*writers, first.stack)[0])
    named = f"{_names(slow)} waits for its storage, {speed}: step {first.step}, at {line}"
    return Verdict("storage", _ranks(slow), named, case.waiting(_ranks(slow)), HINTS["storage"])


def _network(case: _Case) -> Verdict | None:
    """All are in the same collective, and it does not end."""
    together = _together(case)
    same = len({(e.place, e.op, e.numel) for e in together}) == 1
    return _not_ending(case, together, f"all ranks are in {together[0].op}") if same else None


def _not_ending(case: _Case, ranks: Sequence[Observation], are_in: str) -> Verdict | None:
    alive = [e for e in case.all if e.alive]
    still_s = min(e.still_s for e in alive)
    if still_s < NETWORK_S or any(e.starved_s > 0.3 * e.still_s or e.phase in NOT_YET for e in alive):
        return None
    line = f"{are_in} and it does not end, {still_s:.1f} s by now: {_at(ranks[0])}"
    return Verdict("network", _ranks(ranks), line, "", HINTS["network"])


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
    crossing: GroupCalls | None = None
    """The call of another group in which the absent ranks wait, and for which these are absent."""


def _recorded(case: _Case) -> Verdict | None:
    """Hosts wait for their device, not in the call."""
    stuck = _stuck_on_cuda(case)
    if stuck is None:
        return None
    if changed := _changed(case, case.live):
        return changed
    by_rank = {e.rank: e for e in case.live}
    call, others = stuck.call, f"{_wait(stuck.waiting)} in {stuck.call.shown}"
    absent = [by_rank[rank] for rank in stuck.absent]
    if mute := [e for e in case.live if not e.answered]:
        return _not_come(case, mute, others)
    if stuck.crossing is not None:
        return case.verdict("collective", absent, f"waits in {stuck.crossing.shown}", others)
    if absent:
        return _not_come(case, absent, others)
    if stuck.odd:
        # Hosts run ahead of their device: of the place only what the call itself has counts.
        odd = [replace(by_rank[rank], op=queued.op, numel=queued.numel) for rank, queued in stuck.odd.items()]
        return _odd(case, odd, odd[0].place, call.op, call.numel, others)
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
    open_calls = [stuck for calls in by_group.values() if (stuck := _stuck_in(calls)) is not None]
    waiting = {rank for stuck in open_calls for rank in stuck.waiting}
    # Who waits elsewhere is not the cause: the chain ends at a rank that waits nowhere, or at a call that all
    # of its ranks have queued.
    for stuck in open_calls:
        if absent := tuple(rank for rank in stuck.absent if rank not in waiting):
            return replace(stuck, absent=absent)
    complete = next((stuck for stuck in open_calls if not stuck.absent), None)
    if complete is not None or not open_calls:
        return complete
    # each stuck call lacks ranks that wait in another one
    first, *others = open_calls
    crossing = next((stuck.call for stuck in others if set(stuck.waiting) & set(first.absent)), None)
    return replace(first, crossing=crossing)


def _stuck_in(calls: Mapping[int, GroupCalls]) -> StuckCall | None:
    """Of one group."""
    number = min((call.unfinished for call in calls.values() if call.unfinished), default=None)
    if number is None:
        return None
    here = {rank: call for rank, call in calls.items() if call.unfinished == number}
    (op, numel), _ = Counter((call.op, call.numel) for call in here.values()).most_common(1)[0]
    usual = {rank: call for rank, call in here.items() if (call.op, call.numel) == (op, numel)}
    return StuckCall(
        next(iter(usual.values())),
        waiting=tuple(sorted(usual)),
        absent=tuple(sorted(rank for rank, call in calls.items() if call.newest < number)),
        odd={rank: call for rank, call in here.items() if rank not in usual},
    )

"""PyTorch's flight recorder in brief: of each process group the newest call, and the oldest without an end.

On CUDA a collective returns when its kernel is queued, and its host waits somewhere later, as in .tolist() or
in the engine of backward: what it waits for is in this record alone. Pure functions without torch. Not here:
reading the recorder (responder.py), the verdict (hang_verdict.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

UNDESCRIBED = "undefined"
"""torch's description of a group that was made without one; its name is a number, alike on all ranks."""


@dataclass(frozen=True)
class GroupCalls:
    """One rank's calls in one process group. Calls are numbered alike on all of its ranks."""

    group: str
    """Its description; and its ranks, where the recorder has them."""
    newest: int
    """Number of the last call that this rank has queued."""
    unfinished: int
    """Number of the first that has not ended; 0 if all have. The fields below are of this call."""
    op: str = ""
    numel: int = 0
    started: bool = False
    """Its kernel runs. The recorder knows it only with TORCH_NCCL_ENABLE_TIMING."""

    @property
    def shown(self) -> str:
        size = f" of {self.numel:,} numbers" if self.numel else ""
        return f"{self.op}{size} (call {self.unfinished} of {self.group})"


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


def group_calls(entries: Iterable[Mapping[str, Any]]) -> list[GroupCalls]:
    """From the recorder's entries, oldest first. Messages between two ranks are left out."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            by_group.setdefault(_group(entry), []).append(entry)
    return [_in_brief(group, found) for group, found in by_group.items()]


def _group(entry: Mapping[str, Any]) -> str:
    name, description = (*entry["process_group"], "", "")[:2]
    known = description not in ("", UNDESCRIBED)
    ranks = entry.get("group_ranks", "")
    return f"{description if known else f'group {name}'}{f' {ranks}' if ranks else ''}"


def _in_brief(group: str, recorded: Sequence[Mapping[str, Any]]) -> GroupCalls:
    # An earlier run of this process may have had a group of this name.
    entries = [entry for entry in recorded if entry.get("pg_id") == recorded[-1].get("pg_id")]
    newest = max(entry["collective_seq_id"] for entry in entries)
    # Calls of one group end in their order. Those that went out together as one are marked only as a whole.
    ended = (one["collective_seq_id"] for one in entries if one["state"] == "completed" or one["retired"])
    last = max(ended, default=-1)
    unfinished = [entry for entry in entries if entry["collective_seq_id"] > last]
    if not unfinished:
        return GroupCalls(group, newest, 0)
    first = min(unfinished, key=lambda entry: int(entry["collective_seq_id"]))
    op = first["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base")
    return GroupCalls(
        group,
        newest,
        first["collective_seq_id"],
        op,
        # each rank's share of an all-to-all may have a size of its own
        0 if "to_all" in op or "toall" in op else sum(map(math.prod, first["input_sizes"])),
        first["state"] == "started",
    )


def find_stuck(recorded: Mapping[int, Sequence[GroupCalls]]) -> StuckCall | None:
    """The call for which the others wait, from the records of ranks; None if all calls have ended."""
    by_group: dict[str, dict[int, GroupCalls]] = {}
    for rank, calls in recorded.items():
        for one in calls:
            by_group.setdefault(one.group, {})[rank] = one
    stuck = [found for calls in by_group.values() if (found := _stuck_in(calls)) is not None]
    waiting = {rank for found in stuck for rank in found.waiting}
    # Who waits elsewhere is not the cause: the chain ends at a rank that waits nowhere, or at a call that all
    # of its ranks have queued.
    for found in stuck:
        if found.absent and not waiting.issuperset(found.absent):
            return _without(found, waiting)
    return next((one for one in stuck if not one.absent), None) or (_crossed(stuck) if stuck else None)


def _stuck_in(calls: Mapping[int, GroupCalls]) -> StuckCall | None:
    """Of one group."""
    unfinished = [one.unfinished for one in calls.values() if one.unfinished]
    if not unfinished:
        return None
    number = min(unfinished)
    here = {rank: one for rank, one in calls.items() if one.unfinished == number}
    (op, numel), _ = Counter((one.op, one.numel) for one in here.values()).most_common(1)[0]
    usual = {rank: one for rank, one in here.items() if (one.op, one.numel) == (op, numel)}
    started = [rank for rank, one in here.items() if one.started]
    return StuckCall(
        next(iter(usual.values())),
        waiting=tuple(sorted(usual)),
        absent=tuple(sorted(rank for rank, one in calls.items() if one.newest < number)),
        odd={rank: one for rank, one in here.items() if rank not in usual},
        not_started=tuple(sorted(here.keys() - started)) if started else (),
    )


def _without(one: StuckCall, waiting: set[int]) -> StuckCall:
    absent = tuple(rank for rank in one.absent if rank not in waiting)
    return replace(one, absent=absent)


def _crossed(stuck: Sequence[StuckCall]) -> StuckCall:
    """Each stuck call lacks ranks that wait in another one."""
    first = stuck[0]
    other = next((one for one in stuck[1:] if set(one.waiting) & set(first.absent)), None)
    return replace(first, crossing=other.call if other is not None else None)

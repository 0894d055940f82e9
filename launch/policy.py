"""The restart policy: what follows the end of a start, equal on every launcher.

`decide` is a pure function of how the start ended, which failures came before it and what the launcher can
do. It reads no file and starts nothing. launch/slurm_job.py applies it to Slurm and submitit jobs,
launch/local.py to forked ranks, launch/ray_failure.py and launch/ray_trainer.py to Ray workers.
docs/restarts.md has the table.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from fsdp.base.phases import StopReason
from launch.guard import Kind as Kind

CRASHES_IN_ONE_ALLOCATION = 3
"""The last of these requeues the job: the node may be the cause."""
STOPS_WITHOUT_A_STEP = 5
FAILED_RENDEZVOUS = 3

_LINES, _FIRST = "the lines above name the nodes", "the first error above says why"

EXIT_DIED, EXIT_REFUSED, EXIT_HUNG = 3, 4, 7
"""The exit codes of a rank that ended without an error message (LaunchError's), of a run directory that
another job holds, and of a rank that the watch ended.
"""

NODES_LEAVE = StopReason.LAUNCHER
_SIGNALS = (StopReason.SIGTERM, StopReason.SIGUSR1, StopReason.SIGUSR2)
SCHEDULERS_REASONS = (*_SIGNALS, StopReason.DEADLINE, NODES_LEAVE)
"""Reasons of fsdp/distributed/stop.py after which the run continues later. Ctrl-C, the stop file and
--train.stop_after are requests of a person.
"""


CRASHES_AT_ONE_PLACE = {Kind.ERROR: 2, Kind.DIED: 3}
"""This many crashes at one place end the run. A place is a step, or the time before a start's first step. A
rank that died without a message gets one more start: its node may be the cause.
"""


class Act(enum.Enum):
    END = "end"
    AGAIN = "again here"
    REQUEUE = "requeue"


@dataclass(frozen=True)
class End:
    """One start's end."""

    kind: Kind
    step: int = 0
    """The last recorded step."""
    starting: bool = False
    """Whether it failed before the run recorded its start: while importing, connecting or restoring."""
    code: int = 1
    """Its exit code. That of a killed rank differs between launchers and is reported as EXIT_DIED."""
    why: str = ""
    """The reason to stop, the error message, or what failed before the ranks."""

    @property
    def where(self) -> str:
        return "before the first step of a start" if self.starting else f"after step {self.step}"


@dataclass(frozen=True)
class Past:
    """What came before this end, in the same job."""

    crashes: Sequence[End] = field(default=())
    """Earlier ERROR and DIED ends, oldest first."""
    crashes_here: int = 0
    """How many of them in this allocation."""
    idle_stops: int = 0
    """Consecutive stops without a new step, this one included."""
    unmet: int = 0
    """Consecutive failed rendezvous, this one included."""


@dataclass(frozen=True)
class Allocation:
    """What the launcher can do after a failure."""

    requeue: bool = False
    again: bool = True
    """Whether it can start the ranks again in this allocation."""
    tries_left: int | None = None
    """Restarts that the user still allows; None sets no limit."""


@dataclass(frozen=True)
class Decision:
    act: Act
    code: int
    """The exit code, for END."""
    why: str
    hint: str = ""


DONE = Decision(Act.END, 0, "done")


def kind_of_stop(reason: str) -> Kind:
    return Kind.PREEMPTED if StopReason.read(reason) in SCHEDULERS_REASONS else Kind.STOPPED


def decide(end: End, past: Past, allocation: Allocation) -> Decision:
    if end.kind is Kind.PROGRAM:
        repeats = end.starting or end.step == 0
        end = replace(end, kind=Kind.FINAL if repeats else Kind.ERROR)
    if end.kind is Kind.DONE:
        return DONE
    if end.kind is Kind.STOPPED:
        return Decision(Act.END, 0, f"stopped: {end.why}")
    if end.kind in (Kind.PREEMPTED, Kind.NODES_LEAVE):
        return _after_stop(end, past, allocation)
    if end.kind is Kind.UNMET:
        return _after_unmet(end, past, allocation)
    if end.kind is Kind.REFUSED:
        return Decision(Act.END, EXIT_REFUSED, end.why)
    if end.kind is Kind.FINAL:
        return Decision(Act.END, end.code, f"another start would fail the same way: {end.why}")
    return _after_crash(end, past, allocation)


def _after_stop(end: End, past: Past, allocation: Allocation) -> Decision:
    if past.idle_stops >= STOPS_WITHOUT_A_STEP:
        why = f"stopped {past.idle_stops} times in a row before a step was done ({end.why})"
        return Decision(Act.END, 1, why, "a longer --time, with room for the start and the last save")
    if end.kind is Kind.NODES_LEAVE and allocation.again:
        return Decision(Act.AGAIN, 0, f"stopped: {end.why}")
    if allocation.requeue:
        return Decision(Act.REQUEUE, 0, f"stopped: {end.why}")
    return Decision(Act.END, 0, f"stopped: {end.why}; this launcher does not requeue")


def _after_unmet(end: End, past: Past, allocation: Allocation) -> Decision:
    if past.unmet >= FAILED_RENDEZVOUS:
        return Decision(Act.END, EXIT_DIED, f"{end.why}, {past.unmet} times in a row", _LINES)
    if allocation.requeue:
        return Decision(Act.REQUEUE, 0, end.why)
    return Decision(Act.END, EXIT_DIED, f"{end.why}, and this job is not requeued", _LINES)


def _after_crash(end: End, past: Past, allocation: Allocation) -> Decision:
    code = EXIT_DIED if end.kind is Kind.DIED and end.code != EXIT_HUNG else end.code
    if _repeats(end, past.crashes):
        return Decision(Act.END, code, f"failed again {end.where}", _FIRST)
    crashed = f"failed {end.where}"
    if allocation.requeue and past.crashes_here + 1 >= CRASHES_IN_ONE_ALLOCATION:
        return Decision(Act.REQUEUE, 0, f"{crashed}, crash {past.crashes_here + 1} in this allocation")
    if allocation.again and (allocation.tries_left is None or allocation.tries_left > 0):
        return Decision(Act.AGAIN, 0, crashed)
    if allocation.requeue:
        return Decision(Act.REQUEUE, 0, crashed)
    return Decision(Act.END, code, f"{crashed}, and no restart is left", _FIRST)


def _repeats(end: End, crashes: Sequence[End]) -> bool:
    """Whether this end is one too many at one place.

    An error compares with errors up to its step: a start resumes from its checkpoint, and data read ahead can
    meet the same mistake some steps earlier. A rank killed from outside at an earlier step than the last one
    is chance.
    """
    if end.starting:
        trailing = len(list(takewhile(lambda crash: crash.starting, reversed(crashes))))
        return trailing + 1 >= CRASHES_AT_ONE_PLACE[end.kind]
    errors = (Kind.ERROR, Kind.PROGRAM)
    same = [
        crash
        for crash in crashes
        if not crash.starting
        and (
            end.step <= crash.step
            if end.kind is Kind.ERROR and crash.kind in errors
            else end.step == crash.step
        )
    ]
    return len(same) + 1 >= CRASHES_AT_ONE_PLACE[end.kind]

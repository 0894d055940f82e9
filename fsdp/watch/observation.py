"""Observation: what a monitor found of one rank, and what that shows by itself: it waits, prepares or writes.

Pure functions without torch, about one rank. node_ranks.py makes observations, links.py sends them to the
head, verdict.py compares those of all ranks, stragglers.py their times. All values are those of JSON, or made
of them again by `decode`. Among them are the calls in PyTorch's flight recorder, in brief. On CUDA a
collective returns when its kernel is queued, and its host waits somewhere later, as in .tolist() or in the
engine of backward: what it waits for is in this record alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, READER, Activity
from fsdp.base.torch_private import BACKWARD_FUNCTION, COMPILER_HELPERS, COMPILER_PACKAGES

Frame = Sequence[Any]
"""File, line, function."""
Stack = Sequence[Frame]
"""Innermost first."""

WATCH_FOLDER = f"{Path(__file__).parent}/"
ROOT_FOLDER = f"{Path(__file__).parents[1]}/"

UNNAMED = "unnamed"
"""Prefix of threads that Python did not start: on CUDA a backward runs in such ones."""
BUSY_S = 2.0
"""Less processor time than this on one line proves nothing."""


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
class Observation:
    """Times are in seconds since the rank last made progress."""

    rank: int
    node: str = ""
    pid: int = 0
    alive: bool = True
    over: bool = False
    """The run has ended on this rank."""
    state: str = "S"
    """The training thread's state letter in /proc (fsdp/base/proc.py); X if it is gone."""
    phase: str = "forward"
    step: int = 0
    begun: int = 0
    ended: int = 0
    op: str = "none"
    numel: int = 0
    activity: Activity = Activity.NONE
    """Of the training thread."""
    save_activity: Activity = Activity.NONE
    """Of the thread that saves."""
    cuda: bool = False
    still_s: float = 0.0
    cpu_s: float = 0.0
    """Of the training thread."""
    process_cpu_s: float = 0.0
    """Of all threads: those that read ahead too."""
    starved_s: float = 0.0
    """Time in which it could run and no processor was free."""
    io_bytes: float = 0.0
    """Bytes that its process has read and written."""
    answered: bool | None = None
    """Whether the responder answered; None if it received no request."""
    moving: bool = False
    """The training thread runs Python: it was at different instructions in two answers, or where a loop or a
    function of Python is interrupted.
    """
    stack: Stack = ()
    threads: Mapping[str, Stack] = field(default_factory=dict)
    calls: tuple[GroupCalls, ...] = ()
    """From PyTorch's flight recorder, as the responder answered."""
    step_s: float = 0.0
    """The duration of slow steps so far; 0 before the first has ended."""
    steps: int = 0
    """Steps that have ended since the start."""
    work: Sequence[Sequence[float]] = ()
    """Of the last steps: step, own work in seconds."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the start by phase, `waiting` in collectives and `starved` of a processor."""
    failure: dict[str, Any] | None = None
    """The rank's failure report (failure.py)."""
    fatal: str = ""
    """faulthandler's text after a fault in C."""
    dead_s: float = 0.0
    """Time since it was first found dead."""
    oom_kills: int = 0
    """Of a dead rank: processes of its memory cgroup that the kernel has killed in its last seconds."""
    memory_limit: int = 0
    """Of a dead rank: bytes that its cgroup allows, if memory has come up to them; else 0."""
    silent_node_s: float = 0.0
    """Time since the last sign of life of its node's monitor; if above 0 the rest of this observation is out
    of date.
    """
    monitor_ended: bool = False
    """The node's kernel has closed the connection: the node is in reach, its monitor is gone."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    @property
    def runs(self) -> bool:
        """Its process runs, and has not ended its training."""
        return self.alive and not self.over

    @property
    def has_left(self) -> bool:
        """Its run has ended, it has failed, or it is dead."""
        return self.over or self.failure is not None or not self.alive

    @property
    def has_failed(self) -> bool:
        """It has reported an error, or it is dead. The second is not known of a node that is silent."""
        return self.failure is not None or not (self.alive or self.over or self.silent_node_s)

    @property
    def stopped(self) -> bool:
        """By a signal or a debugger: nothing in it runs."""
        return self.state in ("T", "t")

    @property
    def aborted(self) -> bool:
        return "Aborted" in self.fatal

    @property
    def in_call(self) -> bool:
        """Inside of a collective."""
        return self.begun > self.ended


def decode(data: Mapping[str, Any]) -> Observation:
    """From JSON of its fields (`vars`). Raises KeyError, TypeError or ValueError for another form."""
    activities = {name: Activity(data[name]) for name in ("activity", "save_activity")}
    return Observation(**{**data, **activities, "calls": tuple(GroupCalls(**call) for call in data["calls"])})


# ---------------------------------------------------------------- what a stack shows


def _foreign(frame: Frame) -> bool:
    """Of Python itself, of torch, which wraps deprecated functions by typing_extensions, or of the watch: a
    line that is of no help to a person.
    """
    python_or_torch = re.search(
        r"<frozen|<string>|/lib/python3[^/]*/(?!site-packages)|/site-packages/(torch/|typing_extensions\.)",
        frame[0],
    )
    return bool(python_or_torch) or frame[0].startswith(WATCH_FOLDER)


def own_line(stack: Stack) -> str:
    """`mine.py:12 forward`: the innermost line of the run's own code, and its function."""
    frames = [frame for frame in stack if not _foreign(frame)] or stack
    if not frames:
        return ""
    file, line, function = frames[0]
    return f"{'/'.join(Path(file).parts[-3:]).lstrip('/')}:{line} {function}"


def place_of(e: Observation) -> str:
    """Its innermost own line; of a wait for data, that of a thread that reads; of a lock held in C, that of
    another thread if the training thread does not compute. In a backward on CUDA it is in a thread of
    autograd, if that runs Python.
    """
    stacks: list[Stack] = []
    if e.answered is False and e.process_cpu_s - e.cpu_s > max(e.cpu_s, BUSY_S / 2):
        stacks += [stack for stack in e.threads.values() if stack and not _is_idle(stack[0])]
    if reads_data(e):  # a reader without a task is in its own function
        readers = [stack for name, stack in e.threads.items() if name.startswith(READER)]
        stacks += [stack for stack in readers if len(stack) > 1 and stack[0][2] != "_work"]
    if e.cuda and e.stack and e.stack[0][2] == BACKWARD_FUNCTION:
        hooks = [stack for name, stack in e.threads.items() if name.startswith(UNNAMED)]
        stacks += [stack for stack in hooks if not all(map(_foreign, stack))]
    return own_line((*stacks, e.stack)[0])


def _is_idle(frame: Frame) -> bool:
    """This project's code, or a wait of Python's."""
    waits_of_python = ("threading", "queue", "selectors", "socket", "connection")
    return frame[0].startswith(ROOT_FOLDER) or Path(frame[0]).stem in waits_of_python


def _is_in(stack: Stack, *packages: str, top: int = 60) -> bool:
    """Whether a frame is in one of these installed packages, by the folder that each has on every machine."""
    folders = [f"/{package.replace('.', '/')}/" for package in packages]
    return any(folder in frame[0] for frame in stack[:top] for folder in folders)


def waits(e: Observation) -> bool:
    """In a collective, for others. DDP's buckets are waited for in C++."""
    if not e.alive or e.stopped or e.in_call:
        return e.alive and not e.stopped
    in_ranks = Activity.RANKS in e.activity or _is_in(e.stack, "torch.distributed", top=2)
    in_backward = bool(e.stack) and e.stack[0][2] == BACKWARD_FUNCTION
    return e.cpu_s < BUSY_S and (in_ranks or in_backward)


def prepares(e: Observation) -> bool:
    """Compiles, imports or writes a profile: takes long, and is no fault. A thread that the compiler leaves
    behind is idle.
    """
    if Activity.PROFILE in e.activity:
        return True
    threads = (stack for stack in e.threads.values() if not _is_in(stack, COMPILER_HELPERS))
    return any(
        _is_in(stack, *COMPILER_PACKAGES) or any("importlib" in frame[0] for frame in stack)
        for stack in (e.stack, *threads)
    )


def reads_data(e: Observation) -> bool:
    """The data of a step, or of an evaluation."""
    return e.phase == "data" or Activity.DATA in e.activity


def writes(e: Observation) -> bool:
    """The training thread or the thread that saves is at the storage."""
    return Activity.STORAGE in e.activity | e.save_activity


def waits_for_save(e: Observation) -> bool:
    return Activity.SAVE in e.activity and not writes(e)


# ---------------------------------------------------------------- PyTorch's flight recorder

UNDESCRIBED = "undefined"
"""torch's description of a group that was made without one; its name is a number, alike on all ranks."""


def group_calls(entries: Iterable[Mapping[str, Any]]) -> list[GroupCalls]:
    """From the recorder's entries, oldest first. Messages between two ranks are left out."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            by_group.setdefault(_group(entry), []).append(entry)
    return [_in_brief(group, calls) for group, calls in by_group.items()]


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

"""Observation: what a monitor found of one rank, and what its stack shows: it waits, prepares or writes.

Pure functions without torch, about one rank by itself. observe.py makes observations; hang_verdict.py
compares those of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, READER, Activity
from fsdp.base.torch_private.names import BACKWARD_FUNCTION, COMPILER_HELPERS, COMPILER_PACKAGES
from fsdp.watch.recorded_calls import GroupCalls

Frame = tuple[str, int, str]
"""File, line, function."""

WATCH_FOLDER = f"{Path(__file__).parent}/"
ROOT_FOLDER = f"{Path(__file__).parents[1]}/"

UNNAMED = "unnamed"
"""Prefix of threads that Python did not start: on CUDA a backward runs in such ones."""
BUSY_S = 2.0
"""Less processor time than this on one line proves nothing."""


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
    io_bytes: int = 0
    """Bytes that its process has read and written."""
    answered: bool | None = None
    """Whether the responder answered; None if it received no request."""
    moving: bool = False
    """The training thread runs Python: it was at different instructions in two answers, or where a loop or a
    function of Python is interrupted.
    """
    stack: tuple[Frame, ...] = ()
    threads: dict[str, tuple[Frame, ...]] = field(default_factory=dict)
    calls: tuple[GroupCalls, ...] = ()
    """From PyTorch's flight recorder, as the responder answered."""
    left_out: str = ""
    """Trainable parameters of a unit without a gradient in its last reduction, such as `head.weight`."""
    failure: dict[str, Any] | None = None
    """The rank's failure report (failure_report.py)."""
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

    def encoded(self) -> dict[str, Any]:
        return asdict(self)


def decode(data: dict[str, Any]) -> Observation:
    threads = {name: tuple((f, n, w) for f, n, w in stack) for name, stack in data["threads"].items()}
    activities = {name: Activity(data[name]) for name in ("activity", "save_activity")}
    stack = tuple((f, n, w) for f, n, w in data["stack"])
    calls = tuple(GroupCalls(**one) for one in data["calls"])
    return Observation(**{**data, **activities, "stack": stack, "threads": threads, "calls": calls})


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


def own_line(stack: Sequence[Frame]) -> str:
    """`mine.py:12 forward`: the innermost line of the run's own code, and its function."""
    for frame in stack:
        if not _foreign(frame):
            return f"{_short(frame[0])}:{frame[1]} {frame[2]}"
    return f"{_short(stack[0][0])}:{stack[0][1]} {stack[0][2]}" if stack else ""


def place_of(e: Observation) -> str:
    """Its innermost own line; of a wait for data, that of a thread that reads; of a lock held in C, that of
    another thread if the training thread does not compute. In a backward on CUDA it is in a thread of
    autograd, if that runs Python.
    """
    others_compute = e.process_cpu_s - e.cpu_s > max(e.cpu_s, BUSY_S / 2)
    if e.answered is False and others_compute and (line := _user_line(e)):
        return line
    if reads_data(e) and (line := _read_at(e)):
        return line
    if e.cuda and e.stack and e.stack[0][2] == BACKWARD_FUNCTION:
        hooks = (stack for name, stack in e.threads.items() if name.startswith(UNNAMED))
        for stack in hooks:
            if any(not _foreign(frame) for frame in stack):
                return own_line(stack)
    return own_line(e.stack)


def _user_line(e: Observation) -> str:
    """Where the first thread is that runs other code than this project's or a wait of Python's."""
    at_work = (stack for stack in e.threads.values() if stack and not _is_idle(stack[0]))
    return next(map(own_line, at_work), "")


def _is_idle(frame: Frame) -> bool:
    waits_of_python = ("threading", "queue", "selectors", "socket", "connection")
    return frame[0].startswith(ROOT_FOLDER) or Path(frame[0]).stem in waits_of_python


def _read_at(e: Observation) -> str:
    """Where the first busy reader is: one without a task is in its own function."""
    stacks = (stack for name, stack in e.threads.items() if name.startswith(READER))
    return next((own_line(stack) for stack in stacks if len(stack) > 1 and stack[0][2] != "_work"), "")


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:]).lstrip("/")


def _is_in(stack: Sequence[Frame], *packages: str, top: int = 60) -> bool:
    """Whether a frame is in one of these installed packages, by the folder that each has on every machine."""
    folders = [f"/{package.replace('.', '/')}/" for package in packages]
    return any(folder in frame[0] for frame in stack[:top] for folder in folders)


def waits(e: Observation) -> bool:
    """In a collective, for others."""
    if not e.alive or e.stopped:
        return False
    if e.in_call:
        return True
    if e.stack and e.stack[0][2] == BACKWARD_FUNCTION and e.cpu_s < BUSY_S:
        return True  # DDP's buckets are waited for in C++
    return e.cpu_s < BUSY_S and (Activity.RANKS in e.activity or _is_in(e.stack, "torch.distributed", top=2))


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

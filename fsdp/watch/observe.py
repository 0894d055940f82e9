"""What a monitor finds of the ranks of its node, and what one rank's observation shows by itself.

Of each rank it reads the status page, the kernel's counts and the responder's answers: an Observation. Its
values are those of JSON, or made of them again by `decode`: links.py sends them to the head, verdict.py
compares those of all ranks, records.py their times. Among them are the calls in PyTorch's flight recorder, in
brief. On CUDA a collective returns when its kernel is queued, and its host waits somewhere later, as in
.tolist() or in the engine of backward: what it waits for is in this record alone. No torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp.base import proc
from fsdp.base.phases import PHASES, READER, Activity
from fsdp.watch import status_page

Frame = Sequence[Any]
"""File, line, function."""
Stack = Sequence[Frame]
"""Innermost first."""

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
    left_out: str = "none"
    """The first collective that this step lacks where the step before had it."""
    skipped: Sequence[str] = ()
    """In backward, the units that its forward has left out, and their patterns for a flag."""
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
    """The training thread runs Python: it is where a loop or a function of Python is interrupted."""
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
    """The rank's failure report (status_page.py)."""
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


FOREIGN = re.compile(
    r"<frozen|<string>|/lib/python3[^/]*/(?!site-packages)|/site-packages/(torch/|typing_extensions\.)|"
    + re.escape(f"{Path(__file__).parent}/")
)
"""Files of Python itself, of torch, which wraps deprecated functions by typing_extensions, or of the watch: a
line there is of no help to a person.
"""


def own_line(stack: Stack) -> str:
    """`mine.py:12 forward`: the innermost line of the run's own code, and its function."""
    frames = [frame for frame in stack if not FOREIGN.search(frame[0])] or stack
    if not frames:
        return ""
    file, line, function = frames[0]
    return f"{'/'.join(Path(file).parts[-3:]).lstrip('/')}:{line} {function}"


def place_of(e: Observation) -> str:
    """Its innermost own line; of a wait for data, that of a thread that reads."""
    stacks: list[Stack] = []
    if reads_data(e):  # a reader without a task is in its own function
        readers = [stack for name, stack in e.threads.items() if name.startswith(READER)]
        stacks += [stack for stack in readers if len(stack) > 1 and stack[0][2] != "_work"]
    return own_line((*stacks, e.stack)[0])


def in_backward(stack: Stack) -> bool:
    """The innermost function of Python while torch's engine runs a backward in C++. Were it elsewhere, a rank
    that waits for DDP's buckets would be reported as busy in its own code.
    """
    return bool(stack) and stack[0][0].endswith("/torch/autograd/graph.py") and "backward" in stack[0][2]


def waits(e: Observation) -> bool:
    """In a collective, for others. DDP's buckets are waited for in C++."""
    if not e.alive or e.stopped or e.in_call:
        return e.alive and not e.stopped
    in_ranks = Activity.RANKS in e.activity or any("/torch/distributed/" in frame[0] for frame in e.stack[:2])
    return e.cpu_s < BUSY_S and (in_ranks or in_backward(e.stack))


COMPILER = re.compile(r"/torch/_(dynamo|inductor|functorch)/|/triton/|importlib")
"""Files of a rank that compiles or imports. Elsewhere, the verdict calls a long compilation a hang."""
COMPILER_HELPERS = "/torch/_inductor/compile_worker/"
"""Of threads that the compiler leaves behind, where Triton is installed: they wait for the answers of its
worker processes until the run ends. Elsewhere, no rank of a compiled run is ever said to hang.
"""


def prepares(e: Observation) -> bool:
    """Compiles, imports or writes a profile: takes long, and is no fault."""
    files = [[frame[0] for frame in stack] for stack in (e.stack, *e.threads.values())]
    return Activity.PROFILE in e.activity or any(
        any(map(COMPILER.search, names)) for names in files if COMPILER_HELPERS not in " ".join(names)
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

UNDESCRIBED = ("", "undefined")
"""torch's descriptions of a group that was made without one; its name is a number, alike on all ranks."""


def group_calls(entries: Iterable[Mapping[str, Any]]) -> list[GroupCalls]:
    """From the recorder's entries, oldest first. Messages between two ranks are left out."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            name, description = (*entry["process_group"], "", "")[:2]
            group = f"group {name}" if description in UNDESCRIBED else description
            by_group.setdefault(f"{group} {entry.get('group_ranks', '')}".strip(), []).append(entry)
    return [_in_brief(group, calls) for group, calls in by_group.items()]


def _in_brief(group: str, recorded: Sequence[Mapping[str, Any]]) -> GroupCalls:
    number = operator.itemgetter("collective_seq_id")
    # An earlier run of this process may have had a group of this name.
    entries = [entry for entry in recorded if entry.get("pg_id") == recorded[-1].get("pg_id")]
    newest = max(map(number, entries))
    # Calls of one group end in their order. Those that went out together as one are marked only as a whole.
    ended = (number(entry) for entry in entries if entry["state"] == "completed" or entry["retired"])
    last = max(ended, default=-1)
    first = min((entry for entry in entries if number(entry) > last), key=number, default=None)
    if first is None:
        return GroupCalls(group, newest, 0)
    op = first["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base")
    # each rank's share of an all-to-all may have a size of its own
    uneven = "to_all" in op or "toall" in op
    return GroupCalls(
        group, newest, number(first), op, 0 if uneven else sum(map(math.prod, first["input_sizes"]))
    )


# ---------------------------------------------------------------- the ranks of a node

COUNTS = ("cpu_s", "process_cpu_s", "starved_s", "io_bytes")
"""Of an Observation: the kernel's counts since the last move."""
ANSWER_S = 1.0
THREAD_LINE = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
FRAME_LINE = re.compile(r'^ +File "(.*)", line (\d+|\?\?\?) in (.*)\n', re.MULTILINE)
"""Of faulthandler's text."""
COUNT_S = 2.0
"""Between two counts of kills for lack of memory. The last but one counts: a large process takes a while to
end. One long ago, of another process, caused no death.
"""
ENDED_BY_THE_WATCH = 7
EXIT_S = 1.0
"""Time for a rank to end after the command to exit; then it is killed."""

Watched = tuple[int, int, str]


class LocalRank:
    """One rank of this node. `seen`: the last observation, with the answer since its last move."""

    def __init__(self, rank: int, node: str, page: int, stacks: int, address: str) -> None:
        self._address, self.page = address, status_page.attach(page)
        self.page.numbers[status_page.MONITOR] = os.getpid()
        self.stacks = os.fdopen(stacks, encoding="utf-8", errors="replace")
        self.seen = self._unseen = Observation(rank, node, int(self.page.numbers[status_page.PID]))
        process = proc.stat(self.seen.pid)
        self._start_ticks = process.start_ticks if process is not None else None
        self._progress: list[float] = []
        self._moved_at = self._counted_at = time.monotonic()
        self._counts = self._counts_at_move = (0.0, 0.0, 0.0, 0.0)
        self._answer: dict[str, Any] = {}
        self._died_at = 0.0
        self._memory = proc.memory_group(self.seen.pid)
        self._oom_kills = [self._memory.oom_kills()] * 2

    @property
    def state(self) -> int:
        return int(self.page.numbers[status_page.STATE])

    def _process(self) -> proc.ProcessStat | None:
        """None if it is gone: a process id may be used again."""
        process = proc.stat(self.seen.pid)
        return process if process is not None and process.start_ticks == self._start_ticks else None

    def observe(self, now: float, lost_s: float = 0.0) -> None:
        """`lost_s`: time in which the monitor itself did not run. It does not count as stillness."""
        numbers, pid = self.page.numbers, self.seen.pid
        thread = int(numbers[status_page.THREAD]) or pid
        stat, process = proc.stat(pid, thread), self._process()
        alive = stat is not None and process is not None and stat.alive
        if stat is not None and process is not None:
            run_delay_s, io_bytes = proc.run_delay_s(pid, thread), proc.io_bytes(pid)
            self._counts = stat.cpu_s, process.cpu_s, run_delay_s, float(io_bytes)
        self._moved_at = min(now, self._moved_at + lost_s)
        progress = [numbers[index] for index in status_page.PROGRESS]
        if progress != self._progress:
            self._progress, self._moved_at, self._counts_at_move = progress, now, self._counts
            self._answer = {}
        counts = zip(COUNTS, self._counts, self._counts_at_move, strict=True)
        page = status_page.read(numbers)
        page["spent"]["starved"] = self._counts[2]
        page |= {name: count - before for name, count, before in counts}
        self.seen = replace(
            self._unseen,
            alive=alive,
            state=stat.state if stat is not None and alive else "X",
            still_s=now - self._moved_at,
            failure=self.page.read_failure(),
            **page,
            **(self._answer if alive else self._end(now)),
        )
        if alive and now - self._counted_at > COUNT_S:
            self._oom_kills = [self._oom_kills[1], self._memory.oom_kills()]
            self._counted_at = now

    def _end(self, now: float) -> dict[str, Any]:
        """What a dead rank has left."""
        self._died_at = self._died_at or now
        self.stacks.seek(0)
        fatal = "".join(self.stacks.read().partition("Fatal Python error")[1:])
        return {
            "fatal": fatal,
            "stack": parse_stacks(fatal)[0],
            "dead_s": now - self._died_at,
            "oom_kills": self._memory.oom_kills() - self._oom_kills[0],
            "memory_limit": self._memory.limit(reached=True) or 0,
        }

    # ------------------------------------------------------------ requests to the responder

    def request(self, command: str) -> socket.socket | None:
        """Send a command. The kernel accepts the connection even where the responder cannot run; a stopped
        process cannot, and its state shows it, so nothing waits for it.
        """
        if not self.seen.alive or self.seen.over or self.seen.stopped:
            return None
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(self._address)
            connection.sendall(command.encode())
        except OSError:
            connection.close()
            return None
        return connection

    def add_answer(self, answer: dict[str, Any] | None) -> None:
        """Complete `seen` with the responder's answer, or with the stack that faulthandler writes."""
        if not self.seen.alive or self.state in (status_page.OVER, status_page.FAILED, status_page.LEFT):
            return
        if answer is None:
            stack, *others = parse_stacks("" if self.seen.stopped else self._stacks_by_signal())
            threads = {f"unnamed {nth}": frames for nth, frames in enumerate(others)}
            self._answer = {"answered": False, "stack": stack, "threads": threads}
        else:
            calls = tuple(GroupCalls(**call) for call in answer.pop("calls"))
            skipped = answer.pop("skipped") if self.seen.phase == "backward" else ()
            self._answer = {"answered": True, "calls": calls, **answer, "skipped": skipped}
        self.seen = replace(self.seen, **self._answer)

    def _stacks_by_signal(self) -> str:
        """faulthandler's text, written in C by the stuck process."""
        before = self.stacks.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # gone meanwhile: a verdict comes without its stack too
            os.kill(self.seen.pid, status_page.STACK_SIGNAL)
        time.sleep(0.1)  # the handler needs a moment, and there is no sign of when it has written
        self.stacks.seek(before)
        return self.stacks.read()

    def kill(self) -> None:
        if self._process() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.seen.pid, signal.SIGKILL)


def _received(connection: socket.socket | None, deadline: float) -> dict[str, Any] | None:
    """The responder's answer; None without one."""
    if connection is not None:
        # time is up, or its process is gone: with half of its answer, too
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            return dict(json.loads(connection.makefile("rb").readline()))
    return None


def parse_stacks(text: str) -> list[Stack]:
    """From faulthandler's text: first the stack of the current thread, else of the last one (the main
    thread), then all others. A frame without a line has 0; a line that is still being written is left out.
    """
    blocks = THREAD_LINE.split(text)[1:]
    heads = blocks[::2]
    chosen = heads.index("Current thread") if "Current thread" in heads else len(heads) - 1
    stacks: list[Stack] = [
        [(file, int(line.replace("???", "0")), name) for file, line, name in FRAME_LINE.findall(frames)]
        for frames in blocks[1::2]
    ]
    return [stacks.pop(chosen), *stacks] if stacks else [()]


class NodeRanks:
    """`ranks`: open descriptors of each rank's status page and stacks, and its responder's address."""

    def __init__(self, ranks: Mapping[int, Watched], node: str) -> None:
        self.ranks = [LocalRank(rank, node, *watched) for rank, watched in ranks.items()]

    @property
    def seen(self) -> list[Observation]:
        return [local.seen for local in self.ranks]

    def observe(self, now: float, lost_s: float) -> None:
        for local in self.ranks:
            local.observe(now, lost_s)

    def running(self, *gone: int) -> list[LocalRank]:
        """Those that still run; one in these states counts as gone, though its process may exist."""
        left = (status_page.OVER, status_page.LEFT, *gone)
        return [local for local in self.ranks if local.seen.alive and local.state not in left]

    def ask(self) -> None:
        """Complete `seen` with each responder's answer, or without one with the stack by signal."""
        sent = [(local, local.request("stacks")) for local in self.ranks]
        deadline = time.monotonic() + ANSWER_S
        for local, connection in sent:
            local.add_answer(_received(connection, deadline))

    def mark_printed(self) -> None:
        """Ranks that have failed wait for this before their processes end."""
        for local in self.ranks:
            local.page.numbers[status_page.PRINTED] = 1

    def to_end(self, failed: bool = False) -> list[LocalRank]:
        """Ranks that have failed end by themselves, unless their teardown hangs: `failed` includes them, but
        not those whose processes live on.
        """
        return self.running() if failed else self.running(status_page.FAILED)

    def end(self, failed: bool = False) -> None:
        """End the ranks by the responder's exit command, which gives the exit code, then by SIGKILL."""
        for local in self.to_end(failed):
            if (connection := local.request(f"exit {ENDED_BY_THE_WATCH}")) is not None:
                connection.close()
        deadline = time.monotonic() + EXIT_S
        while (ending := self.to_end(failed)) and time.monotonic() < deadline:
            time.sleep(0.05)
            self.observe(time.monotonic(), 0.0)
        for local in ending:
            local.kill()

"""Observes one rank of this node: its status page, the kernel's counts, its responder's answer.

A process id may be used again: a rank is identified by its process id and its start time. What an observation
means is in observation.py and hang_verdict.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fsdp.base import proc
from fsdp.base.cgroup import memory_group
from fsdp.watch import status_page
from fsdp.watch.observation import UNNAMED, Frame, Observation
from fsdp.watch.recorded_calls import GroupCalls
from fsdp.watch.status_page import OVER, STACK_SIGNAL, RankStatus

ANSWER_S = 1.0
THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
FRAME = re.compile(r'^ +File "(.*)", line (\d+|\?\?\?) in (.*)\n', re.MULTILINE)
"""Of faulthandler's text."""
COUNT_S = 2.0
"""Between two counts of kills for lack of memory. The last but one counts: a large process takes a while to
end. One long ago, of another process, caused no death.
"""


@dataclass(frozen=True)
class ThreadCounts:
    """What the kernel counts of the training thread."""

    state: str
    start_ticks: str
    """Of its process."""
    cpu_s: float
    process_cpu_s: float
    """Of all its threads."""
    starved_s: float
    io_bytes: int
    """Read and written by its process."""


def thread_counts(pid: int, thread: int) -> ThreadCounts | None:
    """None if there is no such thread."""
    task, process = proc.stat(pid, thread or pid), proc.stat(pid)
    if task is None or process is None:
        return None
    starved_s = proc.run_delay_s(pid, thread or pid)
    moved = proc.io_bytes(pid)
    return ThreadCounts(task.state, process.start_ticks, task.cpu_s, process.cpu_s, starved_s, moved)


class LocalRank:
    """One rank of this node, as its monitor observes it."""

    def __init__(self, rank: int, path: Path, node: str) -> None:
        self.rank, self.node = rank, node
        self.page = status_page.attach(path)
        self.path = path
        self.stacks: TextIO
        try:
            self.stacks = path.with_suffix(".stacks").open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.stacks = io.StringIO()  # it has failed already, and its failure is on its page
        self.pid = int(self.page.numbers[status_page.PID])
        first = thread_counts(self.pid, 0)
        self.start_ticks = first.start_ticks if first else ""
        self._progress: tuple[float, ...] = ()
        self._moved_at = time.monotonic()
        self._at_move: ThreadCounts | None = first
        self._instruction: tuple[int, ...] = ()
        self._died_at = 0.0
        self._memory = memory_group(self.pid)
        self._oom_kills = [self._memory.oom_kills()] * 2
        self._counted_at = time.monotonic()
        self.starved_s = 0.0
        """Of the training thread, since it began."""
        self.seen = Observation(rank, node, self.pid)
        self.status: RankStatus = status_page.read(self.page.numbers)

    def observe(self, now: float, lost_s: float = 0.0) -> Observation:
        """`lost_s`: time in which the monitor itself did not run. It does not count as stillness."""
        status = self.status = status_page.read(self.page.numbers)
        counts = thread_counts(self.pid, status.thread)
        alive = counts is not None and counts.state not in "ZX" and counts.start_ticks == self.start_ticks
        self._moved_at = min(now, self._moved_at + lost_s)
        if status.progress != self._progress or self._at_move is None:
            self._progress, self._moved_at, self._at_move = status.progress, now, counts
        start = self._at_move
        self.starved_s = counts.starved_s if counts is not None else self.starved_s
        self.seen = Observation(
            rank=self.rank,
            node=self.node,
            pid=self.pid,
            alive=alive,
            over=status.state == OVER,
            state=counts.state if counts is not None else "X",
            phase=status.phase,
            step=status.step,
            begun=status.begun,
            ended=status.ended,
            op=status.op,
            numel=status.numel,
            cuda=status.cuda,
            still_s=now - self._moved_at,
            cpu_s=counts.cpu_s - start.cpu_s if counts and start else 0.0,
            process_cpu_s=counts.process_cpu_s - start.process_cpu_s if counts and start else 0.0,
            activity=status.activity,
            save_activity=status.save_activity,
            starved_s=counts.starved_s - start.starved_s if counts and start else 0.0,
            io_bytes=counts.io_bytes - start.io_bytes if counts and start else 0,
            failure=self.page.read_failure(),
            left_out=self.page.read_left_out(),
        )
        if alive and now - self._counted_at > COUNT_S:
            self._oom_kills = [self._oom_kills[1], self._memory.oom_kills()]
            self._counted_at = now
        if not alive:
            fatal = self._fault()
            self._died_at = self._died_at or now
            self.seen = replace(
                self.seen,
                fatal=fatal,
                stack=parse_stacks(fatal)[0],
                dead_s=now - self._died_at,
                oom_kills=self._memory.oom_kills() - self._oom_kills[0],
                memory_limit=self._memory.limit(reached=True) or 0,
            )
        return self.seen

    def _fault(self) -> str:
        self.stacks.seek(0)
        text = self.stacks.read()
        at = text.find("Fatal Python error")
        return text[at:] if at >= 0 else ""

    # ------------------------------------------------------------ requests to the responder

    def request(self, command: str) -> socket.socket | None:
        """Send a command. The kernel accepts the connection even where the responder cannot run."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(self.path.with_suffix(".sock")))
            connection.sendall(command.encode())
        except OSError:
            connection.close()
            return None
        return connection

    def answer(self, connection: socket.socket | None, deadline: float) -> dict[str, Any] | None:
        """The responder's answer; None without one."""
        if connection is None:
            return None
        data = b""
        with connection, contextlib.suppress(OSError):  # time is up, or its process is gone
            while not data.endswith(b"\n"):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = connection.recv(1 << 20)
                if not more:
                    break
                data += more
        answer: dict[str, Any] | None = json.loads(data) if data.endswith(b"\n") else None
        return answer

    def with_answer(self, answer: dict[str, Any] | None) -> Observation:
        """`seen` with the responder's answer; without one, with the stack that faulthandler writes."""
        if answer is None:
            text = self._stacks_by_signal() if self.seen.alive and not self.seen.stopped else ""
            stack, *others = parse_stacks(text)
            threads = {f"{UNNAMED} {nth}": frames for nth, frames in enumerate(others)}
            return replace(self.seen, answered=False, stack=stack, threads=threads)
        stack = _frames(answer["training"])
        at = (answer["lasti"], hash(stack))
        moving = answer["in_python"] or (bool(self._instruction) and at != self._instruction)
        self._instruction = at
        threads = {name: _frames(frames) for name, frames in answer["threads"].items()}
        calls = tuple(GroupCalls(**one) for one in answer["groups"])
        return replace(self.seen, answered=True, stack=stack, threads=threads, moving=moving, calls=calls)

    def _stacks_by_signal(self) -> str:
        """faulthandler's text, written in C by the stuck process."""
        if STACK_SIGNAL is None:
            return ""
        before = self.stacks.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # gone meanwhile: a verdict comes without its stack too
            os.kill(self.pid, STACK_SIGNAL)
        time.sleep(0.1)  # the handler needs a moment, and there is no sign of when it has written
        self.stacks.seek(before)
        return self.stacks.read()

    def all_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read()

    # ------------------------------------------------------------ the end

    def mark_printed(self) -> None:
        """A rank that has failed waits for this before its process ends."""
        self.page.numbers[status_page.PRINTED] = 1

    def kill(self) -> None:
        """If process id and start time are this rank's."""
        found = proc.stat(self.pid)
        if found is not None and found.alive and found.start_ticks == self.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _frames(rows: list[list[Any]]) -> tuple[Frame, ...]:
    return tuple((str(file), int(line), str(name)) for file, line, name in rows)


def parse_stacks(text: str) -> list[tuple[Frame, ...]]:
    """From faulthandler's text: first the stack of the current thread, else of the last one (the main
    thread), then all others. A frame without a line has 0; a line that is still being written is left out.
    """
    blocks = THREAD.split(text)[1:]
    heads = blocks[::2]
    chosen = heads.index("Current thread") if "Current thread" in heads else len(heads) - 1
    stacks = [
        tuple((file, int(line.replace("???", "0")), name) for file, line, name in FRAME.findall(frames))
        for frames in blocks[1::2]
    ]
    return [stacks.pop(chosen), *stacks] if stacks else [()]

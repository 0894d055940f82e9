"""The ranks of one node, as their monitor handles them: observe, ask, release or end them.

Of each rank it reads the status page, the kernel's counts and the responder's answers. A process id may be
used again: a rank is identified by its process id and its start time. What an observation means is in
observation.py and verdict.py, what follows from it in monitor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp.base import proc
from fsdp.watch import status_page
from fsdp.watch.observation import UNNAMED, GroupCalls, Observation, Stack
from fsdp.watch.status_page import (
    BEGUN,
    ENDED,
    FAILED,
    LEFT,
    MONITOR,
    OVER,
    PID,
    PRINTED,
    SINCE,
    STACK_SIGNAL,
    STATE,
    STEP,
    THREAD,
)

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
        self.page.numbers[MONITOR] = os.getpid()
        self.stacks = os.fdopen(stacks, encoding="utf-8", errors="replace")
        self.seen = Observation(rank, node, int(self.page.numbers[PID]))
        process = proc.stat(self.seen.pid)
        self._start_ticks = process.start_ticks if process is not None else ""
        self._progress: list[float] = []
        self._moved_at = self._counted_at = time.monotonic()
        self._counts = self._counts_at_move = (0.0, 0.0, 0.0, 0.0)
        self._instruction: tuple[Any, ...] = ()
        self._answer: dict[str, Any] = {}
        self._died_at = 0.0
        self._memory = proc.memory_group(self.seen.pid)
        self._oom_kills = [self._memory.oom_kills()] * 2

    @property
    def state(self) -> int:
        return int(self.page.numbers[STATE])

    def observe(self, now: float, lost_s: float = 0.0) -> None:
        """`lost_s`: time in which the monitor itself did not run. It does not count as stillness."""
        numbers, pid = self.page.numbers, self.seen.pid
        thread = int(numbers[THREAD]) or pid
        stat, process = proc.stat(pid, thread), proc.stat(pid)
        alive, state = False, "X"
        if stat is not None and process is not None and process.start_ticks == self._start_ticks:
            alive, state = stat.alive, stat.state if stat.alive else "X"
            run_delay_s, io_bytes = proc.run_delay_s(pid, thread), proc.io_bytes(pid)
            self._counts = stat.cpu_s, process.cpu_s, run_delay_s, float(io_bytes)
        self._moved_at = min(now, self._moved_at + lost_s)
        # `SINCE` tells two batches of one evaluation apart
        progress = [numbers[index] for index in (STATE, STEP, SINCE, BEGUN, ENDED)]
        if progress != self._progress:
            self._progress, self._moved_at, self._counts_at_move = progress, now, self._counts
            self._answer = {}
        since = [count - before for count, before in zip(self._counts, self._counts_at_move, strict=True)]
        page = status_page.read(numbers)
        page["spent"]["starved"] = self._counts[2]
        self.seen = Observation(
            self.seen.rank,
            self.seen.node,
            pid,
            alive=alive,
            state=state,
            still_s=now - self._moved_at,
            cpu_s=since[0],
            process_cpu_s=since[1],
            starved_s=since[2],
            io_bytes=since[3],
            failure=self.page.read_failure(),
            **page,
            **self._answer,
        )
        if alive and now - self._counted_at > COUNT_S:
            self._oom_kills = [self._oom_kills[1], self._memory.oom_kills()]
            self._counted_at = now
        if not alive:
            self._died_at = self._died_at or now
            fatal = "".join(self.all_stacks().partition("Fatal Python error")[1:])
            self.seen = replace(
                self.seen,
                fatal=fatal,
                stack=parse_stacks(fatal)[0],
                dead_s=now - self._died_at,
                oom_kills=self._memory.oom_kills() - self._oom_kills[0],
                memory_limit=self._memory.limit(reached=True) or 0,
            )

    # ------------------------------------------------------------ requests to the responder

    def request(self, command: str) -> socket.socket | None:
        """Send a command. The kernel accepts the connection even where the responder cannot run; a stopped
        process cannot, and its state shows it, so nothing waits for it.
        """
        if not self.seen.alive or self.seen.over or self.seen.stopped:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(self._address)
            connection.sendall(command.encode())
        except OSError:
            connection.close()
            return None
        return connection

    def add_answer(self, answer: Mapping[str, Any] | None) -> None:
        """Complete `seen` with the responder's answer, or with the stack that faulthandler writes."""
        if not self.seen.alive or self.state in (OVER, FAILED, LEFT):
            return
        if answer is None:
            stack, *others = parse_stacks("" if self.seen.stopped else self._stacks_by_signal())
            threads = {f"{UNNAMED} {nth}": frames for nth, frames in enumerate(others)}
            self._answer = {"answered": False, "stack": stack, "threads": threads}
        else:
            instruction = (answer["lasti"], answer["training"])
            moving = answer["in_python"] or self._instruction not in ((), instruction)
            self._instruction = instruction
            calls = tuple(GroupCalls(**call) for call in answer["groups"])
            self._answer = {"answered": True, "stack": answer["training"], "threads": answer["threads"]}
            self._answer |= {"moving": moving, "calls": calls}
        self.seen = replace(self.seen, **self._answer)

    def _stacks_by_signal(self) -> str:
        """faulthandler's text, written in C by the stuck process."""
        before = self.stacks.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # gone meanwhile: a verdict comes without its stack too
            os.kill(self.seen.pid, STACK_SIGNAL)
        time.sleep(0.1)  # the handler needs a moment, and there is no sign of when it has written
        self.stacks.seek(before)
        return self.stacks.read()

    def all_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read()

    def kill(self) -> None:
        """If process id and start time are this rank's."""
        process = proc.stat(self.seen.pid)
        if process is not None and process.alive and process.start_ticks == self._start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.seen.pid, signal.SIGKILL)


def _received(connection: socket.socket | None, deadline: float) -> dict[str, Any] | None:
    """The responder's answer; None without one."""
    if connection is None:
        return None
    data = b""
    with connection, contextlib.suppress(OSError):  # time is up, or its process is gone
        while not data.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if not (more := connection.recv(1 << 20)):
                break
            data += more
    answer: dict[str, Any] | None = json.loads(data) if data.endswith(b"\n") else None
    return answer


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

    def all_gone(self, *states: int) -> bool:
        """None of them runs any more; one in these states counts as gone, though its process may exist."""
        return all(local.state in (OVER, LEFT, *states) or not local.seen.alive for local in self.ranks)

    def ask(self) -> None:
        """Complete `seen` with each responder's answer, or without one with the stack by signal."""
        sent = [(local, local.request("stacks")) for local in self.ranks]
        deadline = time.monotonic() + ANSWER_S
        for local, answer in [(local, _received(connection, deadline)) for local, connection in sent]:
            local.add_answer(answer)

    def mark_printed(self) -> None:
        """Ranks that have failed wait for this before their processes end."""
        for local in self.ranks:
            local.page.numbers[PRINTED] = 1

    def to_end(self, failed: bool = False) -> list[LocalRank]:
        """The ranks that still run. Ranks that have failed end by themselves, unless their teardown hangs:
        `failed` includes them, but not those whose processes live on.
        """
        spared = (OVER, LEFT) if failed else (OVER, LEFT, FAILED)
        return [local for local in self.ranks if local.seen.alive and local.state not in spared]

    def end(self, failed: bool = False) -> None:
        """End the ranks by the responder's exit command, which gives the exit code, then by SIGKILL."""
        for local in self.to_end(failed):
            connection = local.request(f"exit {ENDED_BY_THE_WATCH}")
            if connection is not None:
                connection.close()
        deadline = time.monotonic() + EXIT_S
        while (ending := self.to_end(failed)) and time.monotonic() < deadline:
            time.sleep(0.05)
            self.observe(time.monotonic(), 0.0)
        for local in ending:
            local.kill()

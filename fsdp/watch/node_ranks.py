"""The ranks of one node, as their monitor handles them: observe, ask, keep their stacks, release or end them.

Of each rank it reads the status page, the kernel's counts and the responder's answers. A process id may be
used again: a rank is identified by its process id and its start time. What an observation means is in
observation.py and verdict.py, what follows from it in monitor.py.
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fsdp.base import proc
from fsdp.base.proc import memory_group
from fsdp.watch import status_page
from fsdp.watch.links import Report
from fsdp.watch.observation import UNNAMED, Frame, GroupCalls, Observation
from fsdp.watch.records import RecordFiles
from fsdp.watch.status_page import (
    BEGUN,
    ENDED,
    FAILED,
    LEFT,
    OVER,
    SINCE,
    STACK_SIGNAL,
    STATE,
    STEP,
    STEP_S,
)

ANSWER_S = 1.0
THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
FRAME = re.compile(r'^ +File "(.*)", line (\d+|\?\?\?) in (.*)\n', re.MULTILINE)
"""Of faulthandler's text."""
COUNT_S = 2.0
"""Between two counts of kills for lack of memory. The last but one counts: a large process takes a while to
end. One long ago, of another process, caused no death.
"""
ENDED_BY_THE_WATCH = 7
EXIT_S = 1.0
"""Time for a rank to end after the command to exit; then it is killed."""


@dataclass(frozen=True)
class ThreadCounts:
    """What the kernel counts of the training thread, and of its process."""

    state: str
    start_ticks: str
    cpu_s: float
    process_cpu_s: float
    starved_s: float
    io_bytes: int


GONE = ThreadCounts("X", "", 0.0, 0.0, 0.0, 0)


def thread_counts(pid: int, thread: int) -> ThreadCounts | None:
    """None if there is no such thread."""
    task, process = proc.stat(pid, thread or pid), proc.stat(pid)
    if task is None or process is None:
        return None
    starved_s = proc.run_delay_s(pid, thread or pid)
    return ThreadCounts(
        task.state, process.start_ticks, task.cpu_s, process.cpu_s, starved_s, proc.io_bytes(pid)
    )


class LocalRank:
    """One rank of this node."""

    def __init__(self, rank: int, path: Path, node: str) -> None:
        self.rank, self.node, self.path = rank, node, path
        self.page = status_page.attach(path)
        self.stacks: TextIO
        try:
            self.stacks = path.with_suffix(".stacks").open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.stacks = io.StringIO()  # it has failed already, and its failure is on its page
        self.pid = int(self.page.numbers[status_page.PID])
        self._at_move = thread_counts(self.pid, 0) or GONE
        self.start_ticks = self._at_move.start_ticks
        self._progress: tuple[float, ...] = ()
        self._moved_at = time.monotonic()
        self._instruction: tuple[int, ...] = ()
        self._died_at = 0.0
        self._memory = memory_group(self.pid)
        self._oom_kills = [self._memory.oom_kills()] * 2
        self._counted_at = time.monotonic()
        self.starved_s = 0.0
        """Of the training thread, since it began."""
        self.seen = Observation(rank, node, self.pid)

    @property
    def state(self) -> int:
        return int(self.page.numbers[status_page.STATE])

    def observe(self, now: float, lost_s: float = 0.0) -> Observation:
        """`lost_s`: time in which the monitor itself did not run. It does not count as stillness."""
        numbers = self.page.numbers
        counts = thread_counts(self.pid, int(numbers[status_page.THREAD]))
        alive = counts is not None and counts.state not in "ZX" and counts.start_ticks == self.start_ticks
        self._moved_at = min(now, self._moved_at + lost_s)
        # `SINCE` tells two batches of one evaluation apart
        progress = tuple(numbers[at] for at in (STATE, STEP, SINCE, BEGUN, ENDED))
        if progress != self._progress:
            self._progress, self._moved_at, self._at_move = progress, now, counts or GONE
        start, counts = self._at_move, counts or self._at_move
        self.starved_s = counts.starved_s
        self.seen = Observation(
            self.rank,
            self.node,
            self.pid,
            alive=alive,
            state=counts.state if alive else "X",
            still_s=now - self._moved_at,
            cpu_s=counts.cpu_s - start.cpu_s,
            process_cpu_s=counts.process_cpu_s - start.process_cpu_s,
            starved_s=counts.starved_s - start.starved_s,
            io_bytes=counts.io_bytes - start.io_bytes,
            failure=self.page.read_failure(),
            **status_page.read(numbers),
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
        return self.seen

    @property
    def ending(self) -> bool:
        """It has ended its run or failed; its process may still exist."""
        return self.state in (OVER, FAILED, LEFT) or not self.seen.alive

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
                if not (more := connection.recv(1 << 20)):
                    break
                data += more
        answer: dict[str, Any] | None = json.loads(data) if data.endswith(b"\n") else None
        return answer

    def with_answer(self, answer: dict[str, Any] | None) -> Observation:
        """`seen` with the responder's answer; without one, with the stack that faulthandler writes."""
        if not self.seen.alive:
            return self.seen
        if answer is None:
            stack, *others = parse_stacks("" if self.seen.stopped else self._stacks_by_signal())
            threads = {f"{UNNAMED} {nth}": frames for nth, frames in enumerate(others)}
            return replace(self.seen, answered=False, stack=stack, threads=threads)
        stack = _frames(answer["training"])
        instruction = (answer["lasti"], hash(stack))
        moving = answer["in_python"] or (bool(self._instruction) and instruction != self._instruction)
        self._instruction = instruction
        threads = {name: _frames(frames) for name, frames in answer["threads"].items()}
        calls = tuple(GroupCalls(**call) for call in answer["groups"])
        return replace(self.seen, answered=True, stack=stack, threads=threads, moving=moving, calls=calls)

    def _stacks_by_signal(self) -> str:
        """faulthandler's text, written in C by the stuck process."""
        before = self.stacks.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # gone meanwhile: a verdict comes without its stack too
            os.kill(self.pid, STACK_SIGNAL)
        time.sleep(0.1)  # the handler needs a moment, and there is no sign of when it has written
        self.stacks.seek(before)
        return self.stacks.read()

    def all_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read()

    def kill(self) -> None:
        """If process id and start time are this rank's."""
        process = proc.stat(self.pid)
        if process is not None and process.alive and process.start_ticks == self.start_ticks:
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


class NodeRanks:
    """`paths`: the status page of each rank. `seen`: the last observations, with answers after a request."""

    def __init__(self, paths: Mapping[int, str], node: str, files: RecordFiles) -> None:
        self.ranks: list[LocalRank] = []
        for rank, path in paths.items():
            with contextlib.suppress(FileNotFoundError):  # a run of a few steps may be over already
                self.ranks.append(LocalRank(rank, Path(path), node))
                self.ranks[-1].page.numbers[status_page.MONITOR] = os.getpid()
        self.seen: list[Observation] = []
        self._files = files

    def observe(self, now: float, lost_s: float) -> None:
        self.seen = [local.observe(now, lost_s) for local in self.ranks]

    @property
    def all_gone(self) -> bool:
        """None of them runs any more."""
        return all(local.state in (OVER, LEFT) or not local.seen.alive for local in self.ranks)

    @property
    def all_ending(self) -> bool:
        return all(local.ending for local in self.ranks)

    @property
    def step_s(self) -> float:
        return max((local.page.numbers[STEP_S] for local in self.ranks), default=0.0)

    def report(self, asked: bool = False) -> Report:
        """`asked`: it follows a request to the responders."""
        steps, spent = dict[int, dict[int, float]](), dict[int, dict[str, float]]()
        for local in self.ranks:
            numbers = local.page.numbers
            steps[local.rank] = status_page.ring(numbers)
            spent[local.rank] = {**status_page.spent(numbers), "starved": local.starved_s}
        return Report(self.seen, self.step_s, steps, spent, asked)

    # ------------------------------------------------------------ requests

    def ask(self) -> None:
        """Complete `seen` with each responder's answer, or without one with the stack by signal."""
        answers = self._answers("stacks")
        self.seen = [local.with_answer(answers[local.rank]) for local in self.ranks]

    def _answers(self, command: str) -> dict[int, dict[str, Any] | None]:
        sent = [(local, local.request(command)) for local in self.ranks]
        deadline = time.monotonic() + ANSWER_S
        return {local.rank: local.answer(connection, deadline) for local, connection in sent}

    def keep(self, folder: str) -> None:
        """Write the stacks of all threads and the flight recorders of these ranks."""
        answers = self._answers("dump")
        for local in self.ranks:
            answer, name = answers[local.rank], f"{folder}/rank-{local.rank}"
            if answer is not None:
                stacks = {"training": answer["training"], **answer["threads"]}
                text = "".join(
                    f"{name}:\n" + "".join(f"  {file}:{line} {function}\n" for file, line, function in stack)
                    for name, stack in stacks.items()
                )
                self._files.write(f"{name}.fr.json", json.dumps(answer["calls"]))
            else:
                trace = local.seen.failure["trace"] if local.seen.failure else ""
                text = trace or local.all_stacks() or "did not answer\n"
            self._files.write(f"{name}.txt", text)

    # ------------------------------------------------------------ the end

    def mark_printed(self) -> None:
        """Ranks that have failed wait for this before their processes end."""
        for local in self.ranks:
            local.page.numbers[status_page.PRINTED] = 1

    def to_end(self, failed: bool = False) -> list[LocalRank]:
        """The ranks that still run. Ranks that have failed end by themselves, unless their teardown hangs:
        `failed` includes them, but not those whose processes live on.
        """
        spared = (OVER, LEFT) if failed else (OVER, LEFT, FAILED)
        return [local for local in self.ranks if local.seen.alive and local.state not in spared]

    def end(self, failed: bool = False) -> None:
        """End the ranks by the responder's exit command, which gives the exit code, then by SIGKILL."""
        ending = self.to_end(failed)
        for local in ending:
            connection = local.request(f"exit {ENDED_BY_THE_WATCH}")
            if connection is not None:
                connection.close()
        deadline = time.monotonic() + EXIT_S
        while time.monotonic() < deadline and any(local.observe(time.monotonic()).alive for local in ending):
            time.sleep(0.05)
        for local in self.to_end(failed):  # the others have ended meanwhile
            local.kill()

    def remove_names(self) -> None:
        """Those of ranks that were killed. Until then a monitor that is started again opens them."""
        for local in self.ranks:
            for suffix in (".page", ".stacks", ".sock"):
                local.path.with_suffix(suffix).unlink(missing_ok=True)

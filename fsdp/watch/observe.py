"""What one look at a rank of this node finds: its cells, the kernel's counts, and its witness's answer.
Linux's /proc.

A process number may be given again: a rank is known by its number and its birth. Not here: what follows from
it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fsdp.watch import status_page
from fsdp.watch.observation import Evidence, Frame
from fsdp.watch.status_page import OVER, Beat

TICK = os.sysconf("SC_CLK_TCK")
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
ANSWER_S = 1.0


@dataclass(frozen=True)
class Kernel:
    """What the kernel counts of a thread."""

    state: str
    born: str
    cpu_s: float
    starved_s: float


def kernel(pid: int, thread: int) -> Kernel | None:
    """None where there is no such thread any more."""
    task = f"/proc/{pid}/task/{thread or pid}"
    try:
        fields = _read(f"{task}/stat").rpartition(b")")[2].decode().split()
        born = _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()[19]
    except OSError:
        return None
    return Kernel(fields[0], born, (int(fields[11]) + int(fields[12])) / TICK, _starved(task))


def _read(path: str) -> bytes:
    """Three of these a rank and beat: pathlib would take most of the monitor's time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _starved(task: str) -> float:
    """Seconds in which it could have run and no processor was free; 0 where this kernel does not count."""
    try:
        return int(_read(f"{task}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class LocalRank:
    """One rank of this node, as its monitor sees it."""

    def __init__(self, rank: int, path: Path, node: str) -> None:
        self.rank, self.node = rank, node
        self.cells = status_page.attach(path)
        self.path = path
        self.stacks: TextIO
        try:
            self.stacks = path.with_suffix(".stacks").open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self.stacks = io.StringIO()  # it has failed already, in words
        # Both ends are open: without names nothing is left behind, however the two end.
        for one in (path, path.with_suffix(".stacks")):
            one.unlink(missing_ok=True)
        self.pid = int(self.cells.numbers[status_page.PID])
        first = kernel(self.pid, 0)
        self.born = first.born if first else ""
        self._progress: tuple[float, ...] = ()
        self._moved_at = time.monotonic()
        self._at_move: Kernel | None = first
        self._lasti: tuple[int, ...] = ()
        self._died_at = 0.0
        self.starved_s = 0.0
        """Of the training thread, since it began."""
        self.evidence = Evidence(rank, node, self.pid)
        self.beat: Beat = status_page.read(self.cells.numbers)

    def look(self, now: float, lost_s: float = 0.0) -> Evidence:
        """`lost_s`: the monitor itself could not look for so long; nobody is blamed for that time."""
        beat = self.beat = status_page.read(self.cells.numbers)
        kept = kernel(self.pid, beat.thread)
        alive = kept is not None and kept.state not in "ZX" and kept.born == self.born
        self._moved_at = min(now, self._moved_at + lost_s)
        if beat.progress != self._progress or self._at_move is None:
            self._progress, self._moved_at, self._at_move = beat.progress, now, kept
        start = self._at_move
        self.starved_s = kept.starved_s if kept is not None else self.starved_s
        self.evidence = Evidence(
            rank=self.rank,
            node=self.node,
            pid=self.pid,
            alive=alive,
            over=beat.state == OVER,
            state=kept.state if kept is not None else "X",
            phase=beat.phase,
            step=beat.step,
            begun=beat.begun,
            ended=beat.ended,
            op=beat.op,
            numel=beat.numel,
            cuda=beat.cuda,
            still_s=now - self._moved_at,
            cpu_s=kept.cpu_s - start.cpu_s if kept and start else 0.0,
            does=beat.does,
            behind=beat.behind,
            starved_s=kept.starved_s - start.starved_s if kept and start else 0.0,
            words=self.cells.told(),
        )
        if not alive:
            fatal = self._fault()
            self._died_at = self._died_at or now
            self.evidence = replace(
                self.evidence, fatal=fatal, stack=parse_stacks(fatal), dead_s=now - self._died_at
            )
        return self.evidence

    def _fault(self) -> str:
        self.stacks.seek(0)
        text = self.stacks.read()
        at = text.find("Fatal Python error")
        return text[at:] if at >= 0 else ""

    # ------------------------------------------------------------ asking

    def ask(self, word: str) -> socket.socket | None:
        """Begin a question: the kernel takes it even where the witness cannot."""
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(ANSWER_S)
        try:
            one.connect(str(self.path.with_suffix(".sock")))
            one.sendall(word.encode())
        except OSError:
            one.close()
            return None
        return one

    def hear(self, asked: socket.socket | None, deadline: float) -> dict[str, Any] | None:
        """The witness's answer, or None."""
        if asked is None:
            return None
        data = b""
        with asked, contextlib.suppress(OSError):  # no time left, or its process is gone: no answer is one
            while not data.endswith(b"\n"):
                asked.settimeout(max(0.01, deadline - time.monotonic()))
                more = asked.recv(1 << 20)
                if not more:
                    break
                data += more
        answer: dict[str, Any] | None = json.loads(data) if data.endswith(b"\n") else None
        return answer

    def with_answer(self, answer: dict[str, Any] | None) -> Evidence:
        """The last look, with what the witness said; without an answer what faulthandler could write."""
        if answer is None:
            stack = self._stack_by_signal() if self.evidence.alive and self.evidence.state != "T" else ()
            return replace(self.evidence, answered=False, stack=stack)
        stack = _frames(answer["training"])
        at = (answer["lasti"], hash(stack))
        moving, self._lasti = bool(self._lasti) and at != self._lasti, at
        threads = {name: _frames(frames) for name, frames in answer["threads"].items()}
        return replace(self.evidence, answered=True, stack=stack, threads=threads, moving=moving)

    def _stack_by_signal(self) -> tuple[Frame, ...]:
        """Written in C by the stuck process; the thread that took the signal comes first."""
        if SIGNAL is None:
            return ()
        before = self.stacks.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # gone meanwhile: a verdict comes without its stack too
            os.kill(self.pid, SIGNAL)
        time.sleep(0.1)  # the handler needs a moment; nothing tells when it has written
        self.stacks.seek(before)
        return parse_stacks(self.stacks.read())

    def hear_that_it_is_said(self) -> None:
        """Whoever has failed may go: its story has been told."""
        self.cells.numbers[status_page.SAID] = 1

    def all_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read()

    def end(self) -> None:
        """By number and birth, never by name."""
        kept = kernel(self.pid, 0)
        if kept is not None and kept.born == self.born and kept.state not in "ZX":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def forget(self) -> None:
        """The witness's socket is the one name that is left."""
        self.path.with_suffix(".sock").unlink(missing_ok=True)


def _frames(rows: list[list[Any]]) -> tuple[Frame, ...]:
    return tuple((str(file), int(line), str(name)) for file, line, name in rows)


def parse_stacks(text: str) -> tuple[Frame, ...]:
    """faulthandler's words of the current thread, or of the last thread it names (the main thread): innermost
    first.
    """
    blocks = text.split("hread 0x")[1:]
    current = [block for at, block in enumerate(blocks) if text.split("hread 0x")[at].endswith("Current t")]
    chosen = current[0] if current else (blocks[-1] if blocks else "")
    frames = []
    for line in chosen.splitlines():
        if line.strip().startswith('File "'):
            file, _, rest = line.strip()[6:].partition('", line ')
            number, _, name = rest.partition(" in ")
            frames.append((file, int(number), name))
    return tuple(frames)

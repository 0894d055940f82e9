"""What one look found of one rank, and what its stack alone says: waits, prepares, writes. Pure, and without torch.

Here: one rank by itself. Not here: how it is found (look.py), and what follows from all of them together (verdict.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp.phases import PHASES

Frame = tuple[str, int, str]

BUSY_S = 2.0
"""Less computing than this on one spot proves nothing."""


@dataclass(frozen=True)
class Evidence:
    """What one look found of one rank. Times in seconds, since the rank last made progress."""

    rank: int
    node: str = ""
    pid: int = 0
    alive: bool = True
    over: bool = False
    state: str = "S"
    """The training thread's, as in /proc: R runs, S sleeps, D waits for a device, T is stopped, Z is dead."""
    phase: str = "forward"
    step: int = 0
    begun: int = 0
    ended: int = 0
    op: str = "none"
    numel: int = 0
    cuda: bool = False
    still_s: float = 0.0
    cpu_s: float = 0.0
    starved_s: float = 0.0
    """It could have run, and no processor was free."""
    answered: bool | None = None
    """Did the witness? None where it was not asked."""
    moving: bool = False
    """Between two answers the training thread was at another instruction."""
    stack: tuple[Frame, ...] = ()
    threads: dict[str, tuple[Frame, ...]] = field(default_factory=dict)
    words: dict[str, Any] | None = None
    fatal: str = ""
    """What faulthandler wrote of a fault in C."""
    dead_s: float = 0.0
    """For how long it has been gone."""
    silent_node_s: float = 0.0
    """Its node's monitor has not been heard of for so long; more than 0 if the rest of this evidence is out of date."""
    monitor_ended: bool = False
    """The node's kernel has closed its monitor's connection: the node can be reached, and the monitor's process is gone."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    @property
    def has_left(self) -> bool:
        """It has left: as it should, with words, or dead."""
        return self.over or self.words is not None or not self.alive

    @property
    def aborted(self) -> bool:
        return "Aborted" in self.fatal

    @property
    def in_call(self) -> bool:
        return self.begun > self.ended

    def encoded(self) -> dict[str, Any]:
        return asdict(self)


def decode(data: dict[str, Any]) -> Evidence:
    threads = {name: tuple((f, n, w) for f, n, w in stack) for name, stack in data["threads"].items()}
    return Evidence(**{**data, "stack": tuple((f, n, w) for f, n, w in data["stack"]), "threads": threads})


# ---------------------------------------------------------------- where a stack stands


def _foreign(frame: Frame) -> bool:
    """Of Python itself or of torch: not the line that a person would look at."""
    return bool(re.search(r"<frozen|<string>|/lib/python3[^/]*/(?!site-packages)|/site-packages/torch/|/fsdp/watch/", frame[0]))


def spot(stack: Sequence[Frame]) -> str:
    """`mine.py:12 forward`: the innermost line that is the run's own, with what it called."""
    for frame in stack:
        if not _foreign(frame):
            return f"{_short(frame[0])}:{frame[1]} {frame[2]}"
    return f"{_short(stack[0][0])}:{stack[0][1]} {stack[0][2]}" if stack else ""


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:]).lstrip("/")


def _stands_in(stack: Sequence[Frame], *words: str, top: int = 60) -> bool:
    return any(word in frame[0] for frame in stack[:top] for word in words)


def waits(e: Evidence) -> bool:
    """In a collective, for others."""
    if not e.alive or e.state in "TZ":
        return False
    if e.in_call:
        return True
    if e.stack and e.stack[0][2] == "_engine_run_backward" and e.cpu_s < BUSY_S:
        return True  # DDP's buckets are waited for in C++
    awaited = ("/torch/distributed/", "/fsdp/agree.py", "/fsdp/stop.py")
    return e.cpu_s < BUSY_S and _stands_in(e.stack, *awaited, top=2)


def prepares(e: Evidence) -> bool:
    """Compiles or imports: long, and no fault."""
    words = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/", "importlib")
    return _stands_in(e.stack, *words) or any(_stands_in(stack, *words) for stack in e.threads.values())


def writes(e: Evidence) -> bool:
    """The checkpoint's thread, or the training thread, is at the storage and not in talk with others."""
    storage = ("/fsdp/checkpoint/store.py", "/fsdp/checkpoint/write.py", "/fsdp/checkpoint/remote.py")
    stacks = [e.threads.get("checkpoint", ()), e.stack]
    return any(_stands_in(s, *storage, top=8) and not _stands_in(s, "/torch/distributed/", top=6) for s in stacks)


def waits_for_save(e: Evidence) -> bool:
    return _stands_in(e.stack, "/fsdp/checkpoint/", top=6) and not writes(e)

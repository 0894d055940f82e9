"""What one look found of one rank, and what its stack alone says: waits, prepares, writes. Pure, and without
torch.

Here: one rank by itself. Not here: how it is found (look.py), and what follows from all of them together
(verdict.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES, Activity
from fsdp.base.torch_private.names import BACKWARD_FUNCTION, COMPILER_PACKAGES

Frame = tuple[str, int, str]

WATCH = f"{Path(__file__).parent}/"

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
    does: Activity = Activity.NONE
    """Of the training thread."""
    behind: Activity = Activity.NONE
    """Of the thread that saves."""
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
    """Its node's monitor has not been heard of for so long; more than 0 if the rest of this evidence is out
    of date.
    """
    monitor_ended: bool = False
    """The node's kernel has closed its monitor's connection: the node can be reached, and the monitor's
    process is gone.
    """

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
    activities = {name: Activity(data[name]) for name in ("does", "behind")}
    stack = tuple((f, n, w) for f, n, w in data["stack"])
    return Evidence(**{**data, **activities, "stack": stack, "threads": threads})


# ---------------------------------------------------------------- where a stack stands


def _foreign(frame: Frame) -> bool:
    """Of Python itself, of torch or of the watch: not the line that a person would look at."""
    python_or_torch = re.search(
        r"<frozen|<string>|/lib/python3[^/]*/(?!site-packages)|/site-packages/torch/", frame[0]
    )
    return bool(python_or_torch) or frame[0].startswith(WATCH)


def spot(stack: Sequence[Frame]) -> str:
    """`mine.py:12 forward`: the innermost line that is the run's own, with what it called."""
    for frame in stack:
        if not _foreign(frame):
            return f"{_short(frame[0])}:{frame[1]} {frame[2]}"
    return f"{_short(stack[0][0])}:{stack[0][1]} {stack[0][2]}" if stack else ""


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:]).lstrip("/")


def _stands_in(stack: Sequence[Frame], *packages: str, top: int = 60) -> bool:
    """In a package that is installed beside this one, by the folder that it has wherever it is installed."""
    folders = [f"/{package.replace('.', '/')}/" for package in packages]
    return any(folder in frame[0] for frame in stack[:top] for folder in folders)


def waits(e: Evidence) -> bool:
    """In a collective, for others."""
    if not e.alive or e.state in "TZ":
        return False
    if e.in_call:
        return True
    if e.stack and e.stack[0][2] == BACKWARD_FUNCTION and e.cpu_s < BUSY_S:
        return True  # DDP's buckets are waited for in C++
    return e.cpu_s < BUSY_S and (Activity.RANKS in e.does or _stands_in(e.stack, "torch.distributed", top=2))


def prepares(e: Evidence) -> bool:
    """Compiles or imports: long, and no fault."""
    stacks = (e.stack, *e.threads.values())
    return any(
        _stands_in(stack, *COMPILER_PACKAGES) or any("importlib" in frame[0] for frame in stack)
        for stack in stacks
    )


def writes(e: Evidence) -> bool:
    """The thread that saves, or the training thread, is at the storage and not in an exchange with others."""
    return Activity.STORAGE in e.does | e.behind


def waits_for_save(e: Evidence) -> bool:
    return Activity.SAVE in e.does and not writes(e)

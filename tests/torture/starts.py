"""One start of a run under a launcher, for a chain of kills: its end, and how its ranks are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fsdp.base import proc
from tests.support.forked import FORKED
from tests.torture import rank as rank_module

ROOT = Path(__file__).parents[2]
FORKED_RANKS, TORCHRUN, LOCAL = "forked", "torchrun", "launch.local"
LAUNCHERS = {FORKED_RANKS: 12, TORCHRUN: 1, LOCAL: 1}
"""How often each launcher starts a run: torchrun's start takes ten times a forked one's processor time."""


class Start(Protocol):
    """The ranks of one start."""

    def any_ended(self) -> bool: ...
    def codes(self, timeout_s: float) -> list[int | None]: ...
    def kill(self, dice: random.Random) -> str: ...
    def kill_all(self) -> None: ...


class ForkedRanks:
    """Ranks forked from one process that has imported everything; no launcher."""

    def __init__(self, ranks: int, flags: Sequence[str], rendezvous: Path, log: Path) -> None:
        self._ranks = [
            FORKED.Process(
                target=rank_module.run,
                args=(rank, ranks, list(flags), str(rendezvous), str(log)),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for rank in self._ranks:
            rank.start()

    def any_ended(self) -> bool:
        return any(rank.exitcode is not None for rank in self._ranks)

    def codes(self, timeout_s: float) -> list[int | None]:
        for rank in self._ranks:
            rank.join(timeout_s)
        return [rank.exitcode for rank in self._ranks]

    def kill(self, dice: random.Random) -> str:
        """All ranks at once, as a power cut does, or one rank and the others up to 3 s later."""
        chosen = dice.choice(["all", *range(len(self._ranks))])
        for nth, rank in enumerate(self._ranks):
            if chosen in ("all", nth):
                rank.kill()
        for rank in self._ranks:
            rank.join(0 if chosen == "all" else dice.uniform(0, 3))
        self.kill_all()
        return "all ranks" if chosen == "all" else "one rank"

    def kill_all(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()


class Launched:
    """A launcher's process with its ranks."""

    def __init__(self, launcher: str, ranks: int, flags: Sequence[str], run_dir: Path, log: Path) -> None:
        self._run_dir = str(run_dir)
        command = {
            TORCHRUN: [
                *("-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d"),
                *("--rdzv_endpoint=localhost:0", "train.py"),
            ],
            LOCAL: ["-m", "launch.local", "--ranks", str(ranks), "--restarts", "0"],
        }[launcher]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, *command, *flags], cwd=ROOT, stdout=out, stderr=out
            )

    def any_ended(self) -> bool:
        return self._process.poll() is not None

    def codes(self, timeout_s: float) -> list[int | None]:
        try:
            return [self._process.wait(timeout_s)]
        except subprocess.TimeoutExpired:
            return [None]

    def kill(self, dice: random.Random) -> str:
        """Everything at once, the launcher alone, or one process below it; what is left up to 3 s later."""
        chosen = dice.choice(["all ranks", "launcher", "one rank"])
        below = [pid for pid in self._processes() if pid != self._process.pid]
        if chosen == "launcher":
            self._process.kill()
        elif chosen == "one rank" and below:
            kill(dice.choice(below))
        if chosen != "all ranks":
            self.codes(dice.uniform(0, 3))
        self.kill_all()
        return chosen

    def kill_all(self) -> None:
        while left := self._processes():
            for pid in left:
                kill(pid)
        self._process.wait()

    def _processes(self) -> list[int]:
        """By the run directory on their command lines: ranks have sessions of their own, and their parent may
        be dead.
        """
        return [pid for pid in proc.pids() if proc.is_alive(pid) and self._run_dir in command_line(pid)]


def command_line(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

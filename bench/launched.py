"""Observes a training command from outside: when each step ends, which processes are its ranks, how much
memory they hold.

Every contender prints `step N/M` after a step. Ranks are the direct children of the started process
(torchrun's workers, the launcher's forks), or the processes themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import processes
from bench.peers import setup
from bench.peers.roster import ready
from fsdp.base import proc

STEP = re.compile(r"step +(\d+)/")


ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


class Ended(RuntimeError):
    """The command ended or made no progress before the expected step; holds the line with the reason."""


def surroundings() -> dict[str, str]:
    """The environment of every contender."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(setup.ROOT)}
    # torch's bytecode is installed with it. Without ours, each process compiles its 220 files: 0.22 s.
    common.pop("PYTHONDONTWRITEBYTECODE", None)
    return common


class Launched:
    """`steps` grows with the output: (seconds since the start, step)."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log, self.steps = log, list[tuple[float, int]]()
        self._changed = threading.Condition()
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=setup.ROOT,
            env={**surroundings(), **(environment or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                if found := STEP.search(line):
                    with self._changed:
                        self.steps.append((self.now(), int(found[1])))
                        self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def newest(self) -> int:
        """The highest step done so far."""
        return max((step for _, step in self.steps), default=0)

    def wait_for(self, step: int, timeout_s: float) -> float:
        """When a step this high was first printed; raises Ended if it never is."""
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= step or not self._reader.is_alive(), timeout_s)
            for when, done in self.steps:
                if done >= step:
                    return when
        self.end()
        text = self.log.read_text()
        told = [line for line in ERROR.findall(text) if "ChildFailedError" not in line]
        raise Ended(f"step {step} never came: {told[0] if told else text[-300:]}"[:400])

    def ranks(self) -> list[int]:
        return sorted(proc.children(self.process.pid))

    def kill_one(self, draw: random.Random) -> float:
        """Sends SIGKILL to a random rank; returns the time."""
        victim = draw.choice(self.ranks())
        os.kill(victim, signal.SIGKILL)
        return self.now()

    def end(self) -> None:
        """Ends every process that the command started."""
        pids = [self.process.pid, *processes.descendants(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)


def torchrun(ranks: int, words: Sequence[str], *, restarts: int = 0, python: str = "") -> list[str]:
    """torchrun with a rendezvous on its own free port."""
    import sys

    head = [python or sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    head += [f"--max-restarts={restarts}"]
    return [*head, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *words]


def with_restarts() -> dict[str, str]:
    """Without this, on torch 2.13 with gloo, a restarted group reads the dead group's addresses from the
    shared store.
    """
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def that_run(names: Sequence[str]) -> list[str]:
    """Those of `names` that can start here: shardrun's own launcher always, peers once they are set up."""
    return [name for name in names if name.startswith("local") or ready([name])]


def ours(folder: Path, steps: int, every: int) -> list[str]:
    """The flags of train.py for the work of bench/peers/alone.py."""
    return [
        "--run.dir", str(folder), "--data.name", "synthetic", "--data.args.heldout", "0",
        "--train.steps", str(steps),
        "--checkpoint.every_steps", str(every), "--checkpoint.export", "false", "--run.log_every_steps", "1",
    ]  # fmt: skip


def alone(name: str, folder: Path, steps: int, every: int) -> list[str]:
    saves = ["--every", str(every), "--folder", str(folder)] if every else []
    return ["bench/peers/alone.py", name, "--steps", str(steps), *saves]

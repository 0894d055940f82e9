"""The ranks of one contender, controlled by the bench: started once, asleep between their turns.

Several teams exist at once, so that rounds can be short and other load affects all alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from bench.peers import setup
from bench.peers.roster import ROSTER
from bench.processes import free_port

HONEST = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Has glibc return freed blocks, so that a process's size shows its use. Costs page faults."""
WAIT_S = 240.0


class TeamError(RuntimeError):
    """A rank did not answer; holds the end of its output."""


@dataclass
class _Rank:
    process: subprocess.Popen[str]
    answers: TextIO
    log: Path


class Team:
    def __init__(
        self,
        name: str,
        work: str,
        ranks: int,
        *,
        threads: int = 1,
        honest_memory: bool = False,
        flags: Sequence[str] = (),
        program: Sequence[str] = ("bench.peers.worker",),
    ) -> None:
        """`flags` are added to shardrun's alone; DIR in one is the team's folder."""
        self.name, self.ranks, self._program = name, ranks, program
        self._folder = tempfile.TemporaryDirectory(prefix=f"bench-{name}-")
        self._flags = [word.replace("DIR", self._folder.name) for word in flags]
        common = {
            **os.environ, "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(setup.ROOT), **(HONEST if honest_memory else {}),
        }  # fmt: skip
        common["BENCH_RUN"] = str(Path(self._folder.name, "run"))
        self._members = [self._start(rank, work, common) for rank in range(ranks)]
        self._imports = True
        """The first answer, that a rank has its imports, is still to come: several teams start at once."""

    def _start(self, rank: int, work: str, common: dict[str, str]) -> _Rank:
        ear, mouth = os.pipe()
        log = Path(self._folder.name, f"{rank}.log")
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "BENCH_ANSWERS": str(mouth)}
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(ROSTER[self.name].python), "-m", *self._program, self.name, work, *self._flags],
                cwd=self._folder.name,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                pass_fds=(mouth,),
            )
        os.close(mouth)
        return _Rank(process, os.fdopen(ear), log)

    def steps(self, count: int, untimed: int = 0) -> dict[str, Any]:
        """One turn, after `untimed` steps more: seconds a step of the slowest rank, mean processor seconds
        a step of the ranks, mean losses.
        """
        answers = self._ask({"do": "steps", "steps": count, "untimed": untimed})
        return {
            "wall_s": max(one["wall_s"] for one in answers) / count,
            "cpu_s": sum(one["cpu_s"] for one in answers) / count / self.ranks,
            "losses": [
                sum(losses) / self.ranks for losses in zip(*(one["losses"] for one in answers), strict=True)
            ],
        }

    def memory(self, count: int) -> dict[str, float]:
        """Peak during the steps and memory after them, MiB above the idle process, of the worst rank."""
        answers = self._ask({"do": "memory", "steps": count})
        return {key: max(one[key] for one in answers) for key in ("peak_mib", "rest_mib")}

    def _ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        if self._imports:
            self._hear()
            self._imports = False
        for member in self._members:
            assert member.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: _hear says so
                member.process.stdin.write(json.dumps(order) + "\n")
                member.process.stdin.flush()
        return self._hear()

    def _hear(self) -> list[dict[str, Any]]:
        """An answer of each rank. One that ends is told at once: the others may wait for it."""
        deadline = time.monotonic() + WAIT_S
        answers: dict[int, dict[str, Any]] = {}
        silent = {member.answers: rank for rank, member in enumerate(self._members)}
        while silent:
            ready, _, _ = select.select(list(silent), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TeamError(self._told(min(silent.values()), f"silent for {WAIT_S:.0f} s"))
            for one in ready:
                rank = silent.pop(one)
                line = one.readline()
                if not line:
                    raise TeamError(self._told(rank, self._how_ended(rank)))
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in sorted(answers)]

    def _how_ended(self, rank: int) -> str:
        code = self._members[rank].process.wait(WAIT_S)
        return "killed, as by the kernel for lack of memory" if code == -signal.SIGKILL else "ended"

    def _told(self, rank: int, what: str) -> str:
        return f"{self.name}, rank {rank}: {what}\n{self._members[rank].log.read_text()[-2000:]}"

    def close(self) -> None:
        for member in self._members:
            if member.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # an order that it could not read any more
                    member.process.stdin.close()
        broken = any(member.process.poll() for member in self._members)  # the others may wait for it
        for member in self._members:
            try:
                member.process.wait(0 if broken else 20)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            member.answers.close()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for member in self._members:
                member.process.kill()
        self.close()

"""One start of a run under a launcher, for a chain of kills: its end, and how its ranks are killed.

All processes of a start that is not forked here carry the run directory in the variable MARK: ranks have
sessions of their own, and their parent may be dead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process
from pathlib import Path
from typing import Protocol

from tests.slurm import cluster as slurm
from tests.support.forked import FORKED
from tests.support.processes import pids_with
from tests.torture import rank as rank_module
from tests.torture.shapes import Layout

ROOT = Path(__file__).parents[2]
MARK = "TORTURED"
FORKED_RANKS, TORCHRUN, LOCAL, RAY, SRUN = "forked", "torchrun", "launch.local", "ray", "srun"
LAUNCHERS = {FORKED_RANKS: 188, TORCHRUN: 4, LOCAL: 6, RAY: 1, SRUN: 1}
"""How often each launcher starts a run: a start of torchrun takes ten times a forked one's processor time,
one of Ray thirty times.
"""
SURVIVE_S = 3.0
"""How long the others live after a kill, at most; on average a sixth of it."""


class Start(Protocol):
    """The ranks of one start."""

    @property
    def ends(self) -> Sequence[int]:
        """Descriptors that can be read when a process has ended."""

    def any_ended(self) -> bool: ...
    def codes(self, timeout_s: float) -> list[int | None]: ...
    def kill(self, dice: random.Random) -> str: ...
    def kill_all(self) -> None: ...


def survival_s(dice: random.Random) -> float:
    return min(SURVIVE_S, dice.expovariate(6 / SURVIVE_S))


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
            # Else each start of another chain's thread polls this process too. Of two polls at once one reads
            # the exit code, and the other's is 255.
            process._children.discard(rank)  # type: ignore[attr-defined]

    @property
    def ends(self) -> list[int]:
        return [rank.sentinel for rank in self._ranks]

    def any_ended(self) -> bool:
        return any(rank.exitcode is not None for rank in self._ranks)

    def codes(self, timeout_s: float) -> list[int | None]:
        for rank in self._ranks:
            rank.join(timeout_s)
        return [rank.exitcode for rank in self._ranks]

    def kill(self, dice: random.Random) -> str:
        """All ranks at once, as a power cut does, or one rank and the others up to SURVIVE_S later."""
        chosen = dice.choice(["all", *range(len(self._ranks))])
        for nth, rank in enumerate(self._ranks):
            if chosen in ("all", nth):
                rank.kill()
        if chosen != "all":
            late = survival_s(dice)
            for rank in self._ranks:
                rank.join(late)
        self.kill_all()
        return "all ranks" if chosen == "all" else "one rank"

    def kill_all(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()


class Launched:
    """A launcher's process with its ranks."""

    def __init__(
        self, words: Sequence[str], run_dir: Path, log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._mark = f"{MARK}={run_dir}"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**(environ or os.environ), MARK: str(run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._end = os.pidfd_open(self._process.pid)

    @property
    def ends(self) -> list[int]:
        return [self._end]

    def any_ended(self) -> bool:
        return self._process.poll() is not None

    def codes(self, timeout_s: float) -> list[int | None]:
        try:
            return [self._process.wait(timeout_s)]
        except subprocess.TimeoutExpired:
            return [None]

    def kill(self, dice: random.Random) -> str:
        """Everything at once, the launcher alone, or one process below it; the rest up to SURVIVE_S later."""
        chosen = dice.choice(["all ranks", "launcher", "one rank"])
        below = [pid for pid in pids_with(self._mark) if pid != self._process.pid]
        if chosen == "launcher":
            self._process.kill()
        elif chosen == "one rank" and below:
            kill(dice.choice(below))
        if chosen != "all ranks":
            self.codes(survival_s(dice))
        self.kill_all()
        return chosen

    def kill_now(self) -> None:
        """The environment of a process that has ended is empty, a zombie's too."""
        while left := pids_with(self._mark):
            for pid in left:
                kill(pid)
        self._process.wait()

    def kill_all(self) -> None:
        self.kill_now()
        os.close(self._end)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def torchrun(ranks: int, *more: str) -> list[str]:
    head = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d"]
    return [sys.executable, *head, "--rdzv_endpoint=localhost:0", *more, "train.py"]


def launch_local(ranks: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "launch.local", "--ranks", str(ranks), *more]


def ray(ranks: int) -> list[str]:
    """A Ray of its own, which ends with the run; a quarter of a processor for a worker, so that any machine
    has room.
    """
    workers = ["--ray.num_workers", str(ranks), "--ray.cpus_per_worker", "0.25", "--ray.max_failures", "0"]
    return [sys.executable, "train.py", "--backend", "ray", *workers]


@dataclass
class Launchers:
    """What can start a run here. `left_out`: the others, and why."""

    left_out: list[str]
    cluster: slurm.Cluster | None = None

    def weights(self, *, objects: bool) -> dict[str, int]:
        """By name. A node of the Slurm has a network of its own, where no object store answers."""
        absent = {line.partition(":")[0] for line in self.left_out} | ({SRUN} if objects else set())
        return {name: weight for name, weight in LAUNCHERS.items() if name not in absent}

    def start(
        self, name: str, layout: Layout, flags: Sequence[str], run_dir: Path, *, log: Path, one_node: bool
    ) -> Launched:
        if name == SRUN:
            return self._srun(layout.ranks, flags, run_dir, log, one_node=one_node)
        words = {TORCHRUN: torchrun, LOCAL: _local_without_restarts, RAY: ray}[name](layout.ranks)
        environ = {**os.environ, **RAYS_OWN} if name == RAY else None
        return Launched([*words, *flags], run_dir, log, environ)

    def _srun(
        self, ranks: int, flags: Sequence[str], run_dir: Path, log: Path, *, one_node: bool
    ) -> Launched:
        """On two nodes where each gets as many ranks."""
        assert self.cluster is not None
        nodes = 1 if ranks % 2 or one_node else 2
        words = ["srun", f"--nodes={nodes}", f"--ntasks={ranks}", sys.executable, "train.py", *flags]
        return _InSlurm(self.cluster, words, run_dir, log)


RAYS_OWN = {"RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Else Ray starts a Python process for each processor, which no worker of ours comes from."""


def _local_without_restarts(ranks: int) -> list[str]:
    return launch_local(ranks, "--restarts", "0")


class _InSlurm(Launched):
    """The job's allocation may outlive its srun: it is cancelled with the rest."""

    def __init__(self, cluster: slurm.Cluster, words: Sequence[str], run_dir: Path, log: Path) -> None:
        self._cluster, self._name = cluster, "-".join(run_dir.parts[-3:-1])
        environ = cluster.environment({"SLURM_JOB_NAME": self._name})
        super().__init__(cluster.on_login([*words]), run_dir, log, environ)

    def kill_all(self) -> None:
        super().kill_all()
        self._cluster.run("scancel", f"--name={self._name}", check=False)


@contextlib.contextmanager
def launchers(wanted: bool = True) -> Iterator[Launchers]:
    """With a Slurm of two nodes, where one is installed. `wanted`: else Ray and Slurm are left out."""
    found = Launchers([])
    if not wanted:
        found.left_out = [f"{name}: not asked for" for name in (RAY, SRUN)]
        yield found
        return
    if importlib.util.find_spec("ray") is None:
        found.left_out.append(f"{RAY}: ray is not installed")
    reason = slurm.missing()
    if reason:
        found.left_out.append(f"{SRUN}: {reason}")
        yield found
        return
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm.Cluster(Path(folder), slurm.Shape(nodes=2)) as found.cluster,
    ):
        yield found

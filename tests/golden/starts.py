"""One start of a run under each launcher: its exit codes, and how its processes are killed.

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
from dataclasses import dataclass, field
from multiprocessing import process
from pathlib import Path
from typing import Protocol

from tests.golden import rank as rank_module
from tests.slurm import cluster as slurm
from tests.support.forked import FORKED
from tests.support.processes import pids_with

ROOT = Path(__file__).parents[2]
MARK = "GOLDEN_RUN"
FORKED_RANKS, TORCHRUN, LOCAL, RAY, SRUN = "forked", "torchrun", "launch.local", "ray", "srun"
LAUNCHERS = (TORCHRUN, LOCAL, RAY, SRUN)
SURVIVE_S = 3.0
"""How long the others live after a kill, at most; on average a sixth of it."""
RAY_ENVIRON = {"RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Else Ray starts a Python process for each processor, which no worker of ours comes from."""


class Start(Protocol):
    """The ranks of one start."""

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

    def any_ended(self) -> bool:
        return any(rank.exitcode is not None for rank in self._ranks)

    def codes(self, timeout_s: float) -> list[int | None]:
        for rank in self._ranks:
            rank.join(timeout_s)
        return [rank.exitcode for rank in self._ranks]

    def kill(self, dice: random.Random) -> str:
        """All ranks at once, as a power cut does, or one rank and the others up to SURVIVE_S later."""
        victim = dice.choice(["all", *range(len(self._ranks))])
        for nth, rank in enumerate(self._ranks):
            if victim in ("all", nth):
                rank.kill()
        if victim != "all":
            self.codes(survival_s(dice))
        self.kill_all()
        return "all ranks" if victim == "all" else "one rank"

    def kill_all(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()


class Launched:
    """A launcher's process with its ranks, in a tree of sources."""

    def __init__(
        self,
        words: Sequence[str],
        run_dir: Path,
        log: Path,
        *,
        tree: Path = ROOT,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = f"{MARK}={run_dir}"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                words,
                cwd=tree,
                env={**(environ or os.environ), MARK: str(run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def any_ended(self) -> bool:
        return self._process.poll() is not None

    def codes(self, timeout_s: float) -> list[int | None]:
        try:
            return [self._process.wait(timeout_s)]
        except subprocess.TimeoutExpired:
            return [None]

    def kill(self, dice: random.Random) -> str:
        """Everything at once, the launcher alone, or one process below it; the rest up to SURVIVE_S later."""
        victim = dice.choice(["all ranks", "launcher", "one rank"])
        below = [pid for pid in pids_with(self._mark) if pid != self._process.pid]
        if victim == "launcher":
            self._process.kill()
        elif victim == "one rank" and below:
            kill(dice.choice(below))
        if victim != "all ranks":
            self.codes(survival_s(dice))
        self.kill_all()
        return victim

    def kill_all(self) -> None:
        """The environment of a process that has ended is empty, a zombie's too."""
        while left := pids_with(self._mark):
            for pid in left:
                kill(pid)
        self._process.wait()


class _InSlurm(Launched):
    """The job's allocation may outlive its srun: it is cancelled with the rest."""

    def __init__(self, cluster: slurm.Cluster, words: Sequence[str], run_dir: Path, log: Path) -> None:
        self._cluster, self._name = cluster, "-".join(run_dir.parts[-3:-1])
        environ = cluster.environment({"SLURM_JOB_NAME": self._name})
        super().__init__(cluster.on_login([*words]), run_dir, log, environ=environ)

    def kill_all(self) -> None:
        super().kill_all()
        self._cluster.run("scancel", f"--name={self._name}", check=False)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def words_of(launcher: str, ranks: int) -> list[str]:
    """Before the flags. Ray takes a quarter of a processor for a worker, so that any machine has room."""
    return {
        TORCHRUN: ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
                   "--rdzv_endpoint=localhost:0", "train.py"],
        LOCAL: ["-m", "launch.local", "--ranks", str(ranks), "--restarts", "0"],
        RAY: ["train.py", "--backend", "ray", "--ray.num_workers", str(ranks),
              "--ray.cpus_per_worker", "0.25", "--ray.max_failures", "0"],
    }[launcher]  # fmt: skip


@dataclass
class Launchers:
    """What can start a run here. `left_out`: the others, and why."""

    left_out: dict[str, str] = field(default_factory=dict)
    cluster: slurm.Cluster | None = None

    def start(
        self, launcher: str, ranks: int, flags: Sequence[str], run_dir: Path, log: Path, *, nodes: int = 2
    ) -> Launched:
        """`nodes`: of a Slurm, where each gets as many ranks."""
        if launcher != SRUN:
            environ = {**os.environ, **RAY_ENVIRON} if launcher == RAY else None
            words = [sys.executable, *words_of(launcher, ranks), *flags]
            return Launched(words, run_dir, log, environ=environ)
        assert self.cluster is not None
        nodes = 1 if ranks % 2 else nodes
        words = ["srun", f"--nodes={nodes}", f"--ntasks={ranks}", sys.executable, "train.py", *flags]
        return _InSlurm(self.cluster, words, run_dir, log)


@contextlib.contextmanager
def launchers(names: Sequence[str] = LAUNCHERS) -> Iterator[Launchers]:
    """With a Slurm of two nodes, where one is named and installed."""
    usable = Launchers({name: "not asked for" for name in LAUNCHERS if name not in names})
    if RAY in names and importlib.util.find_spec("ray") is None:
        usable.left_out[RAY] = "ray is not installed"
    if SRUN in names and (reason := slurm.missing()):
        usable.left_out[SRUN] = reason
    if SRUN in usable.left_out:
        yield usable
        return
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm.Cluster(Path(folder), slurm.Shape(nodes=2)) as usable.cluster,
    ):
        yield usable

"""The tiny run that these tests train: its flags, what it leaves behind, and the same run where nothing
disturbs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import FOREIGN, REPOSITORY, Cluster
from tests.support.processes import eventually
from tests.support.resumable import resumable_at

STEPS = 40
EVERY = 10
FLAGS = (
    "--model.name", "mlp", "--data.name", "tests.slurm.slow:digits", "--train.steps", str(STEPS),
    "--train.global_batch", "32", "--checkpoint.every_steps", str(EVERY), "--run.log_every_steps", "1",
    "--run.device", "cpu",
)  # fmt: skip
"""On two nodes the mesh is HSDP by default. The nodes have GPUs that only Slurm sees."""


@dataclass(frozen=True)
class Run:
    """A run directory, as a user reads it."""

    path: Path

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self._records("metrics.jsonl") if "loss" in record]

    @property
    def losses(self) -> dict[int, float]:
        """By step: JSON keeps every bit of a float."""
        return {
            record["step"]: record["loss"] for record in self._records("metrics.jsonl") if "loss" in record
        }

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._records("history.jsonl")

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.history if event["event"] == "start"]

    @property
    def ends(self) -> list[str]:
        return [event["why"] for event in self.history if event["event"] == "end"]

    def reaches(self, step: int, starts: int = 1) -> bool:
        return len(self.starts) >= starts and max(self.steps, default=0) >= step

    def _records(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass(frozen=True)
class Job:
    """A submitted job and its run."""

    cluster: Cluster
    id: str
    run: Run

    def until_step(self, step: int, timeout_s: float = 240) -> None:
        eventually(f"step {step} of job {self.id}", lambda: self.run.reaches(step), timeout_s, self.log)

    def until_resumable(self, step: int, timeout_s: float = 240) -> int:
        """The step that it has come to, `step` or a later one: an interval before it at most is sealed."""
        what = f"step {step} of job {self.id}, and its checkpoint"
        return eventually(what, lambda: resumable_at(self.run.path, step, EVERY), timeout_s, self.log)

    def until_start(self, count: int, timeout_s: float = 240) -> None:
        eventually(
            f"start {count} of job {self.id}", lambda: len(self.run.starts) >= count, timeout_s, self.log
        )

    def until_end(self, count: int, timeout_s: float = 240) -> None:
        eventually(f"end {count} of job {self.id}", lambda: len(self.run.ends) >= count, timeout_s, self.log)

    def wait(self, timeout_s: float = 240) -> str:
        return self.cluster.wait(self.id, timeout_s)

    def log(self) -> str:
        return self.cluster.log(self.id)


def sbatch(
    cluster: Cluster,
    folder: Path,
    *options: str,
    script: str = "fsdp",
    ranks: int = 1,
    flags: Sequence[str] = FLAGS,
    env: Mapping[str, str] | None = None,
) -> Job:
    """`sbatch OPTIONS slurm/SCRIPT.sbatch FLAGS`, called in `folder`, with so many ranks a node."""
    folder.mkdir(exist_ok=True)
    path = REPOSITORY / "slurm" / f"{script}.sbatch"
    job = cluster.sbatch(f"--ntasks-per-node={ranks}", *options, str(path), *flags, env=env, cwd=folder)
    name = cluster.job(job)["JobName"]
    return Job(cluster, job, Run(folder / "runs" / f"{name}-{job}"))


def torchrun(
    run: Path, ranks: int, *flags: str, of: Sequence[str] = FLAGS, env: Mapping[str, str] | None = None
) -> Run:
    """The same flags under torchrun, on this machine alone."""
    words = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} train.py --run.dir".split()
    clean = {name: value for name, value in os.environ.items() if not name.startswith((*FOREIGN, "RAY_"))}
    done = subprocess.run(
        [sys.executable, *words, str(run), *of, *flags],
        cwd=REPOSITORY,
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(run)


class Undisturbed:
    """The losses of the run that nothing happens to, under torchrun on one node: trained once for each mesh
    asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._known: dict[tuple[int, int], dict[int, float]] = {}

    def losses(self, replicate: int, shard: int) -> dict[int, float]:
        with self._lock:
            if (replicate, shard) not in self._known:
                mesh = f"--mesh.strategy hsdp --mesh.replicate {replicate} --mesh.shard {shard}"
                run = torchrun(self._folder / f"{replicate}x{shard}", replicate * shard, *mesh.split())
                self._known[replicate, shard] = run.losses
            return self._known[replicate, shard]

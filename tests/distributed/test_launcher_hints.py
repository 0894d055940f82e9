"""Hints name what a person types under the run's launcher: torchrun has no --exclude."""

from __future__ import annotations

import pytest

from fsdp.distributed.env import launcher_hints

SCRIPT = {"SHARDRUN_LAUNCHER": "torchrun"}


@pytest.mark.parametrize(
    ("launcher", "environ", "leave_out", "memory"),
    [
        ("torchrun", {}, "torchrun --nnodes=2 on the others", "docker run --memory"),
        ("torchrun under Slurm", {}, "sbatch --exclude=n1,n2", "sbatch --mem"),
        ("srun", {}, "srun --exclude=n1,n2", "srun --mem"),
        ("srun", SCRIPT, "sbatch --exclude=n1,n2", "sbatch --mem"),
        ("submitit (slurm)", SCRIPT, "python -m launch.submit --exclude=n1,n2", "launch.submit --mem"),
        ("ray", {}, "`ray stop` on n1,n2 removes it from the cluster", "docker run --memory"),
        ("ray", {"SHARDRUN_RAY_NODES": "4"}, "sbatch --exclude=n1,n2", "sbatch --mem"),
        ("launch.local", {}, "", "docker run --memory"),
        ("submitit (local)", {}, "", "docker run --memory"),
    ],
)
def test_each_launcher_has_its_own_words(
    launcher: str, environ: dict[str, str], leave_out: str, memory: str
) -> None:
    hints = launcher_hints(launcher, 4, environ)
    assert hints.without(["n1", "n2"]) == leave_out
    assert memory in hints.more_memory

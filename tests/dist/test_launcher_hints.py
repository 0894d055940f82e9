"""Hints name what a person types under the run's launcher: torchrun has no --exclude."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp.dist.env import launcher_hints, without_device
from tests.support.env import env_of

SCRIPT = {"SHARDRUN_LAUNCHER": "torchrun"}


@pytest.mark.parametrize(
    ("launcher", "environ", "leave_out", "memory", "killer"),
    [
        ("torchrun", {}, "torchrun --nnodes=2 on the others", "docker run --memory", "dmesg"),
        ("torchrun under Slurm", {}, "sbatch --exclude=n1,n2", "sbatch --mem", "sacct"),
        ("srun", {}, "srun --exclude=n1,n2", "srun --mem", "sacct"),
        ("srun", SCRIPT, "sbatch --exclude=n1,n2", "sbatch --mem", "sacct"),
        (
            "submitit (slurm)",
            SCRIPT,
            "python -m launch.submit --exclude=n1,n2",
            "launch.submit --mem",
            "sacct",
        ),
        ("ray", {}, "`ray stop` on n1,n2 removes it from the cluster", "docker run --memory", "dmesg"),
        ("ray", {"SHARDRUN_RAY_NODES": "4"}, "sbatch --exclude=n1,n2", "sbatch --mem", "sacct"),
        ("launch.local", {}, "", "docker run --memory", "dmesg"),
        ("submitit (local)", {}, "", "docker run --memory", "dmesg"),
        ("a single process", {}, "", "docker run --memory", "dmesg"),
    ],
)
def test_each_launcher_has_its_own_words(
    launcher: str, environ: dict[str, str], leave_out: str, memory: str, killer: str
) -> None:
    hints = launcher_hints(launcher, 4, environ)
    assert hints.without(["n1", "n2"]) == leave_out
    assert memory in hints.more_memory
    assert hints.killer("n1").startswith(killer)


@pytest.mark.parametrize(
    ("launcher", "nodes", "environ", "typed"),
    [
        ("torchrun", 1, {}, "CUDA_VISIBLE_DEVICES without number 2 leaves it out, with --nproc_per_node=3"),
        ("launch.local", 1, {}, "CUDA_VISIBLE_DEVICES without number 2 leaves it out, with --ranks 3"),
        ("ray", 1, {}, "CUDA_VISIBLE_DEVICES without number 2 leaves it out, with --ray.num_workers 3"),
        ("torchrun under Slurm", 1, {}, "leave its node out: sbatch --exclude=n1"),
        ("torchrun", 2, {}, "leave its node out: torchrun --nnodes=1 on the others"),
    ],
)
def test_a_broken_device_is_left_out_where_no_other_node_takes_its_place(
    launcher: str, nodes: int, environ: dict[str, str], typed: str
) -> None:
    env = replace(env_of(2, 4 * nodes, nodes=nodes), launcher=launcher)
    assert without_device(env, "n1", environ) == typed

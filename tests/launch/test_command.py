"""What the summary says to type next: the launcher that the run was started by, and its shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.config import load
from fsdp.distributed.env import DistEnv
from launch.command import rank_command, ray_command
from tests.support.env import env_of

ROOT = Path(__file__).parents[2]


def env(launcher: str, nodes: int = 1, each: int = 2) -> DistEnv:
    return env_of(0, nodes * each, nodes=nodes, launcher=launcher)


@pytest.mark.parametrize(
    ("shape", "environ", "typed"),
    [
        (env("a single process", each=1), {}, "python train.py"),
        (env("launch.local"), {}, "python -m launch.local --ranks 2"),
        (env("torchrun"), {}, "torchrun --nproc_per_node=2 train.py"),
        (
            env("torchrun", nodes=3),
            {"MASTER_ADDR": "n1"},
            "torchrun --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --nproc_per_node=2 train.py",
        ),
        (
            env("torchrun", nodes=2),
            {"MASTER_ADDR": "fd00::1"},
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint='[fd00::1]:29400' --nproc_per_node=2 "
            "train.py",
        ),
        (
            env("torchrun under Slurm", nodes=2),
            {"SHARDRUN_LAUNCHER": "torchrun"},
            "sbatch --nodes=2 --ntasks-per-node=2 slurm/fsdp.sbatch",
        ),
        (
            env("srun"),
            {"SHARDRUN_LAUNCHER": "srun"},
            "LAUNCHER=srun sbatch --nodes=1 --ntasks-per-node=2 slurm/fsdp.sbatch",
        ),
        (env("srun", nodes=2), {}, "srun --nodes=2 --ntasks=4 python train.py"),
        (
            env("submitit (slurm)", nodes=2),
            {"SHARDRUN_LAUNCHER": "torchrun"},
            "python -m launch.submit --nodes 2 --tasks-per-node 2 --",
        ),
    ],
    ids=lambda value: value.launcher if isinstance(value, DistEnv) else "",
)
def test_the_command_is_the_launchers_own(shape: DistEnv, environ: dict[str, str], typed: str) -> None:
    assert rank_command(shape, environ) == typed


def test_under_ray_the_drivers_own_flags_are_in_it() -> None:
    config = load(["--backend", "ray", "--ray.num_workers", "2:4", "--ray.address", "auto"])
    assert ray_command(config, {}) == "python train.py --backend ray --ray.address auto --ray.num_workers 2:4"
    with_variables = load(["--backend", "ray", "--ray.env", "WANDB_API_KEY=a1b2c3"])
    typed = 'python train.py --backend ray --ray.env WANDB_API_KEY="${WANDB_API_KEY:?}"'
    assert ray_command(with_variables, {}) == typed
    assert (
        ray_command(config, {"SHARDRUN_RAY_NODES": "2"}) == "LAUNCHER=ray sbatch --nodes=2 slurm/fsdp.sbatch"
    )

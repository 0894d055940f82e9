"""What a person types or sets under the launcher of a run, for hints: to leave nodes out, to raise a limit.

Imports no torch: the monitor process reads it too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp.base.text import as_typed
from fsdp.dist.env import DistEnv, fewer_ranks

WITHOUT_NODES = {
    "sbatch": "sbatch --exclude={hosts}",
    "srun": "srun --exclude={hosts}",
    "submitit": "python -m launch.submit --exclude={hosts}",
    "ray": "`ray stop` on {hosts} removes it from the cluster",
    "torchrun": "torchrun --nnodes={left} on the others",
}
MORE_MEMORY = {"sbatch": "sbatch --mem", "srun": "srun --mem", "submitit": "python -m launch.submit --mem"}
"""The flag for a job's memory. Other launchers have none."""
SLURM = ("sbatch", "srun", "submitit")
"""Where sacct shows how a process ended, and excluded nodes are named by sbatch's option."""


@dataclass(frozen=True)
class LauncherHints:
    launcher: str = "torchrun"
    """A key of WITHOUT_NODES, or a launcher of one machine alone."""
    nodes: int = 1
    reads_cluster_env: bool = False
    """Whether the job's script reads slurm/cluster.env."""

    @property
    def is_slurm(self) -> bool:
        return self.launcher in SLURM

    def without(self, hosts: Sequence[str]) -> str:
        """Leaves out these hosts; empty under a launcher of one machine alone."""
        left = max(1, self.nodes - len(hosts))
        text = WITHOUT_NODES.get(self.launcher, "").format(hosts=",".join(hosts), left=left)
        return as_typed(text)

    @property
    def more_memory(self) -> str:
        """Where the limit of a process's memory is set."""
        flag = as_typed(MORE_MEMORY.get(self.launcher, ""))
        return f"{flag}, the container's" if flag else "the container's, such as docker run --memory"

    @property
    def one_environment(self) -> str:
        place = "VENV in slurm/cluster.env, or " if self.reads_cluster_env else ""
        return f"one environment that all nodes see: {place}a container"

    @property
    def other_address(self) -> str:
        """What sets another address of rank 0."""
        if self.reads_cluster_env:
            return "RDZV_HOST in slurm/cluster.env sets another address"
        by_torchrun = self.launcher in ("torchrun", "sbatch")
        torchrun = "torchrun --local-addr=ADDRESS there, or " if by_torchrun else ""
        return f"for another address {torchrun}export MASTER_ADDR and MASTER_PORT in each process"

    def killer(self, nodes: str) -> str:
        """What shows what has killed processes of these nodes."""
        return f"sacct, or dmesg on {nodes}" if self.is_slurm else f"dmesg on {nodes}"


def launcher_hints(launcher: str, nodes: int, environ: Mapping[str, str] = os.environ) -> LauncherHints:
    """`launcher` as in DistEnv."""
    name = launcher.split(" ")[0]
    if launcher == "submitit (slurm)":
        return LauncherHints(name, nodes, reads_cluster_env=True)
    if not environ.keys().isdisjoint(("SHARDRUN_LAUNCHER", "SHARDRUN_RAY_NODES")):
        return LauncherHints("sbatch", nodes, reads_cluster_env=True)
    if launcher == "torchrun under Slurm":
        return LauncherHints("sbatch", nodes)
    return LauncherHints("one machine" if name == "submitit" else name, nodes)


def without_device(env: DistEnv, host: str, environ: Mapping[str, str] = os.environ) -> str:
    """Leaves out this rank's node, where others can take its place, or its device."""
    hints = launcher_hints(env.launcher, env.num_nodes, environ)
    if hints.is_slurm or env.num_nodes > 1:
        return f"leave its node out: {hints.without([host])}"
    fewer = fewer_ranks(env.launcher, max(1, env.local_world_size - 1))
    return f"CUDA_VISIBLE_DEVICES without number {env.local_rank} leaves it out, with {fewer}"

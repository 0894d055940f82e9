"""The command that continues a run under the same launcher, which the summary prints."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from fsdp.config import Config, RaySection
from fsdp.distributed.env import DistEnv, rendezvous_host

RENDEZVOUS_PORT = 29400
"""torchrun's own default for --rdzv-endpoint without a port."""


def rank_command(env: DistEnv, environ: Mapping[str, str] = os.environ) -> str:
    """The command without train.py's flags, for a launcher whose ranks have a DistEnv."""
    nodes, each = env.num_nodes, env.local_world_size
    if env.launcher == "launch.local":
        return f"python -m launch.local --ranks {env.world_size}"
    if env.launcher.startswith("submitit"):
        gpus = f" --gpus-per-node {each}" if env.device.type == "cuda" else ""
        return f"python -m launch.submit --nodes {nodes}{gpus} --tasks-per-node {each} --"
    if "SHARDRUN_LAUNCHER" in environ:
        before = "LAUNCHER=srun " if environ["SHARDRUN_LAUNCHER"] == "srun" else ""
        kind = "gpus" if env.device.type == "cuda" else "ntasks"
        return f"{before}sbatch --nodes={nodes} --{kind}-per-node={each} slurm/fsdp.sbatch"
    if env.launcher.startswith("torchrun"):
        host = rendezvous_host(environ)
        endpoint = f"'[{host}]:{RENDEZVOUS_PORT}'" if ":" in host else f"{host}:{RENDEZVOUS_PORT}"
        rendezvous = f" --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={endpoint}"
        return f"torchrun{rendezvous if nodes > 1 else ''} --nproc_per_node={each} train.py"
    if env.launcher == "srun":
        return f"srun --nodes={nodes} --ntasks={env.world_size} python train.py"
    return "python train.py"


def ray_command(config: Config, environ: Mapping[str, str] = os.environ) -> str:
    """The command under Ray, whose driver prints the summary. RUN/config.toml has no --ray flags: they are
    listed. The shell takes the values of --ray.env, which may be secrets, from its variables of that name.
    """
    if "SHARDRUN_RAY_NODES" in environ:
        return f"LAUNCHER=ray sbatch --nodes={environ['SHARDRUN_RAY_NODES']} slurm/fsdp.sbatch"
    changed = {n: value for n, value in vars(config.ray).items() if value != getattr(RaySection(), n)}
    variables = changed.pop("env", {})
    words = [f"--ray.{name} {shlex.quote(str(value))}" for name, value in changed.items()]
    words += [f'--ray.env {name}="${{{name}:?}}"' for name in variables]
    return " ".join(["python train.py --backend ray", *words])

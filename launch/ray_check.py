"""Checks Ray's package and the flags for each number of workers before a local Ray starts. Imports neither
torch nor Ray.
"""

from __future__ import annotations

import importlib.util

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config import Config, worker_range
from fsdp.dist.mesh import plan_batch, resolve


def check_ranks(config: Config) -> None:
    """Raises ConfigError; an elastic run may have any number of ranks in its range."""
    low, high = worker_range(config.ray.num_workers)
    for ranks in range(low, high + 1):
        resolve(config.mesh, ranks)
        plan_batch(config.train, ranks)


def refuse_ray(config: Config, launcher: str) -> None:
    """Raises ConfigError for --backend ray behind a launcher that starts the ranks itself."""
    if config.backend == "ray":
        raise ConfigError(
            f"--backend ray starts the ranks, and so does {launcher}.",
            "--backend torchrun, or python train.py --backend ray with nothing in front",
        )


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--backend ray needs Ray, which is not installed.", "pip install 'ray[train]'")

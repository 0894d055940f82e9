"""Checks Ray's package and the flags for each number of workers before a local Ray starts. Imports neither
torch nor Ray.
"""

from __future__ import annotations

import importlib.util

from fsdp.base.errors import LaunchError
from fsdp.config import Config, worker_range
from fsdp.dist.mesh import plan_batch, resolve


def check_ranks(config: Config) -> None:
    """Raises ConfigError; an elastic run may have any number of ranks in its range."""
    low, high = worker_range(config.ray.num_workers)
    for ranks in range(low, high + 1):
        resolve(config.mesh, ranks)
        plan_batch(config.train, ranks)


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--backend ray needs Ray, which is not installed.", "pip install 'ray[train]'")

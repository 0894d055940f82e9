"""Checks the flags for each number of workers, before a local Ray starts. Imports no torch and no Ray."""

from __future__ import annotations

from fsdp.config import Config, worker_range
from fsdp.dist.mesh import plan_batch, resolve


def check_ranks(config: Config) -> None:
    """Raises ConfigError; an elastic run may have any number of ranks in its range."""
    low, high = worker_range(config.ray.num_workers)
    for ranks in range(low, high + 1):
        resolve(config.mesh, ranks)
        plan_batch(config.train, ranks)

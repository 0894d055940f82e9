"""The DistEnv of a rank in a test."""

from __future__ import annotations

import torch

from fsdp.distributed.env import DistEnv


def env_of(rank: int = 0, ranks: int = 1, *, nodes: int = 1, launcher: str = "tests") -> DistEnv:
    """On CPUs, with as many ranks on each node."""
    each = ranks // nodes
    return DistEnv(
        rank=rank,
        world_size=ranks,
        local_rank=rank % each,
        local_world_size=each,
        node_rank=rank // each,
        num_nodes=nodes,
        device=torch.device("cpu"),
        launcher=launcher,
    )

"""Times all-gather and reduce-scatter within each node, between neighbours and over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp.dist.collectives import all_gather_objects
from fsdp.dist.env import DistEnv
from fsdp.doctor.device import synchronize

SMALL = 1024
TIMES = 5
# Newer torch has these names, and warns about the older ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Step = Callable[[], object]


def large(device: torch.device) -> int:
    """fp32 elements per rank: 64 MiB on CUDA; 1 MiB on a CPU, where the ranks share one memory."""
    return (64 << 20) // 4 if device.type == "cuda" else (1 << 20) // 4


def check(env: DistEnv, nodes: Sequence[Sequence[int]], stage: Callable[[str], None]) -> dict[str, Any]:
    """`nodes`: the ranks of each node. All ranks create the groups in one order; members use them."""
    found: dict[str, Any] = {"clock_s": clock_offset(env)}
    stage("all-gather and reduce-scatter within the node")
    own = [group for group in (_group(ranks) for ranks in nodes) if group is not None]
    if own and len(nodes[env.node_rank]) > 1:
        found["within"] = measure(env.device, own[0], len(nodes[env.node_rank]))
    if len(nodes) > 1:
        found["between"] = _between(env, nodes, stage)
        stage("all-gather and reduce-scatter over all ranks")
        found["all"] = measure(env.device, None, env.world_size)
    return found


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """None on ranks that are not members."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def _between(env: DistEnv, nodes: Sequence[Sequence[int]], stage: Callable[[str], None]) -> dict[int, Any]:
    """Neighbour → its link. Even pairs, then odd ones, so that no node is in two pairs at once."""
    count = len(nodes)
    pairs = [(n, n + 1) for n in range(0, count - 1, 2)] + [(n, n + 1) for n in range(1, count - 1, 2)]
    if count > 2:
        pairs.append((count - 1, 0))
    found: dict[int, Any] = {}
    for one, other in pairs:
        group = _group([nodes[one][0], nodes[other][0]])
        if group is not None:
            neighbour = other if env.node_rank == one else one
            stage(f"all-gather and reduce-scatter with node {neighbour}")
            found[neighbour] = measure(env.device, group, 2)
    return found


def measure(device: torch.device, group: dist.ProcessGroup | None, ranks: int) -> dict[str, float]:
    """Microseconds of a small all-gather, and GB/s that each rank receives in large collectives."""
    count = large(device)
    shard, small = torch.ones(count, device=device), torch.ones(SMALL, device=device)
    whole, small_whole = torch.empty(count * ranks, device=device), torch.empty(SMALL * ranks, device=device)
    gather = _seconds(device, lambda: ALL_GATHER(whole, shard, group=group))
    scatter = _seconds(device, lambda: REDUCE_SCATTER(shard, whole, group=group))
    latency = _seconds(device, lambda: ALL_GATHER(small_whole, small, group=group))
    moved = (ranks - 1) * count * 4
    return {
        "gather_gb_s": moved / gather / 1e9,
        "scatter_gb_s": moved / scatter / 1e9,
        "latency_us": latency * 1e6,
    }


def _seconds(device: torch.device, step: Step) -> float:
    """The best of TIMES calls, after a first one that sets up the connections."""
    step()
    synchronize(device)
    best = float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        step()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def clock_offset(env: DistEnv) -> float:
    """This rank's clock minus rank 0's, to the few milliseconds by which ranks leave a barrier."""
    if env.world_size == 1:
        return 0.0
    offsets = []
    for _ in range(TIMES):
        dist.barrier()
        times = all_gather_objects(time.time())
        offsets.append(times[env.rank] - times[0])
    return min(offsets, key=abs)

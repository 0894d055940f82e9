"""Measurements of one rank, as values by name: its device, ports, links, storage, and NCCL's transport."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base.errors import ConfigError
from fsdp.dist.env import DistEnv
from fsdp.dist.preflight import TAKEN, RankFacts

SECONDS = 0.4
CONNECT_S = 3.0
MOST_PARTNERS = 32
"""Each node tries so many after it."""
TIMES = 5


def check_device(device: torch.device, facts: RankFacts) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    rate, value = _product(device, 8192, torch.bfloat16) if on_cuda else _product(device, 384, torch.float32)
    in_use = f"{facts.taken:.0%} of its device's memory is in use" if facts.taken > TAKEN else ""
    return {"tflops": rate, "product": value, "in_use": in_use}


def _product(device: torch.device, size: int, dtype: torch.dtype) -> tuple[float, float]:
    """TFLOP/s over SECONDS, and a number that is the same on every device that computes correctly."""
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    out = torch.mm(left, right)
    value = float(out.double().abs().mean())
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(8):
            torch.mm(left, right, out=out)
        _synchronize(device)  # the host runs ahead of the device
        done += 8
    return 2.0 * size**3 * done / (time.perf_counter() - began) / 1e12, value


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unreachable(node: int, addresses: Sequence[Sequence[Any]]) -> dict[int, str]:
    """Node → why its address and port cannot be reached from here. All at once, with one time-out."""

    def failure(partner: int) -> str:
        try:
            socket.create_connection(tuple(addresses[partner]), timeout=CONNECT_S).close()
        except OSError as error:
            return str(error.strerror or error)
        return ""

    count = len(addresses)
    partners = [(node + step) % count for step in range(1, min(count, MOST_PARTNERS + 1))]
    with ThreadPoolExecutor(MOST_PARTNERS, "doctor-port") as pool:
        failures = dict(zip(partners, pool.map(failure, partners), strict=True))
    return {partner: why for partner, why in failures.items() if why}


# ---------------------------------------------------------------- links


def check_links(env: DistEnv, nodes: Sequence[Sequence[int]], stage: Callable[[str], None]) -> dict[str, Any]:
    """Within each node, between neighbours, over all. `nodes`: the ranks of each node. All ranks create the
    groups in one order; members use them.
    """
    measured: dict[str, Any] = {}
    stage("all-gather and reduce-scatter within the node")
    groups = [dist.new_group(list(ranks)) for ranks in nodes]
    if len(nodes[env.node_rank]) > 1:
        measured["within_gb_s"] = _link_gb_s(env.device, groups[env.node_rank], len(nodes[env.node_rank]))
    if len(nodes) == 1:
        return measured
    # Even pairs, then odd ones, so that no node is in two pairs at once.
    pairs = [(node, node + 1) for first in (0, 1) for node in range(first, len(nodes) - 1, 2)]
    measured["between"] = {}
    for pair in [*pairs, *([(len(nodes) - 1, 0)] if len(nodes) > 2 else [])]:
        heads = [nodes[node][0] for node in pair]
        group = dist.new_group(heads)
        if env.rank in heads:
            neighbour = pair[1 - heads.index(env.rank)]
            stage(f"all-gather and reduce-scatter with node {neighbour}")
            measured["between"][neighbour] = _link_gb_s(env.device, group, 2)
    stage("all-gather and reduce-scatter over all ranks")
    return {**measured, "all_gb_s": _link_gb_s(env.device, None, env.world_size)}


def _link_gb_s(device: torch.device, group: dist.ProcessGroup | None, ranks: int) -> float:
    """GB/s that a rank receives in an all-gather and a reduce-scatter: the best of TIMES, after a first one
    that sets up the connections.
    """
    # Newer torch has these names, and warns about the older ones.
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    count = (64 << 20 if device.type == "cuda" else 1 << 20) // 4  # a CPU's ranks share one memory
    shard, gathered = torch.ones(count, device=device), torch.empty(count * ranks, device=device)
    best = inf
    for turn in range(1 + TIMES):
        began = time.perf_counter()
        gather(gathered, shard, group=group)
        scatter(shard, gathered, group=group)
        _synchronize(device)
        best = min(best, time.perf_counter() - began) if turn else inf
    return 2 * (ranks - 1) * count * 4 / best / 1e9


# ---------------------------------------------------------------- storage


def write_probe(file: Path, size: int) -> dict[str, Any]:
    """Write and sync a file of `size` bytes: MB/s."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = os.urandom(size)
        began = time.perf_counter()
        with file.open("wb", buffering=0) as target:
            target.write(content)
            os.fsync(target.fileno())
        return {"write_mb_s": size / (time.perf_counter() - began) / 1e6}
    except OSError as error:
        return {"storage_error": f"{file.parent} cannot be written ({error.strerror})"}


# ---------------------------------------------------------------- NCCL's transport


SOCKET_HINT = "unset NCCL_IB_DISABLE and NCCL_NET; ibstat; containers need --device=/dev/infiniband"
RDMA_HINT = "lsmod | grep nvidia_peermem on each node; PCIe ACS must be off"
SHM_HINT = "unset NCCL_P2P_DISABLE; nvidia-smi topo -m shows the links; PCIe ACS prevents P2P"
TRANSPORTS = (
    # a line of the log, what it says, what to do where that is odd
    (r"via NET/Socket", "NET/Socket between nodes, not InfiniBand", SOCKET_HINT),
    (r"via NET/IB\w*/\d+(?!\S*GDRDMA)", "NET/IB without GPUDirect RDMA between nodes", RDMA_HINT),
    (r"via NET/IB\w*/\d+\S*/GDRDMA", "NET/IB with GPUDirect RDMA between nodes", ""),
    (r"via SHM", "SHM within the node: its GPUs exchange through host memory", SHM_HINT),
    (r"via P2P", "NVLink or PCIe within the node", ""),
)
NO_INFINIBAND = "NET/IB : No device found"


def transport_of(file: Path) -> tuple[str, list[tuple[str, str]]]:
    """A summary of NCCL's log of NCCL_DEBUG=INFO, in the formats of NCCL 2.18 to 2.28, from public logs. And
    what each transport means, with a HINT where that is odd.
    """
    try:
        log = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).", "--nccl-log FILE") from None
    counts = Counter(re.findall(r"via ((?:NET/[A-Za-z]+|[A-Z0-9]+)(?:\S*GDRDMA)?)", log))
    verdicts = [
        (what, "" if NO_INFINIBAND in log and "InfiniBand" in what else hint)
        for line, what, hint in TRANSPORTS
        if re.search(line, log)
    ]
    if not verdicts:
        hint = "start the run with NCCL_DEBUG=INFO, and give the file of its output"
        raise ConfigError(f"{file} has no line of NCCL.", hint)
    parts = [*re.findall(r"NCCL version [\d.]*\d", log)[:1], *(f"{via} {n}" for via, n in counts.items())]
    return ", ".join(parts), verdicts

"""Measurements of one rank, as values by name: its device, ports, links, storage, and NCCL's transport.

A node reads another node's file of the storage: its own would come from memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base import devices, proc
from fsdp.base.errors import ConfigError
from fsdp.dist.env import DistEnv
from fsdp.doctor.findings import link_rate

GIB = 2**30
SECONDS = 0.4
NVIDIA_SMI_S = 10.0
HEALTH = (
    # field of nvidia-smi, text of the finding, value of a healthy device
    ("ecc.errors.uncorrected.volatile.total", "uncorrected memory errors", "0"),
    ("retired_pages.pending", "memory pages wait for retirement", "No"),
    ("clocks_throttle_reasons.hw_slowdown", "slowed by its hardware (heat, power)", "Not Active"),
)
CONNECT_S = 3.0
MOST_PARTNERS = 32
"""Each node tries so many after it."""
SMALL_COUNT, TIMES = 1024, 5
BLOCK = 4 << 20


def check_device(device: torch.device, name: str) -> dict[str, Any]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(
            device
        )  # before the product, whose matrices stay in torch's cache
        known = devices.find(name)
        peak, errors = known.bf16_tflops if known else 0.0, _health(device)
        rate, value = _product(device, 8192, torch.bfloat16)
    else:
        memory = proc.node_memory_bytes()
        free, total, peak, errors = memory["MemAvailable"], memory["MemTotal"], 0.0, ""
        rate, value = _product(device, 384, torch.float32)
    sizes = {"memory_free_gib": free / GIB, "memory_gib": total / GIB}
    return {"tflops": rate, "product": value, "peak_tflops": peak, "health": errors, **sizes}


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


def _health(device: torch.device) -> str:
    """Errors that the driver counts on this device; empty without nvidia-smi, or where it lacks a field."""
    fields = ",".join(field for field, _, _ in HEALTH)
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {NVIDIA_SMI_S:.0f} s"
    except (subprocess.CalledProcessError, OSError):
        return ""
    return complaints(done.stdout)


def complaints(line: str) -> str:
    values = [value.strip() for value in line.strip().split(",")]
    return "; ".join(
        f"{text}: {value}"
        for value, (_, text, healthy) in zip(values, HEALTH, strict=False)
        if value != healthy and not value.startswith("[")  # [N/A], [Not Supported]
    )


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
        measured = link_of(env.device, groups[env.node_rank], len(nodes[env.node_rank]))
        measured["within_gb_s"] = link_rate(measured)
    if len(nodes) == 1:
        return measured
    # Even pairs, then odd ones, so that no node is in two pairs at once.
    pairs = [(node, node + 1) for first in (0, 1) for node in range(first, len(nodes) - 1, 2)]
    between: dict[int, Any] = {}
    for pair in [*pairs, *([(len(nodes) - 1, 0)] if len(nodes) > 2 else [])]:
        heads = [nodes[node][0] for node in pair]
        group = dist.new_group(heads)
        if env.rank in heads:
            neighbour = pair[1 - heads.index(env.rank)]
            stage(f"all-gather and reduce-scatter with node {neighbour}")
            between[neighbour] = link_of(env.device, group, 2)
    stage("all-gather and reduce-scatter over all ranks")
    overall = link_of(env.device, None, env.world_size)
    return {**overall, **measured, "between": between, "all": overall}


def link_of(device: torch.device, group: dist.ProcessGroup | None, ranks: int) -> dict[str, float]:
    """Microseconds of a small all-gather, and GB/s that each rank receives in large collectives."""
    # Newer torch has these names, and warns about the older ones.
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    count = (64 << 20 if device.type == "cuda" else 1 << 20) // 4  # a CPU's ranks share one memory
    shard, gathered = torch.ones(count, device=device), torch.empty(count * ranks, device=device)
    moved = (ranks - 1) * count * 4 / 1e9

    def best_seconds(call: Any, output: torch.Tensor, source: torch.Tensor) -> float:
        """The best of TIMES calls, after a first one that sets up the connections."""
        seconds = []
        for _ in range(1 + TIMES):
            began = time.perf_counter()
            call(output, source, group=group)
            _synchronize(device)
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])

    return {
        "gather_gb_s": moved / best_seconds(gather, gathered, shard),
        "scatter_gb_s": moved / best_seconds(scatter, shard, gathered),
        "small_us": 1e6 * best_seconds(gather, gathered[: SMALL_COUNT * ranks], shard[:SMALL_COUNT]),
    }


# ---------------------------------------------------------------- storage


def write_probe(file: Path, size: int) -> dict[str, Any]:
    """Write and sync a file of `size` bytes: MB/s."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        block = os.urandom(BLOCK)
        began = time.perf_counter()
        with file.open("wb") as target:
            for _ in range(size // BLOCK):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        return {"write_mb_s": size / (time.perf_counter() - began) / 1e6}
    except OSError as error:
        return {"storage_error": f"{file.parent} cannot be written ({error.strerror})"}


def read_probe(file: Path) -> dict[str, Any]:
    """MB/s from the storage: this node's cached pages of the file are dropped first."""
    try:
        with file.open("rb", buffering=0) as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began, count = time.perf_counter(), 0
            while block := source.read(BLOCK):
                count += len(block)
        return {"read_mb_s": count / max(time.perf_counter() - began, 1e-9) / 1e6}
    except OSError as error:
        return {"storage_error": f"{file.parent} cannot be read ({error.strerror})"}


# ---------------------------------------------------------------- NCCL's transport


@contextlib.contextmanager
def recorded_transport(on_cuda: bool) -> Iterator[Path | None]:
    """A folder into which NCCL logs; None on a CPU, and where NCCL_DEBUG is set already."""
    if not on_cuda or "NCCL_DEBUG" in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="doctor-nccl-") as folder:
        log = f"{folder}/%h.%p.log"
        settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH", "NCCL_DEBUG_FILE": log}
        os.environ.update(settings)
        try:
            yield Path(folder)
        finally:
            for name in settings:
                os.environ.pop(name, None)


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


def transport_of(files: Sequence[Path]) -> Mapping[str, Any]:
    """What NCCL's log of NCCL_DEBUG=INFO says, in the formats of NCCL 2.18 to 2.28, from public logs."""
    log = ""
    for file in files:
        try:
            log += file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}).", "--nccl-log FILE") from None
    counts = Counter(re.findall(r"via ((?:NET/[A-Za-z]+|[A-Z0-9]+)(?:\S*GDRDMA)?)", log))
    versions = re.findall(r"NCCL version [\d.]*\d", log)[:1]
    verdicts = [
        (what, hint * (NO_INFINIBAND not in log or "InfiniBand" not in what))
        for line, what, hint in TRANSPORTS
        if re.search(line, log)
    ]
    return {"summary": ", ".join([*versions, *(f"{p} {n}" for p, n in counts.items())]), "verdicts": verdicts}

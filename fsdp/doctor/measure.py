"""Measurements of one rank: its device, names and ports, links, storage, and NCCL's transport.

A node reads another node's file of the storage: its own would come from memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base import devices, proc
from fsdp.base.errors import ConfigError
from fsdp.dist import nccl_log
from fsdp.dist.collectives import all_gather_objects
from fsdp.dist.env import DistEnv
from fsdp.dist.network import address_towards, listen, resolves

# ---------------------------------------------------------------- device


SECONDS = 0.4
NVIDIA_SMI_S = 10.0
HEALTH = (
    # field of nvidia-smi, text of the finding, values of a healthy device
    ("ecc.errors.uncorrected.volatile.total", "uncorrected memory errors", ("0",)),
    ("retired_pages.pending", "memory pages wait for retirement", ("No",)),
    ("clocks_throttle_reasons.hw_slowdown", "slowed by its hardware (heat, power)", ("Not Active",)),
)


def check_device(device: torch.device, name: str) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (384, torch.float32)
    free, total = memory(device)  # before the product, whose matrices stay in torch's cache
    rate, value = product(device, size, dtype)
    known = devices.find(name) if on_cuda else None
    return {
        "tflops": rate,
        "product": value,
        "peak_tflops": known.bf16_tflops if known else 0.0,
        "memory_free": free,
        "memory_total": total,
        "health": health(device) if on_cuda else [],
    }


def product(device: torch.device, size: int, dtype: torch.dtype) -> tuple[float, float]:
    """TFLOP/s over SECONDS, and a number that is the same on every device that computes correctly."""
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(size, size, generator=generator).to(device, dtype)
    right = torch.randn(size, size, generator=generator).to(device, dtype)
    out = torch.mm(left, right)
    value = float(out.double().abs().mean())
    synchronize(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(8):
            torch.mm(left, right, out=out)
        # the host runs ahead of the device
        synchronize(device)
        done += 8
    return 2.0 * size**3 * done / (time.perf_counter() - began) / 1e12, value


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of the device, or of the node on the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    node = proc.node_memory_bytes()
    return node["MemAvailable"], node["MemTotal"]


def health(device: torch.device) -> list[str]:
    """Errors that the driver counts on this device; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = ",".join(field for field, _, _ in HEALTH)
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        done = subprocess.run(
            [program, which, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {NVIDIA_SMI_S:.0f} s"]
    except (subprocess.CalledProcessError, OSError):
        return []  # an older version that lacks a field
    return complaints(done.stdout)


def complaints(line: str) -> list[str]:
    values = [value.strip() for value in line.strip().split(",")]
    return [
        f"{text}: {value}"
        for value, (_, text, healthy) in zip(values, HEALTH, strict=False)
        if value not in healthy and not value.startswith("[")  # [N/A], [Not Supported]
    ]


# ---------------------------------------------------------------- names and ports


CONNECT_S = 3.0
NEIGHBOURS = 16
"""Above twice as many nodes, each node tries this many before it and after it instead of all."""


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """A port that accepts connections and sends the host name, until the block ends."""
    server = listen(0, 256)
    over = threading.Event()

    def serve() -> None:
        server.settimeout(0.2)
        while not over.is_set():
            try:
                taken, _ = server.accept()
            except OSError:  # the time-out, to read `over` again
                continue
            # the other side has closed the connection and reports that itself
            with contextlib.closing(taken), contextlib.suppress(OSError):
                taken.sendall(socket.gethostname().encode())

    thread = threading.Thread(target=serve, name="doctor-port", daemon=True)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        over.set()
        thread.join()
        server.close()


def partners(node: int, nodes: int) -> list[int]:
    if nodes <= 2 * NEIGHBOURS:
        return [other for other in range(nodes) if other != node]
    around = [(node + by) % nodes for by in range(-NEIGHBOURS, NEIGHBOURS + 1) if by]
    return list(dict.fromkeys(around))


def reach(node: int, places: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Node → why it cannot be reached from here; empty if it can. All in parallel, with one time-out."""
    found: dict[int, str] = {}

    def try_one(other: int, place: tuple[str, int]) -> None:
        try:
            with contextlib.closing(socket.create_connection(place, timeout=CONNECT_S)) as link:
                link.settimeout(CONNECT_S)
                found[other] = "" if link.recv(256) else "closed at once"
        except OSError as error:
            found[other] = str(error.strerror or error)

    threads = [
        threading.Thread(target=try_one, args=(other, places[other]), daemon=True)
        for other in partners(node, len(places))
        if other in places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * CONNECT_S)
    return {other: found.get(other, "no answer") for other in partners(node, len(places)) if other in places}


def check_names(host: str, main_address: str) -> dict[str, Any]:
    return {
        "host": host,
        "host_resolves": resolves(host),
        "address": address_towards(main_address) or resolves(host),
    }


# ---------------------------------------------------------------- links


SMALL_COUNT, TIMES = 1024, 5
# Newer torch has these names, and warns about the older ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Step = Callable[[], object]


def large(device: torch.device) -> int:
    """fp32 elements per rank: 64 MiB on CUDA; 1 MiB on a CPU, where the ranks share one memory."""
    return (64 << 20) // 4 if device.type == "cuda" else (1 << 20) // 4


def check_links(env: DistEnv, nodes: Sequence[Sequence[int]], stage: Callable[[str], None]) -> dict[str, Any]:
    """`nodes`: the ranks of each node. All ranks create the groups in one order; members use them."""
    found: dict[str, Any] = {"clock_s": clock_offset(env)}
    stage("all-gather and reduce-scatter within the node")
    own = [group for group in (_group(ranks) for ranks in nodes) if group is not None]
    if own and len(nodes[env.node_rank]) > 1:
        found["within"] = link_of(env.device, own[0], len(nodes[env.node_rank]))
    if len(nodes) > 1:
        found["between"] = _between(env, nodes, stage)
        stage("all-gather and reduce-scatter over all ranks")
        found["all"] = link_of(env.device, None, env.world_size)
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
            found[neighbour] = link_of(env.device, group, 2)
    return found


def link_of(device: torch.device, group: dist.ProcessGroup | None, ranks: int) -> dict[str, float]:
    """Microseconds of a small all-gather, and GB/s that each rank receives in large collectives."""
    count = large(device)
    shard, small = torch.ones(count, device=device), torch.ones(SMALL_COUNT, device=device)
    gathered = torch.empty(count * ranks, device=device)
    small_gathered = torch.empty(SMALL_COUNT * ranks, device=device)
    gather = _best_seconds(device, lambda: ALL_GATHER(gathered, shard, group=group))
    scatter = _best_seconds(device, lambda: REDUCE_SCATTER(shard, gathered, group=group))
    latency = _best_seconds(device, lambda: ALL_GATHER(small_gathered, small, group=group))
    moved = (ranks - 1) * count * 4
    return {
        "gather_gb_s": moved / gather / 1e9,
        "scatter_gb_s": moved / scatter / 1e9,
        "latency_us": latency * 1e6,
    }


def _best_seconds(device: torch.device, step: Step) -> float:
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


# ---------------------------------------------------------------- storage


BLOCK = 4 << 20
PATIENCE_S = 5.0
"""Time for a shared folder to show another node's file."""


def write_probe(folder: Path, name: str, size: int) -> dict[str, Any]:
    """Write and sync a file of `size` bytes: MB/s, and the free space afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block = os.urandom(BLOCK)
        began = time.perf_counter()
        with (folder / name).open("wb") as file:
            for _ in range(size // BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return {"write_mb_s": size / seconds / 1e6, "free": shutil.disk_usage(folder).free}
    except OSError as error:
        return {"error": f"cannot be written ({error.strerror})"}


def unseen(folder: Path, names: Mapping[int, str], patience_s: float = PATIENCE_S) -> list[int]:
    """The nodes whose file does not appear here."""
    deadline = time.monotonic() + patience_s
    missing = dict(names)
    while missing:
        present = _listed(folder)
        missing = {node: name for node, name in missing.items() if name not in present}
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return sorted(missing)


def _listed(folder: Path) -> set[str]:
    """Empty for a folder that is not there, or may not be listed."""
    try:
        return set(os.listdir(folder))  # noqa: PTH208  refreshes NFS's cache
    except OSError:
        return set()


def read_probe(file: Path) -> dict[str, Any]:
    """MB/s from the storage: this node's cached pages of the file are dropped first."""
    try:
        with file.open("rb", buffering=0) as source:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began, count = time.perf_counter(), 0
            while block := source.read(BLOCK):
                count += len(block)
        return {"read_mb_s": count / max(time.perf_counter() - began, 1e-9) / 1e6}
    except OSError as error:
        return {"error": f"cannot be read ({error.strerror})"}


# ---------------------------------------------------------------- NCCL's transport


INFINIBAND = Path("/sys/class/infiniband")
NCCL_LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}


@contextmanager
def recorded_transport(on_cuda: bool) -> Iterator[Path | None]:
    """A folder into which NCCL logs; None on a CPU, and where NCCL_DEBUG is set already."""
    if not on_cuda or "NCCL_DEBUG" in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="doctor-nccl-") as folder:
        added = {**NCCL_LOGGING, "NCCL_DEBUG_FILE": f"{folder}/%h.%p.log"}
        os.environ.update(added)
        try:
            yield Path(folder)
        finally:
            for name in added:
                os.environ.pop(name, None)


def read_transport(folder: Path, nodes: int) -> dict[str, Any]:
    """What this rank's log says, as the doctor's report has it."""
    return transport_of(sorted(folder.glob("*.log")), nodes, host_devices())


def transport_of(files: Sequence[Path], nodes: int, devices: Sequence[str]) -> dict[str, Any]:
    """`nodes` 0: several if the log has a connection between nodes."""
    lines: list[str] = []
    for file in files:
        try:
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}).", "--nccl-log FILE") from None
    found = nccl_log.read_log(lines)
    nodes = nodes or 1 + bool(found.total("NET/"))
    judged = nccl_log.verdicts(found, nodes=nodes, host_devices=devices)
    return {
        "summary": nccl_log.summary(found),
        "verdicts": [asdict(one) for one in judged],
        "facts": asdict(found),
    }


def host_devices() -> list[str]:
    """The node's InfiniBand and RoCE devices, as the kernel lists them."""
    return sorted(one.name for one in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def transport_text(seen: dict[str, Any]) -> str:
    lines = [seen["summary"]]
    for one in seen["verdicts"]:
        lines.append(f"{'odd ' if one['hint'] else 'ok  '} {one['what']}.")
        lines += [f"     HINT: {one['hint']}"] if one["hint"] else []
    return "\n".join(lines)

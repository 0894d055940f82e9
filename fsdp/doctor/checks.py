"""Measurements of one rank, as values by name; findings, which hold them against a table of checks; the text.

A rank or node is compared with the others: the median is the expected value. A node that is not fit is on the
exclude list, unless most nodes would be: then no single node is at fault.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp.base.errors import ConfigError
from fsdp.base.text import columns, counted, listed, named_ranks
from fsdp.distributed.env import DistEnv, launcher_hints
from fsdp.distributed.process_group import TAKEN, RankFacts, differences

SECONDS = 0.4
CONNECT_S = 3.0
MOST_PARTNERS = 32
"""Each node tries so many after it."""
TIMES = 5
CUDNN = 91501
"""9.15.1."""


def check_device(device: torch.device, facts: RankFacts) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    rate, value = _product(device, 8192, torch.bfloat16) if on_cuda else _product(device, 384, torch.float32)
    in_use = f"{facts.taken:.0%} of its device's memory is in use" if facts.taken > TAKEN else ""
    known = (torch.cuda.get_device_capability(device), torch.backends.cudnn.version()) if on_cuda else ((), 0)
    return {"tflops": rate, "product": value, "in_use": in_use, "cudnn": slower_attention(*known)}


def slower_attention(capability: tuple[int, ...], cudnn: int | None) -> str:
    """On these devices torch takes cuDNN's attention by itself, from a version on."""
    if capability not in ((9, 0), (10, 0)) or (cudnn or CUDNN) >= CUDNN:
        return ""
    return f"cuDNN {cudnn} is below {CUDNN}: torch takes flash attention, 1.5 to 1.7 times slower on an H100"


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


# ---------------------------------------------------------------- findings

RankReport = Mapping[str, Any]
"""One rank's measurements by name; one of a check that it did not reach is missing."""
SLOW_LINK = 0.5
SAME_PRODUCT = 1e-3


class Check(NamedTuple):
    """A measurement by name: a text is a fault itself; a rate is one below a share of the median."""

    name: str
    sentence: str
    hint: str
    out: bool
    """Whether the node is excluded."""
    of_node: bool
    """Whether the first rank of a node measures it for all."""
    least: float = 0.0
    """Share of the median, of ranks or nodes with a device alike."""
    least_on_cpu: float = 0.0


CHECKS = (
    # GPUs of one kind differ by few per cent, processes that share a CPU by more
    Check("tflops", "matrix product at {:.3g} TFLOP/s", "check for other jobs, its clocks, its cooling",
          True, False, 0.85, 0.6),
    Check("unnamed", "{}", "add it to DNS or /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE", True, True),
    Check("in_use", "{}", "nvidia-smi on that node shows by which process", True, False),
    Check("cudnn", "{}", "--speed.attention cudnn, or a newer cuDNN", False, False),
    Check("storage_error", "{}", "--dir FOLDER on shared storage", True, True),
    Check("unseen", "{}", "mount the shared storage there, or --dir FOLDER that is shared", True, True),
    Check("within_gb_s", "{:.3g} GB/s within the node",
          "NVLink or PCIe may be down: NCCL_DEBUG=INFO shows the path", True, True, 0.5, 0.5),
    Check("write_mb_s", "writes {:.0f} MB/s", "check its mount and its network to the storage",
          False, True, 0.25, 0.25),
)  # fmt: skip
PRODUCT = CHECKS[0]


def faults(check: Check, reports: Mapping[int, RankReport]) -> dict[int, str]:
    """Rank or node → what is wrong with it."""
    values = {number: report[check.name] for number, report in reports.items() if report.get(check.name)}
    if not check.least:
        return values
    devices = {number: reports[number]["facts"]["device"] for number in values}
    alike = defaultdict(list)
    for number, value in values.items():
        alike[devices[number]].append(value)
    shares = {number: value / median(alike[devices[number]]) for number, value in values.items()}
    return {
        number: f"{check.sentence.format(values[number])}, {share:.0%} of the median"
        for number, share in shares.items()
        if share < (check.least_on_cpu if devices[number] == "cpu" else check.least)
    }


@dataclass(frozen=True)
class Finding:
    """One fault: where, what, and what to do. `out`: exclude the node from training."""

    host: str
    rank: int | None
    what: str
    hint: str
    out: bool

    def __str__(self) -> str:
        rank = f" (rank {self.rank})" if self.rank is not None else ""
        return f"{'OUT ' if self.out else 'odd '} {self.host}{rank}: {self.what}.\n     HINT: {self.hint}"


@dataclass(frozen=True)
class NodeReports:
    """All reports by rank, the ranks of each node, and its host name as far as known."""

    by_rank: Mapping[int, RankReport]
    nodes: Sequence[Sequence[int]]
    hosts: Sequence[str]
    stages: Mapping[int, str]
    """Rank → the stage that it did not complete."""

    def of_rank(self, rank: int, what: str, hint: str, *, out: bool) -> Finding:
        host = next(host for host, ranks in zip(self.hosts, self.nodes, strict=True) if rank in ranks)
        return Finding(host, rank, what, hint, out)

    def of_node(self, node: int, what: str, hint: str, *, out: bool) -> Finding:
        return Finding(self.hosts[node], None, what, hint, out)

    def heads(self) -> dict[int, RankReport]:
        """Node → the report of its first rank, which measures what the node's ranks share."""
        return {
            node: self.by_rank[ranks[0]] for node, ranks in enumerate(self.nodes) if ranks[0] in self.by_rank
        }


@dataclass(frozen=True)
class Diagnosis:
    verdict: str
    fit: bool
    exclude: tuple[str, ...]
    findings: tuple[Finding, ...]


def judge(reports: NodeReports, launcher: str = "torchrun") -> Diagnosis:
    parts = (_missing, _versions, _unreachable, _measured, _products, _between)
    findings = tuple(finding for part in parts for finding in part(reports))
    out, nodes = tuple(dict.fromkeys(f.host for f in findings if f.out)), len(reports.hosts)
    fit = not (out or reports.stages)
    if fit:
        verdict = f"fit to train; {counted(len(findings), 'finding')}"
    elif out and len(out) * 2 <= nodes and nodes > 1:  # of two nodes one may be excluded
        without = launcher_hints(launcher, nodes).without(out)
        return Diagnosis(
            f"{counted(len(out), 'node')} not fit, {', '.join(out)}: {without}", fit, out, findings
        )
    else:
        verdict = f"not fit to train{', and no single node is at fault' * (nodes > 1)}: see above"
    return Diagnosis(verdict, fit, (), findings)


def _missing(reports: NodeReports) -> Iterator[Finding]:
    """Ranks that did not start or end. A rank that others wait for is in a stage of its own: the rarest stage
    names it.
    """
    for node, ranks in enumerate(reports.nodes):
        if missing := [rank for rank in ranks if rank not in reports.by_rank]:
            what = f"{named_ranks(missing)} did not start"
            yield reports.of_node(node, what, "read its log; check that it reaches the first node", out=True)
    stages = list(reports.stages.values())
    for rank, stage in reports.stages.items():
        blamed = stage == min(stages, key=stages.count) and len(set(stages)) > 1
        failure = reports.by_rank[rank].get("failure")
        what = f"failed in: {stage} ({failure})" if failure else f"not done in time, still in: {stage}"
        yield reports.of_rank(rank, what, "a higher --limit-s, or exclude it", out=blamed)


def _differences(reports: Mapping[int, RankReport]) -> Iterator[Any]:
    yield from differences([RankFacts(**report["facts"]) for report in reports.values() if "facts" in report])


def _versions(reports: NodeReports) -> Iterator[Finding]:
    for difference in _differences(reports.by_rank):
        for rank, value in list(difference.others.items())[:8]:
            what = f"{difference.what} {value or 'is missing'}, where most have {difference.usual or 'none'}"
            hint = "the same environment on every node"
            yield reports.of_rank(rank, what, hint, out=difference.fatal)


def _unreachable(reports: NodeReports) -> Iterator[Finding]:
    """Of two nodes without a connection, names the one that lacks more connections."""
    broken = {
        (node, int(other)): why
        for node, report in reports.heads().items()
        for other, why in report.get("unreachable", {}).items()
    }
    while broken:
        nodes = [node for pair in broken for node in pair]
        worst = max(nodes, key=lambda node: (nodes.count(node), node))
        pairs = [pair for pair in broken if worst in pair]
        others = sorted({reports.hosts[node] for pair in pairs for node in pair if node != worst})
        what = f"no connection between it and {listed(others, 4)} ({broken[pairs[0]]})"
        yield reports.of_node(worst, what, "check firewall, route and link", out=True)
        broken = {pair: why for pair, why in broken.items() if pair not in pairs}


def can_form_group(by_rank: Mapping[int, RankReport]) -> bool:
    """Whether a process group can be formed: all connections work, and all ranks have the same torch."""
    reached = not any(report.get("unreachable") for report in by_rank.values())
    return reached and not any(difference.fatal for difference in _differences(by_rank))


def _measured(reports: NodeReports) -> Iterator[Finding]:
    for check in CHECKS:
        finding = reports.of_node if check.of_node else reports.of_rank
        for number, what in faults(check, reports.heads() if check.of_node else reports.by_rank).items():
            yield finding(number, what, check.hint, out=check.out)


def _products(reports: NodeReports) -> Iterator[Finding]:
    products = {rank: report["product"] for rank, report in reports.by_rank.items() if "product" in report}
    usual = median([value for value in products.values() if isfinite(value)] or [0.0])
    for rank, value in products.items():
        if not abs(value - usual) <= SAME_PRODUCT * abs(usual):  # true for NaN too
            what = f"computes wrong: {value:.6g} for {usual:.6g}"
            yield reports.of_rank(rank, what, "replace the device", out=True)


def _between(reports: NodeReports) -> Iterator[Finding]:
    """A node whose links are all slow is at fault; of a single slow link both ends are named."""
    rates: dict[tuple[int, ...], float] = {}
    for node, report in reports.heads().items():
        for neighbour, rate in report.get("between", {}).items():
            pair = tuple(sorted((node, int(neighbour))))
            rates[pair] = min(rate, rates.get(pair, rate))
    usual = median(rates.values()) if rates else 0.0
    slow = {pair for pair, rate in rates.items() if rate < SLOW_LINK * usual}
    for node in range(len(reports.nodes)):
        pairs = {pair for pair in rates if node in pair}
        if len(pairs) > 1 and pairs <= slow:
            best = max(rates[pair] for pair in pairs)
            what = f"{best:.3g} GB/s to both its neighbours, where {usual:.3g} is usual"
            hint = "check its network card and cable, NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            yield reports.of_node(node, what, hint, out=True)
            slow -= pairs
    for node, other in sorted(slow):
        what = f"{rates[node, other]:.3g} GB/s to {reports.hosts[other]}, where {usual:.3g} is usual"
        yield reports.of_node(node, what, "check the link between the two", out=False)


# ---------------------------------------------------------------- as text

VALUES = (
    # name of the measurement, its column, format
    ("tflops", "TFLOP/s", ".3g"),
    ("within_gb_s", "GB/s in the node", ".3g"),
    ("all_gb_s", "GB/s over all", ".3g"),
    ("write_mb_s", "write MB/s", ".0f"),
)
VERSIONS = {"device": "", "torch": "torch ", "python": "Python ", "nccl": "NCCL ", "driver": "driver "}


def text(reports: NodeReports, verdict: Diagnosis, seconds: float) -> str:
    rows = [["node", "rank", *(column for _, column, _ in VALUES)]]
    for host, ranks in zip(reports.hosts, reports.nodes, strict=True):
        for rank in ranks:
            values = reports.by_rank.get(rank, {})
            cells = [format(values[name], form) if name in values else "-" for name, _, form in VALUES]
            rows.append([host, str(rank), *cells])
    size = f"{counted(len(rows) - 1, 'rank')} on {counted(len(reports.nodes), 'node')}"
    lines = [f"{size}; checked in {seconds:.0f} s"]
    if facts := reports.by_rank.get(0, {}).get("facts"):
        versions = [f"{name}{facts[key]}" for key, name in VERSIONS.items() if facts[key]]
        lines.append(f"rank 0 has {', '.join(versions)}")
    lines += ["", *columns(rows, range(1, len(rows[0])))]
    for finding in verdict.findings:
        lines += ["", str(finding)]
    return "\n".join([*lines, "", f"verdict: {verdict.verdict}"])

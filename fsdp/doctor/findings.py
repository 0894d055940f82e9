"""Findings: judges the ranks' measurements, in pure functions.

A node is compared with the others: the median is the expected value, and the manufacturer's figure if it is
known. A node that is not fit is on the exclude list, unless most nodes would be: then no single node is at
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, TypeVar

from fsdp.base.text import counted, named_ranks
from fsdp.dist.launcher_hints import LauncherHints, launcher_hints
from fsdp.dist.preflight import RankFacts, differences

Key = TypeVar("Key")
RankReport = Mapping[str, Any]
"""One rank's measurements by stage; a stage that it did not reach is missing."""

SLOW_CUDA, SLOW_CPU = 0.85, 0.6
"""Least share of the median: GPUs of one kind differ by few per cent, processes that share a CPU by more."""
OF_PEAK = 0.55
"""Least share of the manufacturer's figure for dense products; 0.6 to 0.8 is usual for 8192 × 8192."""
LINK, DISK = 0.5, 0.25
SAME_PRODUCT = 1e-3
CLOCK_S = 1.0
FREE = 0.9
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One fault: where, what, and what to do. `out`: exclude the node from training."""

    host: str
    rank: int | None
    what: str
    hint: str
    out: bool

    @property
    def where(self) -> str:
        return self.host + (f" (rank {self.rank})" if self.rank is not None else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. HINT: {self.hint}"


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    exclude: tuple[str, ...]
    complete: bool
    nodes: int
    hints: LauncherHints = LauncherHints()

    @property
    def fit(self) -> bool:
        return self.complete and not any(finding.out for finding in self.findings)

    @property
    def way_out(self) -> str:
        """What leaves these nodes out under this launcher; empty if no node is at fault."""
        return self.hints.without(self.exclude) if self.exclude and not self.fit else ""

    def __str__(self) -> str:
        if self.fit:
            odd = f"; {counted(len(self.findings), 'finding')} above" if self.findings else ""
            return f"fit to train{odd}."
        if self.exclude:
            count = len(self.exclude)
            which = "" if self.hints.is_slurm else f", {', '.join(self.exclude)}"
            return f"{count} node{'s are' if count > 1 else ' is'} not fit{which}: {self.way_out}"
        return f"not fit to train{', and no single node is at fault' * (self.nodes > 1)}: see above."


@dataclass(frozen=True)
class NodeReports:
    """All reports by rank, the ranks of each node, and its host name as far as known."""

    by_rank: Mapping[int, RankReport]
    nodes: Sequence[Sequence[int]]
    hosts: Sequence[str]
    stages: Mapping[int, str]
    """Rank → the stage that it did not complete."""

    def host(self, rank: int) -> str:
        return self.hosts[next(n for n, ranks in enumerate(self.nodes) if rank in ranks)]

    def of_node(self, node: int, what: str, hint: str, *, out: bool) -> Finding:
        return Finding(self.hosts[node], None, what, hint, out)

    def of_rank(self, rank: int, what: str, hint: str, *, out: bool) -> Finding:
        return Finding(self.host(rank), rank, what, hint, out)

    def heads(self) -> Iterator[tuple[int, RankReport]]:
        """Node → the report of its first rank, which measures what the node's ranks share."""
        return (
            (node, self.by_rank[ranks[0]])
            for node, ranks in enumerate(self.nodes)
            if ranks[0] in self.by_rank
        )


def judge(reports: NodeReports, launcher: str = "torchrun") -> Diagnosis:
    checks: Sequence[Callable[[NodeReports], Iterator[Finding]]] = (
        _absent,
        _unfinished,
        _programs,
        _names,
        _ports,
        _devices,
        _memory,
        _within,
        _between,
        _transport,
        _storage,
        _disks,
        _clocks,
    )
    findings = [finding for check in checks for finding in check(reports)]
    out = list(dict.fromkeys(finding.host for finding in findings if finding.out))
    # Of two nodes one may be excluded. A single node may not.
    few = len(out) * 2 <= len(reports.hosts) and len(reports.hosts) > 1
    complete = (
        all(rank in reports.by_rank for ranks in reports.nodes for rank in ranks) and not reports.stages
    )
    nodes = len(reports.hosts)
    hints = launcher_hints(launcher, nodes)
    return Diagnosis(tuple(findings), tuple(out) if few else (), complete, nodes, hints)


# ---------------------------------------------------------------- missing ranks


def _absent(reports: NodeReports) -> Iterator[Finding]:
    for node, ranks in enumerate(reports.nodes):
        missing = [rank for rank in ranks if rank not in reports.by_rank]
        if missing:
            some = f"{named_ranks(missing)} did not start"
            what = "none of its ranks started" if len(missing) == len(ranks) else some
            yield reports.of_node(node, what, "read its log; check that it reaches the first node", out=True)


def _unfinished(reports: NodeReports) -> Iterator[Finding]:
    """The rank that others wait for is in a stage of its own: the rarest stage names it."""
    if not reports.stages:
        return
    stages = list(reports.stages.values())
    rarest = min(stages, key=stages.count)
    for rank, stage in reports.stages.items():
        blamed = stage == rarest and len(set(stages)) > 1
        failure = reports.by_rank.get(rank, {}).get("failure")
        what = f"failed in: {stage} ({failure})" if failure else f"not done in time, still in: {stage}"
        yield reports.of_rank(rank, what, "a higher --limit-s, or exclude it", out=blamed)


def _programs(reports: NodeReports) -> Iterator[Finding]:
    everyone = [RankFacts(**report["facts"]) for report in reports.by_rank.values() if "facts" in report]
    for one in differences(everyone):
        for rank, value in list(one.others.items())[:8]:
            what = f"{one.what} {value or 'is missing'}, where most have {one.usual or 'none'}"
            yield reports.of_rank(rank, what, "the same environment on every node", out=one.fatal)


# ---------------------------------------------------------------- network


def _names(reports: NodeReports) -> Iterator[Finding]:
    for node, report in reports.heads():
        names = report.get("network", {})
        if names and not names["host_resolves"] and len(reports.nodes) > 1:
            hint = "add it to DNS or /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE"
            yield reports.of_node(
                node, f"its own name {names['host']} does not resolve", hint, out=not names["interface"]
            )


def _ports(reports: NodeReports) -> Iterator[Finding]:
    """Of two nodes without a connection, names the one that lacks more connections."""
    broken: dict[tuple[int, int], str] = {}
    for node, report in reports.heads():
        for other, why in report.get("ports", {}).items():
            if why:
                broken[(node, int(other))] = why
    while broken:
        count = [sum(node in pair for pair in broken) for node in range(len(reports.nodes))]
        worst = max(range(len(count)), key=lambda node: (count[node], node))
        own = {pair: why for pair, why in broken.items() if worst in pair}
        others = sorted({reports.hosts[node] for pair in own for node in pair if node != worst})
        what = f"no connection between it and {', '.join(others[:4])} ({next(iter(own.values()))})"
        yield reports.of_node(worst, what, "check firewall, route and link", out=True)
        broken = {pair: why for pair, why in broken.items() if pair not in own}


def can_form_group(by_rank: Mapping[int, RankReport]) -> bool:
    """Whether a process group can be formed: all connections work, and all ranks have the same torch."""
    everyone = [RankFacts(**report["facts"]) for report in by_rank.values()]
    reached = not any(why for report in by_rank.values() for why in report.get("ports", {}).values())
    return reached and not any(one.fatal for one in differences(everyone))


# ---------------------------------------------------------------- devices


def _below(share: float, rates: Mapping[Key, float]) -> Iterator[tuple[Key, float, float]]:
    """Key, rate and median of each that reaches less than this share of the median."""
    usual = median(rates.values()) if rates else 0.0
    yield from ((key, rate, usual) for key, rate in rates.items() if rate < share * usual)


def slow_device(kind: str) -> float:
    """The least share of the median for a device of this kind."""
    return SLOW_CPU if kind == "cpu" else SLOW_CUDA


def slow_ranks(by_rank: Mapping[int, RankReport]) -> dict[int, float]:
    """Rank → its share of the median among devices of its kind, if that is too low."""
    found = {}
    by_kind: dict[str, dict[int, float]] = {}
    for rank, report in by_rank.items():
        if "device" in report:
            by_kind.setdefault(report["facts"]["device"], {})[rank] = report["device"]["tflops"]
    for kind, rates in by_kind.items():
        found.update({rank: rate / usual for rank, rate, usual in _below(slow_device(kind), rates)})
    return found


def _devices(reports: NodeReports) -> Iterator[Finding]:
    seen = {rank: report for rank, report in reports.by_rank.items() if "device" in report}
    slow = slow_ranks(seen)
    for rank, share in slow.items():
        what = f"matrix product at {seen[rank]['device']['tflops']:.3g} TFLOP/s, {share:.0%} of the median"
        yield reports.of_rank(rank, what, "check for another job on it, its clocks, its cooling", out=True)
    products = {rank: report["device"]["product"] for rank, report in seen.items()}
    usual = median([value for value in products.values() if isfinite(value)] or [0.0])
    for rank, value in products.items():
        if not abs(value - usual) <= SAME_PRODUCT * abs(usual):  # true for NaN too
            yield reports.of_rank(
                rank, f"computes wrong: {value:.6g} for {usual:.6g}", "replace the device", out=True
            )
    for rank, report in seen.items():
        for complaint in report["device"]["health"]:
            yield reports.of_rank(rank, complaint, "drain the node and reset the device", out=True)
        peak = report["device"]["peak_tflops"]
        if peak and report["device"]["tflops"] < OF_PEAK * peak and rank not in slow:
            rate = f"{report['device']['tflops']:.0f} of the {peak:.0f} TFLOP/s"
            what = f"matrix product at {rate} that the manufacturer specifies"
            yield reports.of_rank(
                rank, what, "check its power limit and clocks, and for another job on it", out=False
            )


def _memory(reports: NodeReports) -> Iterator[Finding]:
    for rank, report in reports.by_rank.items():
        about = report.get("device")
        if (
            about
            and report["facts"]["device"] != "cpu"
            and about["memory_free"] < FREE * about["memory_total"]
        ):
            used = (about["memory_total"] - about["memory_free"]) / GIB
            what = f"{used:.1f} of {about['memory_total'] / GIB:.0f} GiB of its device are in use"
            yield reports.of_rank(rank, what, "nvidia-smi on that node shows by which process", out=True)


# ---------------------------------------------------------------- links


def link_rate(link: Mapping[str, float]) -> float:
    """The slower of the two collectives."""
    return min(link["gather_gb_s"], link["scatter_gb_s"])


def rates_between(reports: NodeReports) -> dict[tuple[int, int], float]:
    """Two nodes → the rate of their link; of one that both measured, the lower."""
    rates: dict[tuple[int, int], float] = {}
    for node, report in reports.heads():
        for other, link in report.get("links", {}).get("between", {}).items():
            pair = (min(node, int(other)), max(node, int(other)))
            rates[pair] = min(rates.get(pair, float("inf")), link_rate(link))
    return rates


def _within(reports: NodeReports) -> Iterator[Finding]:
    rates = {
        node: link_rate(report["links"]["within"])
        for node, report in reports.heads()
        if "within" in report.get("links", {})
    }
    for node, rate, usual in _below(LINK, rates):
        what = f"{rate:.3g} GB/s within the node, {rate / usual:.0%} of the median"
        yield reports.of_node(
            node, what, "NVLink or PCIe may be down: NCCL_DEBUG=INFO shows the path", out=True
        )


def _between(reports: NodeReports) -> Iterator[Finding]:
    """A node whose links are all slow is at fault; a single slow link is reported with both ends."""
    rates = rates_between(reports)
    usual = median(rates.values()) if rates else 0.0
    slow = {pair for pair, _, _ in _below(LINK, rates)}
    for node in range(len(reports.nodes)):
        own = [pair for pair in rates if node in pair]
        if slow and len(own) > 1 and all(pair in slow for pair in own):
            best = max(rates[pair] for pair in own)
            what = f"{best:.3g} GB/s to both its neighbours, where {usual:.3g} is usual"
            hint = "check its network card and cable, NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            yield reports.of_node(node, what, hint, out=True)
            slow -= set(own)
    for one, other in sorted(slow):
        what = f"{rates[(one, other)]:.3g} GB/s to {reports.hosts[other]}, where {usual:.3g} is usual"
        yield reports.of_node(one, what, "check the link between the two", out=False)


def _transport(reports: NodeReports) -> Iterator[Finding]:
    """NCCL's own choice of links, once for nodes that have the same."""
    seen: set[str] = set()
    for node, report in reports.heads():
        for one in report.get("transport", {}).get("verdicts", ()):
            if one["hint"] and one["what"] not in seen:
                seen.add(one["what"])
                yield reports.of_node(node, one["what"], one["hint"], out=False)


# ---------------------------------------------------------------- storage and clocks


def _storage(reports: NodeReports) -> Iterator[Finding]:
    heads = {node: report["storage"] for node, report in reports.heads() if "storage" in report}
    blind = {node: about["unseen"] for node, about in heads.items() if about.get("unseen")}
    for node, about in heads.items():
        if "error" in about:
            yield reports.of_node(
                node, f"{about['folder']} {about['error']}", "--dir FOLDER on shared storage", out=True
            )
    # The first node writes as a run does: a node that does not see its file does not share the folder.
    for node, others in blind.items():
        if 0 in others and node:
            names = ", ".join(reports.hosts[other] for other in others[:4])
            what = f"does not see what {names} wrote into {heads[node]['folder']}"
            yield reports.of_node(
                node, what, "mount the shared storage there, or --dir FOLDER that is shared", out=True
            )


def _disks(reports: NodeReports) -> Iterator[Finding]:
    for name, verb in (("write_mb_s", "writes"), ("read_mb_s", "reads")):
        rates = {
            node: report["storage"][name]
            for node, report in reports.heads()
            if name in report.get("storage", {})
        }
        for node, rate, usual in _below(DISK, rates):
            what = f"{verb} {rate:.0f} MB/s, where {usual:.0f} is usual"
            yield reports.of_node(node, what, "check its mount and its network to the storage", out=False)


def _clocks(reports: NodeReports) -> Iterator[Finding]:
    for node, report in reports.heads():
        offset = report.get("links", {}).get("clock_s", 0.0)
        if abs(offset) > CLOCK_S:
            side = "ahead of" if offset > 0 else "behind"
            what = f"its clock is {abs(offset):.1f} s {side} the first node's"
            yield reports.of_node(node, what, "chronyc tracking, or timedatectl, on that node", out=False)

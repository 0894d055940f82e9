"""Findings: holds the ranks' measurements against tables of checks, in pure functions; the result as text.

A rank or node is compared with the others: the median is the expected value. A node that is not fit is on the
exclude list, unless most nodes would be: then no single node is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from fsdp.base.text import columns, counted, listed, named_ranks
from fsdp.dist.env import LauncherHints, launcher_hints
from fsdp.dist.preflight import RankFacts, differences

RankReport = Mapping[str, Any]
"""One rank's measurements by name; one of a check that it did not reach is missing."""

OF_PEAK = 0.55
"""Least share of the manufacturer's figure for dense products; 0.6 to 0.8 is usual for 8192 × 8192."""
SLOW_LINK = 0.5
SAME_PRODUCT = 1e-3
FREE_MEMORY = 0.9


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

    def finding(self, what: str, hint: str, *, out: bool, node: int = -1, rank: int | None = None) -> Finding:
        """Of a node, or of a rank and so of its node."""
        if rank is not None:
            node = next(node for node, ranks in enumerate(self.nodes) if rank in ranks)
        return Finding(self.hosts[node], rank, what, hint, out)

    def heads(self) -> dict[int, RankReport]:
        """Node → the report of its first rank, which measures what the node's ranks share."""
        return {
            node: self.by_rank[ranks[0]] for node, ranks in enumerate(self.nodes) if ranks[0] in self.by_rank
        }

    def links(self) -> dict[tuple[int, int], Mapping[str, float]]:
        """Two nodes → their link; of one that both measured, the slower."""
        links: dict[tuple[int, int], Mapping[str, float]] = {}
        for node, report in self.heads().items():
            for neighbour, link in report.get("between", {}).items():
                pair = (min(node, int(neighbour)), max(node, int(neighbour)))
                links[pair] = min(link, links.get(pair, link), key=link_rate)
        return links


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

    def __str__(self) -> str:
        if self.fit:
            odd = f"; {counted(len(self.findings), 'finding')} above" if self.findings else ""
            return f"fit to train{odd}."
        if self.exclude:
            count = len(self.exclude)
            names = "" if self.hints.is_slurm else f", {', '.join(self.exclude)}"
            without = self.hints.without(self.exclude)
            return f"{count} node{'s are' if count > 1 else ' is'} not fit{names}: {without}"
        return f"not fit to train{', and no single node is at fault' * (self.nodes > 1)}: see above."


def judge(reports: NodeReports, launcher: str = "torchrun") -> Diagnosis:
    findings = tuple(finding for check in CHECKS for finding in check(reports))
    out = tuple(dict.fromkeys(finding.host for finding in findings if finding.out))
    nodes = len(reports.hosts)
    # Of two nodes one may be excluded. A single node may not.
    few = len(out) * 2 <= nodes and nodes > 1
    complete = not reports.stages and all(
        rank in reports.by_rank for ranks in reports.nodes for rank in ranks
    )
    return Diagnosis(findings, out if few else (), complete, nodes, launcher_hints(launcher, nodes))


# ---------------------------------------------------------------- what a rank or node measured, by itself


def _in_use(report: RankReport) -> str:
    if report.get("device") != "cuda" or report["memory_free_gib"] >= FREE_MEMORY * report["memory_gib"]:
        return ""
    used = report["memory_gib"] - report["memory_free_gib"]
    return f"{used:.1f} of {report['memory_gib']:.0f} GiB of its device are in use"


def _below_peak(report: RankReport) -> str:
    rate, peak = report.get("tflops", 0.0), report.get("peak_tflops", 0.0)
    text = f"matrix product at {rate:.0f} of the {peak:.0f} TFLOP/s that the manufacturer specifies"
    return text * (rate < OF_PEAK * peak)


class FaultCheck(NamedTuple):
    """A check of one report: what is wrong with it, or an empty text."""

    what: Callable[[RankReport], str]
    hint: str
    out: bool
    of_node: bool


FAULTS = (
    FaultCheck(lambda report: report.get("unnamed", ""),
          "add it to DNS or /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE", True, True),
    FaultCheck(lambda report: report.get("health", ""), "drain the node and reset the device", True, False),
    FaultCheck(_in_use, "nvidia-smi on that node shows by which process", True, False),
    FaultCheck(_below_peak, "check its power limit and clocks, and for another job on it", False, False),
    FaultCheck(lambda report: report.get("storage_error", ""), "--dir FOLDER on shared storage", True, True),
    FaultCheck(lambda report: report.get("unseen", ""),
          "mount the shared storage there, or --dir FOLDER that is shared", True, True),
)  # fmt: skip


def _faults(reports: NodeReports) -> Iterator[Finding]:
    for fault in FAULTS:
        for number, report in (reports.heads() if fault.of_node else reports.by_rank).items():
            if what := fault.what(report):
                subject = {"node" if fault.of_node else "rank": number}
                yield reports.finding(what, fault.hint, out=fault.out, **subject)


# ---------------------------------------------------------------- compared with the others


class RateCheck(NamedTuple):
    """A rate that may not be less than a share of the median, of ranks with a device alike or of nodes."""

    name: str
    what: str
    least: Mapping[str, float]
    """By the type of device."""
    hint: str
    out: bool
    of_node: bool


NOT_FAST = "check its mount and its network to the storage"
RATES = (
    # GPUs of one kind differ by few per cent, processes that share a CPU by more
    RateCheck("tflops", "matrix product at {:.3g} TFLOP/s", {"cuda": 0.85, "cpu": 0.6},
              "check for another job on it, its clocks, its cooling", True, False),
    RateCheck("within_gb_s", "{:.3g} GB/s within the node", {"cuda": 0.5, "cpu": 0.5},
              "NVLink or PCIe may be down: NCCL_DEBUG=INFO shows the path", True, True),
    RateCheck("write_mb_s", "writes {:.0f} MB/s", {"cuda": 0.25, "cpu": 0.25}, NOT_FAST, False, True),
    RateCheck("read_mb_s", "reads {:.0f} MB/s", {"cuda": 0.25, "cpu": 0.25}, NOT_FAST, False, True),
)  # fmt: skip
PRODUCT = RATES[0]


def slow(rate: RateCheck, reports: Mapping[int, RankReport]) -> dict[int, str]:
    """Rank or node → what is slow about it."""
    alike: dict[str, dict[int, float]] = {}
    for number, report in reports.items():
        if rate.name in report:
            kind = "" if rate.of_node else report["facts"]["device"]
            alike.setdefault(kind, {})[number] = report[rate.name]
    return {
        number: f"{rate.what.format(value)}, {value / median(values.values()):.0%} of the median"
        for values in alike.values()
        for number, value in values.items()
        if value < rate.least[reports[number]["device"]] * median(values.values())
    }


def _rates(reports: NodeReports) -> Iterator[Finding]:
    for rate in RATES:
        for number, what in slow(rate, reports.heads() if rate.of_node else reports.by_rank).items():
            subject = {"node" if rate.of_node else "rank": number}
            yield reports.finding(what, rate.hint, out=rate.out, **subject)


def _products(reports: NodeReports) -> Iterator[Finding]:
    products = {rank: report["product"] for rank, report in reports.by_rank.items() if "product" in report}
    usual = median([value for value in products.values() if isfinite(value)] or [0.0])
    for rank, value in products.items():
        if not abs(value - usual) <= SAME_PRODUCT * abs(usual):  # true for NaN too
            what = f"computes wrong: {value:.6g} for {usual:.6g}"
            yield reports.finding(what, "replace the device", out=True, rank=rank)


def _versions(reports: NodeReports) -> Iterator[Finding]:
    facts = [RankFacts(**report["facts"]) for report in reports.by_rank.values() if "facts" in report]
    for difference in differences(facts):
        for rank, value in list(difference.others.items())[:8]:
            what = f"{difference.what} {value or 'is missing'}, where most have {difference.usual or 'none'}"
            hint = "the same environment on every node"
            yield reports.finding(what, hint, out=difference.fatal, rank=rank)


# ---------------------------------------------------------------- ranks that are missing, links


def _missing(reports: NodeReports) -> Iterator[Finding]:
    """Ranks that did not start or end. A rank that others wait for is in a stage of its own: the rarest stage
    names it.
    """
    for node, ranks in enumerate(reports.nodes):
        if missing := [rank for rank in ranks if rank not in reports.by_rank]:
            names = "none of its ranks" if len(missing) == len(ranks) else named_ranks(missing)
            hint = "read its log; check that it reaches the first node"
            yield reports.finding(f"{names} did not start", hint, out=True, node=node)
    stages = list(reports.stages.values())
    for rank, stage in reports.stages.items():
        blamed = stage == min(stages, key=stages.count) and len(set(stages)) > 1
        failure = reports.by_rank[rank].get("failure")
        what = f"failed in: {stage} ({failure})" if failure else f"not done in time, still in: {stage}"
        yield reports.finding(what, "a higher --limit-s, or exclude it", out=blamed, rank=rank)


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
        yield reports.finding(what, "check firewall, route and link", out=True, node=worst)
        broken = {pair: why for pair, why in broken.items() if pair not in pairs}


def can_form_group(by_rank: Mapping[int, RankReport]) -> bool:
    """Whether a process group can be formed: all connections work, and all ranks have the same torch."""
    reached = not any(report.get("unreachable") for report in by_rank.values())
    facts = [RankFacts(**report["facts"]) for report in by_rank.values()]
    return reached and not any(difference.fatal for difference in differences(facts))


def link_rate(link: Mapping[str, float]) -> float:
    """The slower of the two collectives."""
    return min(link["gather_gb_s"], link["scatter_gb_s"])


def _between(reports: NodeReports) -> Iterator[Finding]:
    """A node whose links are all slow is at fault; of a single slow link both ends are named."""
    rates = {pair: link_rate(link) for pair, link in reports.links().items()}
    usual = median(rates.values()) if rates else 0.0
    slow_pairs = {pair for pair, rate in rates.items() if rate < SLOW_LINK * usual}
    for node in range(len(reports.nodes)):
        pairs = {pair for pair in rates if node in pair}
        if len(pairs) > 1 and pairs <= slow_pairs:
            best = max(rates[pair] for pair in pairs)
            what = f"{best:.3g} GB/s to both its neighbours, where {usual:.3g} is usual"
            hint = "check its network card and cable, NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            yield reports.finding(what, hint, out=True, node=node)
            slow_pairs -= pairs
    for node, other in sorted(slow_pairs):
        what = f"{rates[node, other]:.3g} GB/s to {reports.hosts[other]}, where {usual:.3g} is usual"
        yield reports.finding(what, "check the link between the two", out=False, node=node)


def _transport(reports: NodeReports) -> Iterator[Finding]:
    """NCCL's own choice of links, once for nodes that have the same."""
    named: set[str] = set()
    for node, report in reports.heads().items():
        for what, hint in report.get("transport", {}).get("verdicts", ()):
            if hint and what not in named:
                named.add(what)
                yield reports.finding(what, hint, out=False, node=node)


CHECKS = (_missing, _versions, _unreachable, _faults, _rates, _products, _between, _transport)


# ---------------------------------------------------------------- as text


LINKS = (
    ("gather_gb_s", "gather GB/s", ".3g"),
    ("scatter_gb_s", "scatter GB/s", ".3g"),
    ("small_us", "small µs", ".0f"),
)
VALUES = (
    # name of the measurement, its column, format
    ("tflops", "TFLOP/s", ".3g"),
    ("memory_free_gib", "free GiB", ".1f"),
    *LINKS,
    ("write_mb_s", "write MB/s", ".0f"),
    ("read_mb_s", "read MB/s", ".0f"),
)


def text(reports: NodeReports, verdict: Diagnosis, seconds: float) -> str:
    members = [
        (host, rank) for host, ranks in zip(reports.hosts, reports.nodes, strict=True) for rank in ranks
    ]
    size = f"{counted(len(members), 'rank')} on {counted(len(reports.nodes), 'node')}"
    parts = [f"{size}; checked in {seconds:.0f} s"]
    facts = {rank: report["facts"] for rank, report in reports.by_rank.items() if "facts" in report}
    for rank, fact in sorted(facts.items())[:1]:
        names = {"device": "", "torch": "torch ", "python": "Python ", "nccl": "NCCL ", "driver": "driver "}
        versions = [f"{name}{fact[key]}" for key, name in names.items() if fact[key]]
        parts.append(f"rank {rank} has {', '.join(versions)}")
    rows = [[host, str(rank), *_cells(reports.by_rank.get(rank, {}), VALUES)] for host, rank in members]
    parts += ["", *columns([["node", "rank", *(column for _, column, _ in VALUES)], *rows], range(1, 9))]
    first = reports.by_rank.get(0, {})
    links = {
        f"{reports.hosts[node]} – {reports.hosts[other]}": link
        for (node, other), link in sorted(reports.links().items())
    } | ({"over all ranks": first["all"]} if "all" in first else {})
    if links:
        rows = [[name, *_cells(link, LINKS)] for name, link in links.items()]
        parts += ["", *columns([["link", *(column for _, column, _ in LINKS)], *rows], range(1, 4))]
    if "transport" in first:
        parts.append(f"rank 0: {first['transport']['summary']}")
    for finding in verdict.findings:
        parts += ["", str(finding)]
    return "\n".join([*parts, "", f"verdict: {verdict}"])


def _cells(values: Mapping[str, Any], names: Sequence[tuple[str, str, str]]) -> list[str]:
    return [format(values[name], form) if name in values else "-" for name, _, form in names]

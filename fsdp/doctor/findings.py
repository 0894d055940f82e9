"""Findings: holds the ranks' measurements against a table of checks, in pure functions; the result as text.

A rank or node is compared with the others: the median is the expected value. A node that is not fit is on the
exclude list, unless most nodes would be: then no single node is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from fsdp.base.text import columns, counted, listed, named_ranks
from fsdp.dist.env import launcher_hints
from fsdp.dist.preflight import RankFacts, differences

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

"""The measurements and findings as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp.base.text import columns, counted
from fsdp.doctor.findings import GIB, Diagnosis, NodeReports, RankReport

MOST_ROWS = 40
"""Above this many ranks a node has one row: its slowest rank."""
HEADS = ("node", "rank", "device", "TFLOP/s", "free", "gather", "scatter", "small", "write", "read", "clock")
UNITS = ("", "", "", "", "GiB", "GB/s", "GB/s", "µs", "MB/s", "MB/s", "ms")
DEVICE = HEADS.index("device")
LINK_HEADS = ("link", "gather GB/s", "scatter GB/s", "small µs")


def rows(reports: NodeReports) -> list[list[str]]:
    ranks = sum(len(ranks) for ranks in reports.nodes)
    found = []
    for node, members in enumerate(reports.nodes):
        present = [rank for rank in members if rank in reports.by_rank]
        if not present:
            found.append([reports.hosts[node], "", "not started", *[""] * (len(HEADS) - 3)])
        elif ranks > MOST_ROWS:
            slowest = min(
                present, key=lambda rank: reports.by_rank[rank].get("device", {}).get("tflops", 0.0)
            )
            found.append(
                _row(
                    reports.hosts[node], f"{slowest}*", reports.by_rank[slowest], reports.by_rank[present[0]]
                )
            )
        else:
            found += [
                _row(reports.hosts[node], str(rank), reports.by_rank[rank], reports.by_rank[present[0]])
                for rank in present
            ]
    return found


def _row(host: str, rank: str, report: RankReport, head: RankReport) -> list[str]:
    device, links, storage = report.get("device"), report.get("links", {}), head.get("storage", {})
    within = links.get("within") or links.get("all")
    return [
        host,
        rank,
        _device(report),
        f"{device['tflops']:.3g}" if device else "",
        f"{device['memory_free'] / GIB:.1f}" if device else "",
        *([f"{within[name]:.3g}" for name in ("gather_gb_s", "scatter_gb_s")] if within else ["", ""]),
        f"{within['latency_us']:.0f}" if within else "",
        *[f"{storage[name]:.0f}" if name in storage else "" for name in ("write_mb_s", "read_mb_s")],
        f"{links['clock_s'] * 1e3:+.0f}" if "clock_s" in links else "",
    ]


def _device(report: RankReport) -> str:
    """Empty of a rank that failed before its first measurement, as one whose GPU does not answer."""
    return str(report["facts"]["device"]).removeprefix("NVIDIA ") if "facts" in report else ""


def the_device(reports: NodeReports) -> str:
    """The device that all ranks have; empty if they differ, or some did not start."""
    ranks = sum(len(ranks) for ranks in reports.nodes)
    kinds = {_device(report) for report in reports.by_rank.values()}
    return kinds.pop() if len(kinds) == 1 and len(reports.by_rank) == ranks else ""


def links(reports: NodeReports) -> list[list[str]]:
    """Between neighbouring nodes, and over all ranks."""
    found = []
    for node, report in reports.heads():
        seen = report.get("links", {})
        for other, link in seen.get("between", {}).items():
            if int(other) > node or len(reports.nodes) == 2:
                found.append([f"{reports.hosts[node]} – {reports.hosts[int(other)]}", *_link(link)])
        if node == 0 and "all" in seen:
            found.append(["over all ranks", *_link(seen["all"])])
    return found if len(reports.nodes) != 2 else found[1:]


def _link(link: RankReport) -> list[str]:
    return [f"{link['gather_gb_s']:.3g}", f"{link['scatter_gb_s']:.3g}", f"{link['latency_us']:.0f}"]


def about(reports: NodeReports) -> str:
    known = {rank: report["facts"] for rank, report in reports.by_rank.items() if "facts" in report}
    if not known:
        return "no rank started"
    rank, facts = min(known.items())
    versions = [f"torch {facts['torch']}", f"Python {facts['python']}"]
    versions += [
        f"{name} {facts[key]}" for name, key in (("NCCL", "nccl"), ("driver", "driver")) if facts[key]
    ]
    return f"rank {rank} has {', '.join(versions)}"


def size(reports: NodeReports, seconds: float) -> str:
    ranks, nodes = sum(len(ranks) for ranks in reports.nodes), len(reports.nodes)
    device = f", {the_device(reports)}" if the_device(reports) else ""
    return f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}{device}; checked in {seconds:.0f} s"


def text(reports: NodeReports, verdict: Diagnosis, seconds: float) -> str:
    """80 columns wide if host names are short: a device that all ranks have is above the table."""
    shown = rows(reports)
    if the_device(reports):
        shown = [[*row[:DEVICE], "", *row[DEVICE + 1 :]] for row in shown]
    parts = [size(reports, seconds), about(reports), "", _columns([HEADS, UNITS, *shown])]
    if transport := reports.by_rank.get(0, {}).get("transport"):
        parts.append(f"rank 0: {transport['summary']}")
    if any(row[1].endswith("*") for row in shown):
        parts.append("* the slowest rank of its node")
    if pairs := links(reports):
        parts += ["", _columns([LINK_HEADS, *pairs])]
    for finding in verdict.findings:
        parts += [
            "",
            f"{'OUT ' if finding.out else 'odd '} {finding.where}: {finding.what}.",
            f"     HINT: {finding.hint}",
        ]
    return "\n".join([*parts, "", f"verdict: {verdict}"])


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Text is aligned left, numbers right; an empty column is left out."""
    body = lines[2:] if lines[0] == HEADS else lines[1:]
    kept = [at for at in range(len(lines[0])) if any(row[at] for row in body)]
    right = [nth for nth, at in enumerate(kept) if lines[0][at] not in ("node", "device", "link")]
    return "\n".join(columns([[row[at] for at in kept] for row in lines], right))

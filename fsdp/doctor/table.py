"""What the ranks saw as a table: in a terminal or a log, and as an HTML file."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fsdp.base.html import chip, document, joined, paragraph, render, section
from fsdp.base.html import table as html_table
from fsdp.doctor.findings import GIB, Diagnosis, Finding, Look, NodeReports

MOST_ROWS = 40
"""Above so many ranks a node has one row: its slowest rank."""
HEADS = ("node", "rank", "device", "TFLOP/s", "free", "gather", "scatter", "small", "write", "read", "clock")
UNITS = ("", "", "", "", "GiB", "GB/s", "GB/s", "µs", "MB/s", "MB/s", "ms")
DEVICE = HEADS.index("device")
LINK_HEADS = ("link", "gather GB/s", "scatter GB/s", "small µs")


def rows(scene: NodeReports) -> list[list[str]]:
    ranks = sum(len(ranks) for ranks in scene.nodes)
    found = []
    for node, members in enumerate(scene.nodes):
        present = [rank for rank in members if rank in scene.looks]
        if not present:
            found.append([scene.hosts[node], "", "never came", *[""] * (len(HEADS) - 3)])
        elif ranks > MOST_ROWS:
            slowest = min(present, key=lambda rank: scene.looks[rank].get("device", {}).get("tflops", 0.0))
            found.append(
                _row(scene.hosts[node], f"{slowest}*", scene.looks[slowest], scene.looks[present[0]])
            )
        else:
            found += [
                _row(scene.hosts[node], str(rank), scene.looks[rank], scene.looks[members[0]])
                for rank in present
            ]
    return found


def _row(host: str, rank: str, look: Look, head: Look) -> list[str]:
    device, links, storage = look.get("device"), look.get("links", {}), head.get("storage", {})
    within = links.get("within") or links.get("all")
    return [
        host,
        rank,
        _device(look),
        f"{device['tflops']:.3g}" if device else "",
        f"{device['memory_free'] / GIB:.1f}" if device else "",
        *([f"{within[name]:.3g}" for name in ("gather_gb_s", "scatter_gb_s")] if within else ["", ""]),
        f"{within['latency_us']:.0f}" if within else "",
        *[f"{storage[name]:.0f}" if name in storage else "" for name in ("write_mb_s", "read_mb_s")],
        f"{links['clock_s'] * 1e3:+.0f}" if "clock_s" in links else "",
    ]


def _device(look: Look) -> str:
    return str(look["facts"]["device"]).removeprefix("NVIDIA ")


def the_device(scene: NodeReports) -> str:
    """What all ranks have; empty where they differ, or some never came."""
    ranks = sum(len(ranks) for ranks in scene.nodes)
    kinds = {_device(look) for look in scene.looks.values()}
    return kinds.pop() if len(kinds) == 1 and len(scene.looks) == ranks else ""


def links(scene: NodeReports) -> list[list[str]]:
    """Between neighbouring nodes, and over all ranks."""
    found = []
    for node, look in scene.heads():
        seen = look.get("links", {})
        for other, link in seen.get("between", {}).items():
            if int(other) > node or len(scene.nodes) == 2:
                found.append([f"{scene.hosts[node]} – {scene.hosts[int(other)]}", *_link(link)])
        if node == 0 and "all" in seen:
            found.append(["over all ranks", *_link(seen["all"])])
    return found if len(scene.nodes) != 2 else found[1:]


def _link(link: Look) -> list[str]:
    return [f"{link['gather_gb_s']:.3g}", f"{link['scatter_gb_s']:.3g}", f"{link['latency_us']:.0f}"]


def about(scene: NodeReports) -> str:
    look = scene.looks.get(0) or next(iter(scene.looks.values()), None)
    if look is None:
        return "nobody came"
    facts = look["facts"]
    words = [f"torch {facts['torch']}", f"Python {facts['python']}"]
    words += [f"{name} {facts[key]}" for name, key in (("NCCL", "nccl"), ("driver", "driver")) if facts[key]]
    return f"rank 0 has {', '.join(words)}"


def size(scene: NodeReports, seconds: float) -> str:
    ranks, nodes = sum(len(ranks) for ranks in scene.nodes), len(scene.nodes)
    device = f", {the_device(scene)}" if the_device(scene) else ""
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}{device}; looked at in {seconds:.0f} s"


# ---------------------------------------------------------------- as text


def text(scene: NodeReports, verdict: Diagnosis, seconds: float) -> str:
    """Within 80 columns where hosts' names are short: a device that all have stands above the table and not
    in it.
    """
    shown = rows(scene)
    if the_device(scene):
        shown = [[*row[:DEVICE], "", *row[DEVICE + 1 :]] for row in shown]
    parts = [size(scene, seconds), about(scene), "", _columns([HEADS, UNITS, *shown])]
    if any(row[1].endswith("*") for row in shown):
        parts.append("* the slowest rank of its node")
    if pairs := links(scene):
        parts += ["", _columns([LINK_HEADS, *pairs])]
    for finding in verdict.findings:
        parts += [
            "",
            f"{'OUT ' if finding.out else 'odd '} {finding.where}: {finding.what}.",
            f"     HINT: {finding.hint}",
        ]
    return "\n".join([*parts, "", f"verdict: {verdict}"])


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Words stand left, numbers right; a column without a value is left out."""
    body = lines[2:] if lines[0] == HEADS else lines[1:]
    kept = [at for at in range(len(lines[0])) if any(row[at] for row in body)]
    widths = {at: max(len(row[at]) for row in lines) for at in kept}
    left = {at for at in kept if lines[0][at] in ("node", "device", "link")}
    return "\n".join(
        "  ".join(
            row[at].ljust(widths[at]) if at in left else row[at].rjust(widths[at]) for at in kept
        ).rstrip()
        for row in lines
    )


# ---------------------------------------------------------------- as a page


def page(scene: NodeReports, verdict: Diagnosis, seconds: float) -> str:
    state = chip("fit to train", "finished") if verdict.fit else chip("not fit", "failed")
    pairs = links(scene)
    parts = [
        render("doctor/templates/header.html", state=state, size=size(scene, seconds), about=about(scene)),
        section("Verdict", paragraph(str(verdict))),
        section("What was found", _findings(verdict)) if verdict.findings else "",
        section("Ranks", _ranks(scene)),
        section("Between nodes", html_table(LINK_HEADS, pairs, numeric=LINK_HEADS[1:])) if pairs else "",
    ]
    return document("doctor", joined(parts))


def _findings(verdict: Diagnosis) -> Markup:
    shown = [
        [_grade(one), one.host, "" if one.rank is None else one.rank, one.what, one.hint]
        for one in verdict.findings
    ]
    return html_table(("", "node", "rank", "what", "what to do"), shown, numeric=("rank",))


def _grade(finding: Finding) -> Markup:
    return chip("out", "failed") if finding.out else chip("odd", "stopped")


def _ranks(scene: NodeReports) -> Markup:
    """A column without a value is left out."""
    heads = [f"{head} {unit}".strip() for head, unit in zip(HEADS, UNITS, strict=True)]
    filled = rows(scene)
    kept = [at for at in range(len(heads)) if any(row[at] for row in filled)]
    numeric = [heads[at] for at in kept if HEADS[at] not in ("node", "device")]
    return html_table(
        [heads[at] for at in kept], [[row[at] for at in kept] for row in filled], numeric=numeric
    )

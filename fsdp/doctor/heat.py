"""Heat maps of the doctor's page: a cell for each rank, node or link, coloured by its share of the median.

A cell below the threshold of findings.py is marked. At a thousand ranks a map is still one screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from markupsafe import Markup

from fsdp.base.html import div, joined, render
from fsdp.doctor.findings import DISK, LINK, NodeReports, RankReport, link_rate, rates_between, slow_device

LABELLED = 16
"""With more nodes a map has no names; a cell's name and value are its tooltip."""
ABOVE = 1.05
"""From this share of the median on a cell has the strongest colour."""


@dataclass(frozen=True)
class Cell:
    name: str
    group: str
    """Cells of one group, such as a node, stand together."""
    value: float | None
    """None if it was not measured."""
    kind: str = ""
    """Compared with cells of this kind alone."""


@dataclass(frozen=True)
class HeatMap:
    title: str
    unit: str
    cells: Sequence[Cell]
    least: Callable[[str], float]
    """It returns a kind's least share of the median that is not a finding."""


def heat_maps(reports: NodeReports) -> list[HeatMap]:
    """Those with at least two values: one alone has nothing to be compared with."""
    found = [
        HeatMap("Matrix product of each rank", "TFLOP/s", list(_devices(reports)), slow_device),
        HeatMap(
            "All-gather and reduce-scatter within each node", "GB/s", list(_within(reports)), lambda _: LINK
        ),
        HeatMap("Between neighbouring nodes", "GB/s", list(_between(reports)), lambda _: LINK),
        HeatMap("Writes to the run's folder", "MB/s", list(_storage(reports, "write_mb_s")), lambda _: DISK),
        HeatMap("Reads of a neighbour's file", "MB/s", list(_storage(reports, "read_mb_s")), lambda _: DISK),
    ]
    return [one for one in found if sum(cell.value is not None for cell in one.cells) > 1]


def _devices(reports: NodeReports) -> Iterator[Cell]:
    for node, ranks in enumerate(reports.nodes):
        for rank in ranks:
            report = reports.by_rank.get(rank, {})
            value = report["device"]["tflops"] if "device" in report else None
            kind = str(report["facts"]["device"]) if "facts" in report else ""
            yield Cell(f"{reports.hosts[node]} rank {rank}", reports.hosts[node], value, kind)


def _heads(reports: NodeReports) -> Iterator[tuple[str, RankReport]]:
    """Host → the report of its first rank; empty for a node without one."""
    found: Mapping[int, RankReport] = dict(reports.heads())
    return ((host, found.get(node, {})) for node, host in enumerate(reports.hosts))


def _within(reports: NodeReports) -> Iterator[Cell]:
    for host, report in _heads(reports):
        link = report.get("links", {}).get("within")
        yield Cell(host, "", None if link is None else link_rate(link))


def _between(reports: NodeReports) -> Iterator[Cell]:
    for (one, other), rate in sorted(rates_between(reports).items()):
        yield Cell(f"{reports.hosts[one]} – {reports.hosts[other]}", "", rate)


def _storage(reports: NodeReports, name: str) -> Iterator[Cell]:
    for host, report in _heads(reports):
        yield Cell(host, "", report.get("storage", {}).get(name))


# ---------------------------------------------------------------- drawing


def drawn(maps: Sequence[HeatMap]) -> Markup:
    """The first map over the whole width, the others beside each other."""
    if not maps:
        return Markup("")
    return joined([render("doctor/templates/heat_key.html"), div(joined(map(_drawn, maps)), "heats")])


def _drawn(heat: HeatMap) -> Markup:
    kinds = {cell.kind for cell in heat.cells if cell.value is not None}
    usual = {
        kind: median(c.value for c in heat.cells if c.value is not None and c.kind == kind) for kind in kinds
    }
    values = [cell.value for cell in heat.cells if cell.value is not None]
    groups = [
        {"name": name, "cells": [_cell(cell, heat, usual) for cell in members]}
        for name, members in groupby(heat.cells, key=lambda cell: cell.group)
    ]
    labelled = len(groups) > 1 and len(groups) <= LABELLED
    return render(
        "doctor/templates/heat.html",
        title=heat.title,
        line=_line(heat, usual, values),
        groups=groups,
        labelled=labelled,
    )


def _line(heat: HeatMap, usual: Mapping[str, float], values: Sequence[float]) -> str:
    medians = [
        f"median{f' of {kind}' if len(usual) > 1 else ''} {value:.3g} {heat.unit}, threshold "
        f"{value * heat.least(kind):.3g}"
        for kind, value in sorted(usual.items())
    ]
    missing = len(heat.cells) - len(values)
    without = f"; {missing} without a value" if missing else ""
    return f"{'; '.join(medians)}; lowest {min(values):.3g}, highest {max(values):.3g}{without}"


def _cell(cell: Cell, heat: HeatMap, usual: Mapping[str, float]) -> dict[str, str]:
    if cell.value is None:
        return {"kind": "none", "title": f"{cell.name}: not measured"}
    share = cell.value / usual[cell.kind] if usual[cell.kind] else 1.0
    title = f"{cell.name}: {cell.value:.3g} {heat.unit}, {share:.0%} of the median"
    return {"kind": _level(share, heat.least(cell.kind)), "title": title}


def _level(share: float, least: float) -> str:
    """`low` below the threshold; then three equal parts up to ABOVE, and the rest."""
    if not share >= least:
        return "low"
    return f"h{min(3, int((share - least) / (ABOVE - least) * 3))}"

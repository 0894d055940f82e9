"""The memory profile as one offline HTML file: stacked areas over time by kind, and peaks by phase.

Made from a record of fsdp/memory/profile.py alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fsdp.base.html import document, render, table
from fsdp.base.units import byte_size

WIDTH, HEIGHT = 1000, 400
NARROW = 0.03
"""A phase below this share of the width gets no label."""


def page(record: Mapping[str, Any]) -> str:
    title = f"Memory of rank {record['rank']} of {record['ranks']}"
    peak = record["peak"]
    timeline = record["timeline"]
    drawn = len(timeline["t_s"]) >= 2
    body = render(
        "memory/templates/profile.html",
        title=title,
        about=_about(record),
        peak={"size": byte_size(peak["bytes"]), "phase": peak["phase"], "step": peak["step"]},
        plot=_plot(timeline) if drawn else None,
        width=WIDTH,
        height=HEIGHT,
        peaks=peaks_table(record["phases"]),
        ends=ends_table(record["ends"]),
        timeline=timeline,
    )
    script = "memory/templates/profile.js" if drawn else ""
    return document(title, body, style="memory/templates/memory.css", script=script)


def _about(record: Mapping[str, Any]) -> str:
    first, last = record["steps"]
    source = "CUDA's caching allocator" if record["source"] == "allocator" else "tensor storages"
    parameters = f"{record['parameters']:,} parameters"
    return f"Steps {first} to {last}, {parameters}, {record['device']}, measured from {source}."


# ---------------------------------------------------------------- the plot


def _plot(timeline: Mapping[str, Any]) -> dict[str, Any]:
    times: Sequence[float] = timeline["t_s"]
    kinds: Mapping[str, Sequence[int]] = timeline["kinds"]
    totals = [sum(values) for values in zip(*kinds.values(), strict=True)]
    top = max(totals) * 1.04 or 1
    bands, phases = _phases(timeline["marks"], times[-1])
    return {
        "areas": _areas(times, kinds, top),
        "levels": [(_y(level, top), f"{level / top:.2%}", byte_size(level)) for level in _levels(top)],
        "bands": bands,
        "phases": phases,
        "milliseconds": f"{times[-1] * 1e3:.0f}",
    }


def _areas(times: Sequence[float], kinds: Mapping[str, Sequence[int]], top: float) -> list[dict[str, str]]:
    """Each kind above the one before it."""
    areas, below = [], [0.0] * len(times)
    for kind, values in kinds.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        areas.append({"kind": kind, "path": _area(times, below, above, top), "peak": byte_size(max(values))})
        below = above
    return areas


def _area(times: Sequence[float], below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Steps, not slopes: memory is constant until the next event."""
    xs = [f"{t / times[-1] * WIDTH:.1f}" for t in times]
    forward = [f"M{xs[0]},{_y(above[0], top)}"]
    forward += [f"H{x}V{_y(high, top)}" for x, high in zip(xs[1:], above[1:], strict=True)]
    back = [f"V{_y(below[-1], top)}"]
    back += [f"H{xs[k + 1]}V{_y(below[k], top)}" for k in range(len(xs) - 2, -1, -1)]
    return "".join([*forward, *back, f"H{xs[0]}Z"])


def _y(value: float, top: float) -> str:
    return f"{HEIGHT * (1 - value / top):.1f}"


def _levels(top: float) -> list[float]:
    """Three to six round numbers of bytes below the top."""
    step = 1.0
    while top / step > 6:
        step *= 2
    return [step * n for n in range(1, int(top / step) + 1)]


Phase = dict[str, Any]


def _phases(marks: Sequence[Sequence[Any]], end: float) -> tuple[list[tuple[str, str]], list[Phase]]:
    """Bands (x, width) behind every second phase; labels of phases that are wide enough."""
    bands, labels = [], []
    for place, (begin, phase, step) in enumerate(marks):
        until = marks[place + 1][0] if place + 1 < len(marks) else end
        left, wide = begin / end, max(0.0, until - begin) / end
        if place % 2:
            bands.append((f"{left * WIDTH:.1f}", f"{wide * WIDTH:.1f}"))
        if wide >= NARROW:
            labels.append({"left": f"{left:.2%}", "wide": f"{wide:.2%}", "phase": phase, "step": step})
    return bands, labels


# ---------------------------------------------------------------- tables


def peaks_table(phases: Mapping[str, Mapping[str, Any]]) -> Markup:
    kinds = [
        kind
        for kind in next(iter(phases.values()))["kinds"]
        if any(peak["kinds"].get(kind) for peak in phases.values())
    ]
    rows = [
        [
            phase,
            str(peak["step"]),
            byte_size(peak["bytes"]),
            *(byte_size(peak["kinds"].get(kind, 0)) for kind in kinds),
        ]
        for phase, peak in phases.items()
    ]
    return table(["phase", "step", "total", *kinds], rows)


def ends_table(ends: Sequence[Mapping[str, Any]]) -> Markup:
    if not ends:
        return Markup("")
    kinds = [kind for kind in ends[0]["kinds"] if any(end["kinds"][kind] for end in ends)]
    rows = [
        [
            f"{end['phase']} {end['step']}",
            *(byte_size(end["kinds"][kind]) for kind in kinds),
            "" if end.get("beyond") is None else byte_size(end["beyond"]),
        ]
        for end in ends
    ]
    return table(["phase and step", *kinds, "beyond"], rows)

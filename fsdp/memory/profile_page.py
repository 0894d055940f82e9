"""The memory profile as one offline HTML file: stacked areas over time by kind, and peaks by phase.

Made from a record of fsdp/memory/profile.py alone. The report embeds the figure (`timeline_figure`) and the
tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fsdp.base.html import document, header, joined, paragraph, render, section, table
from fsdp.base.palette import kind_colour
from fsdp.base.units import byte_size, seconds

WIDTH, HEIGHT = 1000, 400
SCRIPT = "memory/templates/profile.js"
ENDS = (
    "Steps of equal amounts share a row. outside: what the process (on a CPU) or CUDA's allocator holds "
    "beyond these kinds, such as the interpreter, libraries, cached blocks; the highest of the row's steps."
)


def page(record: Mapping[str, Any]) -> str:
    peak = record["peak"]
    title = f"Memory of rank {record['rank']} of {record['ranks']}"
    run = record.get("run", "")
    drawn = len(record["timeline"]["t_s"]) >= 2
    highest = f"Peak: {byte_size(peak['bytes'])} in {peak['phase']} of step {peak['step']}."
    figure = timeline_figure(record["timeline"]) if drawn else paragraph("nothing was recorded", "none")
    body = [
        header(
            f"{run}: {title[0].lower()}{title[1:]}" if run else title,
            lines=[_about(record), highest],
            flags=record.get("flags", ()),
        ),
        section("By kind over time", figure),
        section("Peak of each phase", peaks_table(record["phases"])),
        section("At the end of each phase", ends_table(record["ends"]), ENDS),
    ]
    return document(" · ".join(filter(None, (run, title))), joined(body), scripts=[SCRIPT] if drawn else [])


def timeline_figure(timeline: Mapping[str, Any]) -> Markup:
    """Areas over time. A page with it needs SCRIPT for the amounts under the pointer."""
    return render(
        "memory/templates/profile.html",
        plot=_plot(timeline),
        width=WIDTH,
        height=HEIGHT,
        timeline=timeline,
    )


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
        "steps": _steps(timeline["marks"], times[-1]),
        "duration": seconds(times[-1]),
    }


def _areas(times: Sequence[float], kinds: Mapping[str, Sequence[int]], top: float) -> list[dict[str, str]]:
    """Each kind above the one before it."""
    areas, below = [], [0.0] * len(times)
    for kind, values in kinds.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        path = _area(times, below, above, top)
        areas.append(
            {"kind": kind, "colour": kind_colour(kind), "path": path, "peak": byte_size(max(values))}
        )
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


Label = dict[str, str]
"""Text over a part of the time; the style sheet hides a label that its part cannot hold whole."""


def _phases(marks: Sequence[Sequence[Any]], end: float) -> tuple[list[tuple[str, str]], list[Label]]:
    """Bands (x, width) behind every second phase, and the phases' labels."""
    bands, labels = [], []
    for place, (begin, phase, step) in enumerate(marks):
        until = marks[place + 1][0] if place + 1 < len(marks) else end
        if place % 2:
            wide = max(0.0, until - begin) / end
            bands.append((f"{begin / end * WIDTH:.1f}", f"{wide * WIDTH:.1f}"))
        labels.append(_label(phase, f"{phase}, step {step}", begin, until, end))
    return bands, labels


def _steps(marks: Sequence[Sequence[Any]], end: float) -> list[Label]:
    firsts = [mark for place, mark in enumerate(marks) if not place or marks[place - 1][2] != mark[2]]
    untils = [*(mark[0] for mark in firsts[1:]), end]
    return [
        _label(f"step {step}", f"step {step}", begin, until, end)
        for (begin, _, step), until in zip(firsts, untils, strict=True)
    ]


def _label(name: str, title: str, begin: float, until: float, end: float) -> Label:
    wide = max(0.0, until - begin) / end
    return {"left": f"{begin / end:.2%}", "wide": f"{wide:.2%}", "name": name, "title": title}


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
            *(_amount(peak["kinds"].get(kind, 0)) for kind in kinds),
        ]
        for phase, peak in phases.items()
    ]
    heads = ["phase", "step", "total", *kinds]
    return table(heads, rows, numeric=heads[1:])


def _amount(size: float) -> str:
    """A cell without bytes is empty, and left out on a phone."""
    return byte_size(size) if size else ""


def ends_table(ends: Sequence[Mapping[str, Any]]) -> Markup:
    """A row for each phase; one more where its amounts differ between steps."""
    if not ends:
        return Markup("")
    kinds = [kind for kind in ends[0]["kinds"] if any(end["kinds"][kind] for end in ends)]
    folded: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for end in ends:
        amounts = tuple(_amount(end["kinds"][kind]) for kind in kinds)
        folded.setdefault((end["phase"], *amounts), []).append(end)
    rows = [
        [phase, _steps_of([end["step"] for end in alike]), *amounts, _outside(alike)]
        for (phase, *amounts), alike in folded.items()
    ]
    heads = ["phase", "steps", *kinds, "outside"]
    return table(heads, rows, numeric=heads[1:])


def _steps_of(steps: Sequence[int]) -> str:
    """`3 to 5`, or `3, 5, 9`."""
    distinct = sorted(set(steps))
    if len(distinct) > 2 and distinct[-1] - distinct[0] == len(distinct) - 1:
        return f"{distinct[0]} to {distinct[-1]}"
    return ", ".join(map(str, distinct))


def _outside(ends: Sequence[Mapping[str, Any]]) -> str:
    found = [end["beyond"] for end in ends if end.get("beyond") is not None]
    return byte_size(max(found)) if found else ""

"""An account as one HTML file that opens offline: stacked areas over time by kind, the phases under them,
peaks by phase.

Drawn from a record of fsdp/memory/profile.py alone. Style and script stand beside this file and are written
into the page.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.memory.account import human

WIDTH, HEIGHT = 1000, 400
NARROW = 0.03
"""A phase shorter than this share of the picture has no room for its name."""


def page(record: Mapping[str, Any]) -> str:
    title = f"Memory of rank {record['rank']} of {record['ranks']}"
    peak = record["peak"]
    first, last = record["steps"]
    source = "CUDA's caching allocator" if record["source"] == "allocator" else "tensor storages"
    body = [
        f"<h1>{title}</h1>",
        f"<p>steps {first} to {last}, {record['parameters']:,} parameters, {html.escape(record['device'])}, from {source}. "
        f"Highest: <b>{human(peak['bytes'])}</b> in {peak['phase']} of step {peak['step']}.</p>",
        picture(record["timeline"]),
        "<h2>Highest moment of each phase</h2>",
        peaks_table(record["phases"]),
        "<h2>What stood when each phase ended</h2>",
        ends_table(record["ends"]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_beside('css')}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="data">{json.dumps(record["timeline"])}</script>'
        f"<script>{_beside('js')}</script></body></html>\n"
    )


def _beside(ending: str) -> str:
    return Path(__file__).with_suffix(f".{ending}").read_text(encoding="utf-8")


# ---------------------------------------------------------------- the picture


def picture(timeline: Mapping[str, Any]) -> str:
    times: Sequence[float] = timeline["t_s"]
    kinds: Mapping[str, Sequence[int]] = timeline["kinds"]
    if len(times) < 2:
        return "<p>nothing was recorded</p>"
    totals = [sum(values) for values in zip(*kinds.values(), strict=True)]
    top = max(totals) * 1.04 or 1
    areas, below = [], [0.0] * len(times)
    for kind, values in kinds.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        areas.append(
            f'<path style="fill:var(--{kind})" d="{_area(times, below, above, top)}"><title>{kind}</title></path>'
        )
        below = above
    rules = "".join(
        f'<line class="rule" x1="0" x2="{WIDTH}" y1="{_y(level, top)}" y2="{_y(level, top)}"/>'
        for level in _levels(top)
    )
    labels = "".join(
        f'<span class="y" style="bottom:{level / top:.2%}">{human(level)}</span>' for level in _levels(top)
    )
    legend = "".join(
        f'<span><i style="background:var(--{kind})"></i>{kind} <span id="at-{kind}">{human(max(values))}</span></span>'
        for kind, values in kinds.items()
    )
    bands, strip = _phases(timeline["marks"], times[-1])
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="bytes by kind over time">{bands}{rules}{"".join(areas)}'
        f'<line id="cursor" x1="-9" x2="-9" y1="0" y2="{HEIGHT}"/></svg>{labels}</div><div class="strip">{strip}</div>'
        f'<div class="legend"><span id="told">the highest of each, {times[-1] * 1e3:.0f} ms in all</span>{legend}</div>'
    )


def _area(times: Sequence[float], below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Steps, not slopes: memory stands until the next event."""
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


def _phases(marks: Sequence[Sequence[Any]], end: float) -> tuple[str, str]:
    """Every second phase has a grey band; names stand under those that are wide enough."""
    bands, names = [], []
    for place, (begin, phase, step) in enumerate(marks):
        until = marks[place + 1][0] if place + 1 < len(marks) else end
        left, wide = begin / end, max(0.0, until - begin) / end
        if place % 2:
            bands.append(
                f'<rect class="band" x="{left * WIDTH:.1f}" y="0" width="{wide * WIDTH:.1f}" height="{HEIGHT}"/>'
            )
        if wide >= NARROW:
            names.append(
                f'<span style="left:{left:.2%};width:{wide:.2%}" title="{phase}, step {step}">{phase} {step}</span>'
            )
    return "".join(bands), "".join(names)


# ---------------------------------------------------------------- tables


def peaks_table(phases: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = [
        kind
        for kind in next(iter(phases.values()))["kinds"]
        if any(peak["kinds"].get(kind) for peak in phases.values())
    ]
    rows = [
        [
            phase,
            str(peak["step"]),
            human(peak["bytes"]),
            *(human(peak["kinds"].get(kind, 0)) for kind in kinds),
        ]
        for phase, peak in phases.items()
    ]
    return _table(["phase", "step", "in all", *kinds], rows)


def ends_table(ends: Sequence[Mapping[str, Any]]) -> str:
    if not ends:
        return ""
    kinds = [kind for kind in ends[0]["kinds"] if any(end["kinds"][kind] for end in ends)]
    rows = [
        [
            f"{end['phase']} {end['step']}",
            *(human(end["kinds"][kind]) for kind in kinds),
            "" if end.get("beyond") is None else human(end["beyond"]),
        ]
        for end in ends
    ]
    return _table(["phase and step", *kinds, "beyond"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'

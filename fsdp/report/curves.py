"""Line charts as inline SVG: thinned to a bounded number of points, with the extremes kept."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 56, 24, 10
BUCKETS = 600
COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)")


def thin(points: Points, buckets: int = BUCKETS) -> list[tuple[float, float]]:
    """At most two points a bucket, its lowest and its highest: a spike in a million steps stays."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= 2 * buckets:
        return finite
    kept: list[tuple[float, float]] = []
    for nth in range(buckets):
        part = finite[nth * len(finite) // buckets : (nth + 1) * len(finite) // buckets]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def chart(title: str, lines: Mapping[str, Points], unit: str = "") -> str:
    """One chart; an empty string where there is nothing to draw."""
    thinned = {name: thin(points) for name, points in lines.items()}
    every = [point for points in thinned.values() for point in points]
    if not every:
        return ""
    low, high = min(y for _, y in every), max(y for _, y in every)
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - pad if low < 0 else max(0.0, low - pad), high + pad

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        return LEFT + across * (WIDTH - LEFT - 8), TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = "".join(_grid(low, high, first, last, place(first, 0)[0]))
    for (name, points), colour in zip(thinned.items(), COLOURS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        label = html.escape(name)
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"><title>{label}</title></polyline>'
        if len(points) == 1:
            x, y = place(*points[0])
            body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in zip(thinned, COLOURS, strict=False)
    )
    label = html.escape(title + (f" ({unit})" if unit else ""))
    return (
        f'<figure><figcaption>{label}<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg></figure>'
    )


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _grid(low: float, high: float, first: float, last: float, left: float) -> list[str]:
    parts = []
    for nth in range(5):
        value = low + (high - low) * nth / 4
        y = TOP + (1 - nth / 4) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{left}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    for x, value, anchor in ((left, first, "start"), (WIDTH - 8, last, "end")):
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {value:.0f}</text>')
    return parts

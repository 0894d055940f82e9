"""Stacked bars, one per rank: memory or time by kind. They need no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from fsdp.base.html import render
from fsdp.report.curves import colour

Bars = Mapping[str, Mapping[str, float]]
"""Name of a bar → kind → amount."""


def bars(
    rows: Bars,
    kinds: Sequence[str],
    unit: Callable[[float], str],
    labels: Mapping[str, str] | None = None,
) -> Markup:
    """A legend, then the bars, all on the scale of the longest. `labels` renames kinds in the legend."""
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    labels = labels or {}
    return render(
        "report/templates/bars.html",
        key=[(colour(nth), labels.get(kind, kind)) for nth, kind in enumerate(kinds)],
        rows=[
            {"name": name, "parts": _parts(parts, kinds, unit, longest), "total": unit(sum(parts.values()))}
            for name, parts in rows.items()
        ],
    )


def _parts(
    parts: Mapping[str, float], kinds: Sequence[str], unit: Callable[[float], str], longest: float
) -> list[dict[str, str]]:
    return [
        {
            "colour": colour(nth),
            "width": f"{parts[kind] / longest * 100:.2f}",
            "title": f"{kind} {unit(parts[kind])}",
        }
        for nth, kind in enumerate(kinds)
        if parts.get(kind, 0) > 0
    ]


def shown_ranks(ranks: Sequence[int], extremes: Sequence[int], count: int = 16) -> list[int]:
    """The first ranks and the first of `extremes`, `count` in all at most."""
    return sorted({*list(ranks)[: count // 2], *list(extremes)[: count // 2]})

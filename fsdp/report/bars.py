"""Stacked bars: memory or time by kind, with a limit where there is one. They need no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from fsdp.report.html import render
from fsdp.report.palette import colour

FEW = 8
Bars = Mapping[str, Mapping[str, float]]
"""Name of a bar → kind → amount."""


def bars(
    rows: Bars,
    kinds: Sequence[str],
    unit: Callable[[float], str],
    labels: Mapping[str, str] | None = None,
    *,
    colour_of: Callable[[str], str] | None = None,
    limit: float = 0.0,
) -> Markup:
    """A legend, then the bars, all on one scale. `labels` renames kinds; `limit` is a line across all bars.

    A kind's colour is `colour_of` it, or that of its place among `kinds`.
    """
    longest = max([limit, *(sum(parts.values()) for parts in rows.values())], default=0.0) or 1.0
    labels = labels or {}
    colours = {kind: colour_of(kind) if colour_of else colour(nth) for nth, kind in enumerate(kinds)}
    return render(
        "bars.html",
        key=[(colours[kind], labels.get(kind, kind)) for kind in kinds],
        limit={"left": f"{limit / longest * 100:.2f}", "text": unit(limit)} if limit else None,
        rows=[
            {
                "name": name,
                "parts": [
                    {
                        "colour": colours[kind],
                        "width": f"{parts[kind] / longest * 100:.2f}",
                        "title": f"{labels.get(kind, kind)} {unit(parts[kind])}",
                    }
                    for kind in kinds
                    if parts.get(kind, 0) > 0
                ],
                "total": unit(sum(parts.values())),
            }
            for name, parts in rows.items()
        ],
    )


def shown_ranks(ranks: Sequence[int], extremes: Sequence[int]) -> list[int]:
    """The first ranks and the first of `extremes`."""
    return sorted({*ranks[:FEW], *extremes[:FEW]})

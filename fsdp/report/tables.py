"""Tables and tiles as HTML: every text escaped, every cell with its column's name, so that a phone can show a
row as a card.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Raw(str):
    """HTML that was made here, and is not to be escaped."""


def cell(value: object) -> str:
    return str(value) if isinstance(value, Raw) else html.escape(str(value))


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: Sequence[str] = (),
    nothing: str = "none",
) -> str:
    """Columns in `numeric` stand right, digit under digit."""
    lines = []
    for row in rows:
        cells = "".join(
            f'<td data-head="{html.escape(head)}"{_class(head in numeric, value)}>{cell(value)}</td>'
            for head, value in zip(heads, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    if not lines:
        return f'<p class="none">{html.escape(nothing)}</p>'
    top = "".join(f"<th{_class(head in numeric, head)}>{html.escape(head)}</th>" for head in heads)
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _class(number: bool, value: object) -> str:
    names = ["n"] * number + ["empty"] * (str(value) == "")
    return f' class="{" ".join(names)}"' if names else ""


def tiles(shown: Iterable[tuple[str, object, str]]) -> str:
    """(label, value, a few words under it)."""
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{cell(value)}</dd><dd class=under>{html.escape(under)}</dd></div>"
        for name, value, under in shown
    )
    return f'<dl class="tiles">{items}</dl>'


def chip(text: str, kind: str) -> Raw:
    return Raw(f'<span class="chip {kind}">{html.escape(text)}</span>')


def section(title: str, body: str, about: str = "") -> str:
    """Nothing at all where there is no body."""
    said = f'<p class="about">{about}</p>' if about else ""
    return f"<section><h2>{html.escape(title)}</h2>{said}{body}</section>" if body else ""


def seconds(value: float) -> str:
    """A length of time as a person says it."""
    if value != value:
        return "?"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, hours = value / 60, value / 3600
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def size(count: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"

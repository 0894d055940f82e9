"""HTML pages from Jinja templates, and the parts that several pages share: tables, sections, chips, tiles.

Templates lie in a room's `templates` folder. Values are escaped; Markup, which templates return, is not. A
page is one file that works offline: style and script are inside, its Content-Security-Policy forbids any
request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment

ROOMS = Path(__file__).parents[1]
SHARED = "base/templates"


@cache
def _environment() -> Environment:
    import jinja2  # a dependency of torch; imported when the first page is made

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOMS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(template: str, **values: Any) -> Markup:
    """`template` is a path below fsdp/, such as "report/templates/chart.html"."""
    return Markup(_environment().get_template(template).render(values))


def document(title: str, body: str, *, style: str = f"{SHARED}/page.css", script: str = "") -> str:
    """A whole page. `style` and `script` are paths below fsdp/."""
    parts = {"title": title, "body": body, "style": _source(style), "script": _source(script)}
    return f"{render(f'{SHARED}/document.html', **parts)}\n"


def _source(path: str) -> Markup:
    return Markup((ROOMS / path).read_text(encoding="utf-8") if path else "")


def _part(name: str, *values: object) -> Markup:
    """A macro of parts.html."""
    parts = _environment().get_template(f"{SHARED}/parts.html").module
    made: Markup = getattr(parts, name)(*values)
    return made


def joined(parts: Iterable[str], between: str = "") -> Markup:
    return Markup(between).join(parts)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: Sequence[str] = (),
    nothing: str = "none",
) -> Markup:
    """Columns in `numeric` are right-aligned. Cells carry their column's name: on a phone a row is a card."""
    cells = [list(zip(heads, row, strict=True)) for row in rows]
    return _part("table", heads, cells, numeric, nothing)


def tiles(shown: Iterable[tuple[str, object, str]]) -> Markup:
    """(label, value, the small text below it)."""
    return _part("tiles", list(shown))


def section(title: str, body: str, about: str = "") -> Markup:
    """Empty if the body is."""
    return _part("section", title, body, about) if body else Markup("")


def details(summary: str, body: str) -> Markup:
    return _part("details", summary, body)


def chip(text: str, kind: str) -> Markup:
    """A coloured label; `kind` is a class of page.css: finished, failed, stopped, killed, running."""
    return span(text, f"chip {kind}")


def span(text: str, kind: str) -> Markup:
    return _part("element", "span", text, kind)


def paragraph(text: str, kind: str = "") -> Markup:
    return _part("element", "p", text, kind)


def div(body: str, kind: str) -> Markup:
    return _part("element", "div", body, kind)


def pre(text: str) -> Markup:
    return _part("element", "pre", text, "")

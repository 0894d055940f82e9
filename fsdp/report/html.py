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

TEMPLATES = Path(__file__).parent / "templates"
SHOWN_FLAGS = 12
TILES_IN_A_ROW, LEAST_TILES = 8, 5


@cache
def _environment() -> Environment:
    import jinja2  # a dependency of torch; imported when the first page is made

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(template: str, **values: Any) -> Markup:
    """`template` is the name of a file in templates/."""
    return Markup(_environment().get_template(template).render(values))


def document(title: str, body: str) -> str:
    style, script = _source("page.css"), _source("page.js")
    return f"{render('document.html', title=title, body=body, style=style, script=script)}\n"


def _source(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _part(name: str, *values: object) -> Markup:
    """A macro of parts.html."""
    parts = _environment().get_template("parts.html").module
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
    """(label, value, the small text below it). On a wide page one row, or two of equal length."""
    made = list(shown)
    columns = len(made) if len(made) <= TILES_IN_A_ROW else -(-len(made) // 2)
    return _part("tiles", made, max(columns, LEAST_TILES))


def header(
    title: str,
    state: str = "",
    *,
    lines: Iterable[str] = (),
    flags: Sequence[str] = (),
    notes: Iterable[str] = (),
    name: str = "header",
) -> Markup:
    """The head of a page: title and state, lines about it, flags of the run (those after the first
    SHOWN_FLAGS folded), notes. `name` is the element: header, or div for one of several runs.
    """
    few, more = flags[:SHOWN_FLAGS], flags[SHOWN_FLAGS:]
    return _part("header", name, title, state, [line for line in lines if line], few, more, list(notes))


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


def code(text: str) -> Markup:
    return _part("flag", text)


def pre(text: str) -> Markup:
    return _part("element", "pre", text, "")


def link(text: str, address: str) -> Markup:
    """`address` is a relative path that the caller has quoted."""
    return _part("link", text, address)

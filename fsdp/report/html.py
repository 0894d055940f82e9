"""Pages from Jinja templates, which lie in templates/, and stacked bars. Values are escaped; Markup is not.

A page is one file that works offline: style and script are inside, its Content-Security-Policy forbids any
request. Colours are class names of page.css, which has them for light and for dark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = 9


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
    return Markup(_environment().get_template(template).render(values))


def part(name: str, *values: object, **options: object) -> Markup:
    """A macro of parts.html."""
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html").module, name)
    return macro(*values, **options)


def section(title: str, body: str, about: str = "") -> Markup:
    """Empty if the body is."""
    return part("section", title, body, about) if body else Markup("")


def document(title: str, body: str) -> str:
    style, script = (Markup((TEMPLATES / name).read_text("utf-8")) for name in ("page.css", "page.js"))
    return f"{render('document.html', title=title, body=body, style=style, script=script)}\n"


def colour(nth: int) -> str:
    return f"c{nth % COLOURS}"


def bars(
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: Callable[[float], str],
    labels: Mapping[str, str],
) -> Markup:
    """`rows`: name of a bar → kind → amount, all on one scale. `colours` and `labels` of the kinds."""
    longest = max((sum(amounts.values()) for amounts in rows.values()), default=0.0) or 1.0

    def bar(kind: str, amount: float) -> tuple[str, str, str]:
        return colours[kind], f"{amount / longest * 100:.2f}", f"{labels.get(kind, kind)} {unit(amount)}"

    return render(
        "bars.html",
        key=[(colours[kind], labels.get(kind, kind)) for kind in colours],
        rows=[
            (
                name,
                [bar(kind, amounts[kind]) for kind in colours if amounts.get(kind)],
                unit(sum(amounts.values())),
            )
            for name, amounts in rows.items()
        ],
    )

"""fsdp/base/html.py: every value that reaches a page is text, in every part and template."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from fsdp.base import html
from fsdp.base.bars import bars
from fsdp.report.curves import chart
from fsdp.report.series import Series, in_order

EVIL = """</script></title></style>"'><img src=x onerror=alert(1)>{{ 7 * 7777 }}"""


def series() -> Series:
    import numpy as np

    return in_order(Series(np.arange(3.0), np.arange(3.0)))


@pytest.mark.parametrize(
    "made",
    [
        html.table([EVIL, "b"], [[EVIL, 1]], numeric=[EVIL]),
        html.table([EVIL], [], nothing=EVIL),
        html.tiles([(EVIL, EVIL, EVIL)]),
        html.section(EVIL, EVIL, EVIL),
        html.details(EVIL, EVIL),
        html.chip(EVIL, EVIL),
        html.paragraph(EVIL, EVIL),
        html.pre(EVIL),
        html.header(EVIL, EVIL, lines=[EVIL], flags=[EVIL] * 20, notes=[EVIL]),
        html.link(EVIL, EVIL),
        html.joined([EVIL, EVIL], "<br>"),
        html.document(EVIL, EVIL),
        html.render("report/templates/timeline.html", end=EVIL,
                    bars=[dict.fromkeys(("kind", "left", "width", "title"), EVIL)]),
        chart(EVIL, {EVIL: series(), "other": series()}, EVIL),
        bars({EVIL: {EVIL: 1.0}}, [EVIL], str, {EVIL: EVIL}),
    ],
)  # fmt: skip
def test_values_are_escaped(made: str) -> None:
    assert "<img" not in made
    assert "54439" not in made
    assert made.count("</script>") <= 1


def test_parts_are_not_escaped_again() -> None:
    assert html.section("title", html.paragraph("a < b")) == (
        "<section><h2>title</h2><p>a &lt; b</p></section>"
    )
    assert isinstance(html.joined([]), Markup)


def test_an_empty_section_is_left_out() -> None:
    assert html.section("title", html.joined([]), "about") == ""

"""Every page of the product in a browser: nothing is cut, overlaps or scrolls sideways, and colours agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest

from fsdp.base.palette import MEMORY_KINDS, kind_colour
from fsdp.memory.account import KINDS
from fsdp.plan.trace import KINDS as PLANNED_KINDS
from tests.support import pages
from tests.support.browser import Browser
from tests.support.looks import (
    assert_fits,
    assert_keeps_to_itself,
    assert_legible,
    assert_nothing_is_cut,
)
from tests.support.marks import quick_are

SHOWN_KINDS = """Object.fromEntries([...document.querySelectorAll("[class*='k-']")]
  .flatMap((e) => [...e.classList].filter((name) => name.startsWith("k-"))
  .map((name) => [name, getComputedStyle(e).color])))"""
PAGES_OF_MEMORY = ("report", "compare", "memory", "oom", "plan")
STYLE = Path(__file__).parents[2] / "fsdp" / "base" / "templates" / "page.css"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return pages.write(tmp_path_factory.mktemp("pages"))


CASES = [
    (name, width, scheme) for name in pages.NAMES for width in (390, 1280) for scheme in ("light", "dark")
]
QUICK = [("compare", 390, "dark"), ("plan", 1280, "light"), ("doctor-64", 390, "light")]
SAMPLE = [(name, width, "light") for name in ("oom", "sweep") for width in (390, 1280)]


@pytest.mark.parametrize(("name", "width", "scheme"), quick_are(QUICK, CASES, SAMPLE))
def test_nothing_is_cut_overlaps_or_scrolls_sideways(
    browser: Browser, files: dict[str, Path], name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.open(files[name], width=width, scheme=scheme)
    assert_keeps_to_itself(page)
    assert_fits(page)
    assert_nothing_is_cut(page)
    assert_legible(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_kind_of_memory_has_one_colour_on_all_pages(
    browser: Browser, files: dict[str, Path], scheme: Literal["light", "dark"]
) -> None:
    seen: dict[str, str] = {}
    for name in PAGES_OF_MEMORY:
        shown = browser.open(files[name], scheme=scheme).ask(SHOWN_KINDS)
        assert {"k-parameters", "k-activations"} <= set(shown), name
        for kind, colour in shown.items():
            assert seen.setdefault(kind, colour) == colour, f"{kind} on {name}"
    assert len(set(seen.values())) == len(seen), "two kinds have one colour"


def test_the_style_sheet_has_a_light_and_a_dark_colour_for_each_kind() -> None:
    style = STYLE.read_text()
    for kind in MEMORY_KINDS:
        assert len(re.findall(rf"--k-{kind}:#", style)) == 2, kind
        assert f".k-{kind}{{color:var(--k-{kind})}}" in style
    for kind in (*KINDS, *PLANNED_KINDS):
        assert kind == "other" or kind_colour(kind) != "k-other", kind


def test_all_pages_have_the_same_style(files: dict[str, Path]) -> None:
    styles = {re.findall(r"<style>(.*?)</style>", file.read_text(), re.DOTALL)[0] for file in files.values()}
    assert len(styles) == 1


def test_a_run_and_its_flags_head_its_pages(files: dict[str, Path]) -> None:
    for name in ("memory", "oom"):
        head = files[name].read_text().partition("</header>")[0]
        assert "text-8b" in head
        assert "<code>--optim.lr 3e-4</code>" in head
    assert "<code>--optim.lr 0.004</code>" in files["report"].read_text().partition("</header>")[0]


def test_cut_and_overlapping_text_would_be_found(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        '<!doctype html><div style="width:40px;overflow:hidden;white-space:nowrap">backward</div>'
    )
    with pytest.raises(AssertionError, match="backward"):
        assert_nothing_is_cut(browser.open(file))
    file.write_text('<!doctype html><p>one</p><p style="margin-top:-32px">two</p>')
    with pytest.raises(AssertionError, match="one / two"):
        assert_nothing_is_cut(browser.open(file))
    file.write_text('<!doctype html><p style="width:30px;overflow-wrap:anywhere">2.5539</p>')
    with pytest.raises(AssertionError, match=r"2\.5539"):
        assert_nothing_is_cut(browser.open(file))

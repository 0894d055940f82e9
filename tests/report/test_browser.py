"""The report in a browser: two widths, light and dark, print, the pointer's readout, and without scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from fsdp.base.html import render
from fsdp.report.page import page as html_of
from fsdp.report.run_data import read_run
from fsdp.report.sample_section import SampleSection
from tests.report.test_report import made
from tests.report.test_watch_section import watched
from tests.support.browser import Browser, Page
from tests.support.looks import FAINT, assert_fits, assert_keeps_to_itself, assert_legible, listed
from tests.support.marks import quick_are

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)
PICTURES = SampleSection(
    body=render(
        "report/templates/samples.html",
        about="2 samples",
        pictures=[
            {
                "right": right,
                "alt": "",
                "source": PIXEL,
                "best": "a class of a long name",
                "verdict": "is other",
            }
            for right in (True, False)
        ],
        texts=[{"about": "sampled", "prompt": "def ", "rest": "long" * 90}],
    )
)
LONG = "a-run-with-a-name-that-somebody-made-of-all-its-settings-lr-0.0004-width-1024-and-then-some-more"


def full(folder: Path) -> Path:
    """A run with everything that a page can show."""
    run = watched(made(folder, steps=900, mesh__reshard_after_forward="false", plan__predicted_step_s=0.1))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 901, "loss": NaN, "mfu": 0.41}\n{"step": 902, "loss": 1e9, "mfu": 0.42}\nhalf a li'
        )
    with (run / "history.jsonl").open("a") as file:
        start = {
            "event": "start",
            "time": "2026-01-01T00:00:00+00:00",
            "launcher": "torchrun under Slurm",
            "ranks": 64,
        }
        start |= {
            "nodes": [f"a-node-of-a-long-name-{n}" for n in range(9)],
            "from_step": 800,
            "changed": ["x" * 200],
        }
        file.write(
            json.dumps(start)
            + "\n"
            + json.dumps({"event": "end", "step": 902, "why": "TrainingError: " + "why" * 60})
            + "\n"
        )
    for name in ("step-00000100", "step-00000200"):
        (run / "checkpoints" / name).mkdir(parents=True)
    peak = {
        "bytes": 3 << 30,
        "step": 2,
        "phase": "backward",
        "kinds": {"parameters": 1 << 30, "activations": 2 << 30},
    }
    (run / "profile").mkdir()
    for rank in range(3):
        (run / "profile" / f"rank{rank}_memory.json").write_text(
            json.dumps(
                {"format": 1, "rank": rank, "peak": peak, "phases": {"forward": peak, "backward": peak}}
            )
        )
    return run


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one, other, empty = full(folder / LONG), made(folder / "other", optim__beta2=0.9), folder / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    pages = {
        "one": html_of([read_run(one)], [PICTURES]),
        "two": html_of([read_run(one), read_run(other)], [PICTURES, SampleSection(why_not="no export")]),
        "nothing": html_of([read_run(empty)]),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in pages}


@pytest.mark.parametrize("name", quick_are(["two"], ["one", "two", "nothing"]))
@pytest.mark.parametrize("width", quick_are([390], [390, 1280]))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(
    browser: Browser, files: dict[str, Path], name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.open(files[name], width=width, scheme=scheme)
    assert_keeps_to_itself(page)
    assert_fits(page)
    assert_legible(page)


def test_a_page_without_a_finite_loss_and_with_many_curves_has_its_readouts(
    browser: Browser, tmp_path: Path
) -> None:
    run = made(tmp_path / "diverged")
    record = {"step": 1, "loss": float("nan"), **{f"loss/source-{n}": 1.0 for n in range(20)}}
    (run / "metrics.jsonl").write_text(json.dumps(record))
    (tmp_path / "page.html").write_text(html_of([read_run(run)]))
    page = browser.open(tmp_path / "page.html", width=390)
    page.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert_keeps_to_itself(page)
    assert_fits(page)
    assert_legible(page)
    last = "[...document.querySelectorAll('figure.chart')].at(-1)"
    page.ask(f"{last}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}}))")
    assert page.ask(f"{last}.querySelector('.readout').textContent") == "step 1 · 1"


def test_light_and_dark_differ(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.open(files["one"])
    seen = []
    for scheme in ("light", "dark"):
        page.look(scheme=scheme)  # type: ignore[arg-type]
        seen.append(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(set(seen)) == 2


def test_print_is_black_on_white_in_dark_mode_too(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.open(files["one"], scheme="dark", media="print", width=720)
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.ask("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert listed(page, FAINT) == []
    assert page.ask("document.documentElement.scrollWidth") <= 720
    assert page.pdf().startswith(b"%PDF")


def readout(page: Page) -> str:
    return str(page.ask("document.querySelector('.readout').textContent"))


def test_the_pointer_and_the_arrow_keys_read_a_curve(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.open(files["one"])
    usual = readout(page)
    page.ask("document.querySelector('.area').scrollIntoView({block: 'center'})")
    area = "document.querySelector('.area').getBoundingClientRect()"
    box = page.ask(f"(({{x, y, width, height}}) => [x, y, width, height])({area})")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] / 2, y=box[1] + box[3] / 2)
    assert readout(page).startswith("step 4")
    assert "training 0.00" in readout(page)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert readout(page) == usual
    page.ask("document.querySelector('figure.chart').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
        )
    assert readout(page).startswith("step 2 ") or readout(page).startswith("step 1 ")


def test_without_scripts_it_is_the_same_page(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.open(files["nothing"])
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(files["one"])
    assert page.ask("document.querySelectorAll('polyline').length") >= 5
    assert page.ask("document.querySelector('.ys span').getBoundingClientRect().width") > 0
    assert "above the frame" in readout(page)


def test_a_phone_shows_a_row_as_a_card(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.open(files["one"], width=390)
    assert page.ask("getComputedStyle(document.querySelector('thead')).display") == "none"
    assert (
        page.ask("getComputedStyle(document.querySelector('td[data-head=launcher]'), '::before').content")
        == '"launcher"'
    )


def test_what_does_not_fit_or_is_faint_would_be_found(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        '<!doctype html><p style="color:#999">faint</p><div style="width:3000px">wide</div>'
        '<img src="http://127.0.0.1:9/x.png"><script>console.error("x"); nothing()</script>'
    )
    page = browser.open(file)
    for check in (assert_fits, assert_legible, assert_keeps_to_itself):
        with pytest.raises(AssertionError):
            check(page)

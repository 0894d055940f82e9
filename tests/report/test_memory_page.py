"""The page of --profile.memory in a browser: two widths, light and dark, print, and no requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from fsdp.memory.profile_page import page as html_of
from tests.support.browser import Browser
from tests.support.looks import FAINT, assert_fits, assert_keeps_to_itself, assert_legible, listed
from tests.support.marks import quick_are

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication", "other")
PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def account() -> dict[str, Any]:
    """An account as a rank writes it: three steps of five phases."""
    times = [0.01 * n for n in range(60)]
    kinds = {kind: [((n * (k + 3)) % 17 + k) << 20 for n in range(60)] for k, kind in enumerate(KINDS)}
    peak = {"bytes": 90 << 20, "step": 4, "phase": "backward", "kinds": dict.fromkeys(KINDS, 12 << 20)}
    marks = [[0.04 * n, PHASES[n % 5], 3 + n // 5] for n in range(15)]
    ends = [
        {"step": s, "phase": p, "kinds": peak["kinds"], "beyond": 5 << 20} for s in (3, 4, 5) for p in PHASES
    ]
    return {
        "format": 1, "rank": 0, "ranks": 4, "device": "cpu", "source": "storages", "steps": [3, 5],
        "parameters": 10_000_000,
        "peak": peak, "phases": dict.fromkeys(PHASES, peak), "ends": ends,
        "timeline": {"t_s": times, "kinds": kinds, "marks": marks},
    }  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "rank0_memory_profile.html"
    path.write_text(html_of(account()))
    return path


@pytest.mark.parametrize("width", quick_are([390], [390, 1280]))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(
    browser: Browser, file: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.open(file, width=width, scheme=scheme)
    assert_keeps_to_itself(page)
    assert_fits(page)
    assert_legible(page)


def test_it_prints_on_white(browser: Browser, file: Path) -> None:
    page = browser.open(file, scheme="dark", media="print", width=720)
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert listed(page, FAINT) == []
    assert page.pdf().startswith(b"%PDF")

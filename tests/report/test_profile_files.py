"""The profile on the page is drawn from numbers; links, foreign pages and odd files have no effect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp.report.__main__ import main
from tests.report.test_html import EVIL
from tests.report.test_memory_page import account
from tests.report.test_report import made

STEPS = {"mean": {"compute": 0.04, "communication": 0.01, "data": 0.001, "host": 0.002, "step": 0.053}}


def profiled(folder: Path, **changes: Any) -> Path:
    run = made(folder / "run")
    (run / "profile").mkdir()
    files = {
        "rank0_memory.json": json.dumps({**account(), **changes}),
        "rank0_steps.json": json.dumps(STEPS),
        "rank0_operators.txt": f"aten::mm {EVIL}",
        "rank0_trace.json.gz": "trace",
        "rank0_memory_profile.html": "<script>alert(1)</script>",
        "other.html": "<script>alert(2)</script>",
    }
    for name, text in files.items():
        (run / "profile" / name).write_text(text)
    return run


def page(run: Path, *flags: str) -> str:
    assert main([str(run), "--no-samples", *flags]) == 0
    return (run / "report.html").read_text()


def links(text: str) -> list[str]:
    return re.findall(r'href="([^"]*)"', text)


def test_the_timeline_and_the_step_are_on_the_page(tmp_path: Path) -> None:
    text = page(profiled(tmp_path))
    assert '<figure class="account"' in text
    assert "Time of the profiled steps" in text
    assert "exposed communication 10 ms" in text
    assert "aten::mm" in text


def test_no_page_of_the_run_is_linked_and_no_text_becomes_markup(tmp_path: Path) -> None:
    """A browser runs the scripts of a page that it opens: a stranger's is not linked."""
    text = page(profiled(tmp_path))
    assert links(text) == [
        f"./profile/rank0_{name}" for name in ("memory.json", "operators.txt", "steps.json", "trace.json.gz")
    ]
    assert "<img" not in text
    assert "alert(2)" not in text


def test_links_lead_from_the_page_to_the_run(tmp_path: Path) -> None:
    run = profiled(tmp_path)
    out = tmp_path / "pages" / "one.html"
    out.parent.mkdir()
    assert main([str(run), "--no-samples", "--out", str(out)]) == 0
    for link in links(out.read_text()):
        assert (out.parent / link).is_file()


@pytest.mark.parametrize("of", ["file", "folder"])
def test_links_in_the_profile_are_not_followed(tmp_path: Path, of: str) -> None:
    run, other = profiled(tmp_path), profiled(tmp_path / "other")
    if of == "folder":
        for file in (run / "profile").iterdir():
            file.unlink()
        (run / "profile").rmdir()
        (run / "profile").symlink_to(other / "profile")
    else:
        for file in (run / "profile").iterdir():
            file.unlink()
            file.symlink_to(other / "profile" / file.name)
    text = page(run)
    assert links(text) == []
    assert '<figure class="account"' not in text
    assert "aten::mm" not in text


@pytest.mark.parametrize(
    "odd",
    [
        {"timeline": {"t_s": [0, 1], "kinds": {"parameters": [1]}, "marks": []}},
        {"timeline": {"t_s": [2, 1], "kinds": {"parameters": [1, 2]}, "marks": []}},
        {"timeline": {"t_s": [0, 1e999], "kinds": {"parameters": [1, 2]}, "marks": []}},
        {"timeline": {"t_s": list(range(9000)), "kinds": {"parameters": [1] * 9000}, "marks": []}},
        {"timeline": {"t_s": [0, 1], "kinds": {"parameters": [1, 2]}, "marks": [[0, "data"]]}},
        {"ends": [{"phase": "data", "step": 1}]},
        {"ends": 3},
    ],
)
def test_an_odd_account_is_a_note(tmp_path: Path, odd: dict[str, Any]) -> None:
    text = page(profiled(tmp_path, **odd))
    assert "left out: profile/rank0_memory.json, which could not be read" in text


def test_names_in_an_account_stay_text(tmp_path: Path) -> None:
    timeline = {"t_s": [0, 1], "kinds": {EVIL: [1, 2]}, "marks": [[0, EVIL, 1]]}
    peak = {"bytes": 3, "kinds": {EVIL: 3}}
    ends = [{"phase": EVIL, "step": 1, "kinds": {EVIL: 3}}]
    text = page(profiled(tmp_path, timeline=timeline, peak=peak, phases={"forward": peak}, ends=ends))
    assert "<img" not in text
    assert '<path class="k-other"' in text

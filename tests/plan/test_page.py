"""The page of a search: the frontier, each point's flags, and memory by kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp.plan.__main__ import main
from fsdp.plan.page import frontier, page, time_of
from tests.plan.test_command import QUICK
from tests.support.pages import plans


def test_no_plan_is_both_smaller_and_faster_than_one_on_the_frontier() -> None:
    every = plans()
    best = frontier(every)
    for plan in every:
        beaten = any(
            (other.needed <= plan.needed and time_of(other) < time_of(plan))
            or (other.needed < plan.needed and time_of(other) <= time_of(plan))
            for other in every
        )
        assert (plan in best) is not beaten


def test_each_plan_is_a_point_with_its_flags_and_a_row() -> None:
    text = page(plans(), ["what"], ["--optim.lr 1"])
    points = re.findall(r'<a class="pt (\w+)" href="#plan(\d+)".*?title="([^"]*)"', text)
    assert len(points) == 12
    assert all("--train.micro_batch" in title for _, _, title in points)
    assert all(f'<tr id="plan{number}">' in text for _, number, _ in points)
    fits = {str(nth): plan.fits for nth, plan in enumerate(plans(), start=1)}
    assert all((kind == "misfit") is not fits[number] for kind, number, _ in points)


def test_flags_that_all_plans_have_are_said_once() -> None:
    text = page(plans(), [], [])
    assert text.count("<code>--mesh.strategy fsdp</code>") == 1
    assert "All have <code>--mesh.strategy fsdp</code>" in text
    assert "<code>--mesh.reshard_after_forward false</code>" in text


@pytest.mark.long
@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert main([*QUICK, "--page", str(file)]) == 0
    assert f"page: {file}" in capsys.readouterr().out
    text = file.read_text()
    assert '<a class="pt ' in text
    assert "<code>--plan.gpus 4</code>" in text
    assert main([*QUICK, "--page", str(tmp_path / "none" / "plan.html")]) == 2
    assert "cannot be written (No such file or directory). HINT: --page plan.html" in capsys.readouterr().err

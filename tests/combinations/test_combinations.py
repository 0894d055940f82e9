"""Drawn flags: a few draws here, the same at every call; `python -m tests.combinations` goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.combinations.__main__ import BROKEN, SAME, STEPS, check, main
from tests.combinations.drawn import draw
from tests.torture.shapes import write_data


@pytest.mark.long
def test_some_draws(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "12", "--seed", "1"]) == 0
    assert "12 runs the same" in capfd.readouterr().out


@pytest.mark.long
def test_a_run_that_does_not_resume_exactly_is_found(tmp_path: Path) -> None:
    """Its model draws from the clock."""
    write_data(tmp_path / "data")
    drawn = dataclasses.replace(draw(1, STEPS), ranks=1, stops=[5])
    model = "--mesh.strategy fsdp --data.name digits --model.name "
    exact = dataclasses.replace(drawn, flags=f"{model}mlp")
    assert check(exact, tmp_path) == (SAME, "")
    odd = dataclasses.replace(drawn, flags=f"{model}tests.combinations.clocked:Clocked")
    found, said = check(odd, tmp_path)
    assert found == BROKEN
    assert "records and" in said

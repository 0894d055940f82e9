"""The statistics of the benches' tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import tables


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine twice as slow in half of the rounds does not change the ratio."""
    theirs = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    found = tables.ratio([1.1 * one for one in theirs], theirs)
    assert found.value == pytest.approx(1.1)
    assert found.low == pytest.approx(1.1)
    assert found.verdict() == "better"
    assert found.verdict(more_is_better=False) == "worse"


def test_indistinguishable_contenders_are_equal() -> None:
    found = tables.ratio([1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0], [1.0] * 7)
    assert found.low < 1 < found.high
    assert found.verdict() == "equal"


def test_the_intervals_coverage_is_about_nominal() -> None:
    import random

    draw = random.Random(5)
    held = 0
    for _ in range(60):
        rounds = [draw.gauss(1.0, 0.1) for _ in range(25)]
        found = tables.bootstrap(rounds)
        held += found.low <= 1.0 <= found.high
    assert held >= 51


def test_each_contender_is_first_equally_often() -> None:
    orders = [tables.turned(["a", "b", "c"], nth) for nth in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1234567.0, "1,230,000"), (12.34, "12.3"), (0.0, "0")]
)
def test_figures_are_short(value: float, text: str) -> None:
    assert tables.short(value) == text


def test_a_piece_replaces_only_its_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(key: str, text: str) -> None:
        tables.write_piece(
            "x",
            key,
            title="X",
            piece_title=key,
            command="c",
            about="a",
            text=text,
            notes="",
            numbers={"i": tables.Interval(1, 0, 2)},
        )

    for key, text in (("one", "first"), ("two", "second"), ("one", "third")):
        write(key, text)
    page = (tmp_path / "x.md").read_text()
    assert "first" not in page
    assert page.index("third") < page.index("second")
    assert json.loads((tmp_path / "x.json").read_text())["pieces"]["two"]["i"] == {
        "value": 1,
        "low": 0,
        "high": 2,
    }

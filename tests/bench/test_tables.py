"""The statistics of the benches' tables."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
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


NOISES: dict[str, tuple[Callable[[random.Random], float], float]] = {
    "normal": (lambda draw: draw.gauss(1.0, 0.1), 1.0),
    "log-normal": (lambda draw: draw.lognormvariate(0.0, 1.0), 1.0),
    "ratio of skewed": (lambda draw: (1 + draw.expovariate(2.0)) / (1 + draw.expovariate(2.0)), 1.0),
}
"""Each noise and its true median."""


def coverage(noise: str, rounds: int, trials: int) -> float:
    """The share of intervals that contain the true median."""
    (sample, truth), draw, held = NOISES[noise], random.Random(f"{noise}{rounds}"), 0
    for _ in range(trials):
        found = tables.median_interval([sample(draw) for _ in range(rounds)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    return held / trials


@pytest.mark.parametrize("rounds", [6, 8, 12, 20])
@pytest.mark.parametrize("noise", NOISES)
def test_an_interval_covers_the_median_in_95_of_100_cases(noise: str, rounds: int) -> None:
    assert 0.93 <= coverage(noise, rounds, 2500) <= 0.97


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_fewer_than_six_rounds_have_no_interval(rounds: int) -> None:
    found = tables.ratio([2.0] * rounds, [1.0] * rounds)
    assert (found.low, found.high) == (None, None)
    assert found.judged() == "2.000 (no interval below 6 rounds)"


def test_each_contender_is_first_equally_often() -> None:
    orders = [tables.turned(["a", "b", "c"], nth) for nth in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_a_piece_replaces_only_its_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(key: str, text: str) -> None:
        numbers = {"i": tables.Interval(1, 0, 2)}
        said = {"title": "X", "piece_title": key, "command": "c", "about": "a", "text": text, "notes": ""}
        tables.write_piece("x", key, numbers=numbers, short=False, **said)

    for key, text in (("one", "first"), ("two", "second"), ("one", "third")):
        write(key, text)
    page = (tmp_path / "x.md").read_text()
    assert "first" not in page
    assert page.index("third") < page.index("second")
    kept = json.loads((tmp_path / "x.json").read_text())["pieces"]["two"]["i"]
    assert kept == {"value": 1, "low": 0, "high": 2}

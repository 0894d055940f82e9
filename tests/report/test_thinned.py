"""Series of very many steps: points are merged while a file is read, and spikes stay visible."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fsdp.report import series
from fsdp.report.__main__ import main
from fsdp.report.file_notes import Notes
from fsdp.report.series import Series, read_numbers, thin
from tests.report.test_report import made

STEPS = 20_000


def losses(path: Path, values: np.ndarray) -> Series:
    lines = [json.dumps({"step": nth + 1, "loss": value}) for nth, value in enumerate(values.tolist())]
    path.write_text("\n".join(lines))
    return read_numbers(path, Notes())["loss"]


def test_many_points_are_merged_and_keep_mean_extremes_and_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "MOST_POINTS", 1024)
    values = np.random.default_rng(0).normal(3.0, 0.1, STEPS)
    values[12_345], values[777] = 9.0, np.nan
    found = losses(tmp_path / "metrics.jsonl", values)
    assert len(found) < 1024
    assert found.finite.weights.max() < 4 * STEPS / len(found)
    assert found.weights.sum() == STEPS
    assert not found.finite.at(found.finite.steps == 778).weights.size
    finite = found.finite
    assert np.average(finite.values, weights=finite.weights) == pytest.approx(np.nanmean(values))
    assert found.median == pytest.approx(np.nanmedian(values), abs=0.02)
    assert found.last == pytest.approx(values[-2:].mean(), abs=0.5)
    band = thin(found)
    assert len(band.steps) <= 2 * series.BUCKETS
    assert band.high.max() == 9.0
    assert band.low.min() == np.nanmin(values)
    peak = int(band.high.argmax())
    assert abs(band.steps[peak] - 12_346) < 8 * STEPS / len(found)


def test_only_values_that_are_not_finite_are_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "MOST_POINTS", 4096)
    assert len(losses(tmp_path / "metrics.jsonl", np.full(STEPS, np.nan))) <= 4096


def test_grouped_records_weigh_as_many_steps_as_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    single = [{"step": step, "loss": 1.0} for step in range(1, 5)]
    group = {"step": 14, "steps": 10, "loss": 5.0, "low": {"loss": 4.0}, "high": {"loss": 50.0}}
    path.write_text("\n".join(map(json.dumps, [*single, group, {"step": 15, "loss": 1.0}])))
    found = read_numbers(path, Notes())
    assert set(found) == {"loss"}
    assert found["loss"].median == 5.0
    band = thin(found["loss"])
    assert (band.low[4], band.mean[4], band.high[4]) == (4.0, 5.0, 50.0)


@pytest.mark.parametrize("group", [{"steps": 10**400}, {"steps": 10, "low": 3, "high": {"loss": "x"}}])
def test_odd_groups_are_read_as_far_as_they_can_be(tmp_path: Path, group: dict[str, object]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 20, "loss": 2.0, **group}))
    assert read_numbers(path, Notes())["loss"].values.tolist() == [2.0]


def test_the_lowest_value_is_that_of_a_step_and_not_a_mean(tmp_path: Path) -> None:
    """On the page of one run, beside another one, and in a table, whose order follows it too."""
    runs = [made(tmp_path / name, steps=3) for name in ("a", "b", "c")]
    means = {"loss": 0.5, "eval_loss": 0.2, "eval_accuracy": 0.5, "max_mem_gib": 3.0}
    for run in runs:
        add(run, {"step": 3, **means})
    low, high = {"loss": 0.0625, "eval_loss": 0.0313}, {"eval_accuracy": 0.9875, "max_mem_gib": 7.25}
    add(runs[1], {"step": 13, "steps": 10, **means, "low": low, "high": high})
    single, both, table = (page(tmp_path, some) for some in (runs[1:2], runs[:2], runs))
    for expected in ("lowest 0.0625", "lowest 0.0313", "best 98.75%", "7.25 GiB"):
        assert expected in single, expected
    assert re.search(r"lowest loss</td>.*0\.5000</td>.*0\.0625</td>", both)
    assert re.search(r"peak memory of rank 0</td>.*3\.00 GiB</td>.*7\.25 GiB</td>", both)
    rows = table.partition("<tbody>")[2]
    assert "0.0313" in rows
    assert rows.index("</span>b<") < rows.index("</span>a<") < rows.index("</span>c<")


def add(run: Path, record: dict[str, object]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def page(folder: Path, runs: list[Path]) -> str:
    assert main([*map(str, runs), "--out", str(folder / "page.html")]) == 0
    return (folder / "page.html").read_text()

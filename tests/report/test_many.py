"""Two runs side by side, and more as one table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp.checkpoint.run_source import RunSource
from fsdp.report import compare, two_runs
from fsdp.report.__main__ import main, read_runs
from fsdp.report.run_data import read_run
from tests.report.test_report import made, with_step_times


def profiled(run: Path, size: int) -> Path:
    peak = {"bytes": size, "step": 2, "phase": "backward", "kinds": {"parameters": size // 4, "other": size}}
    (run / "profile").mkdir()
    (run / "profile" / "rank0_memory.json").write_text(json.dumps({"format": 1, "peak": peak, "phases": {}}))
    return run


def test_a_difference_has_the_interval_that_the_two_medians_allow(tmp_path: Path) -> None:
    one = read_run(with_step_times(made(tmp_path / "one"), [0.095, 0.1, 0.105]))
    two = read_run(with_step_times(made(tmp_path / "two"), [0.115, 0.12, 0.125]))
    found = next(each for each in compare.differences(one, two) if each.name == "median step")
    assert found.ratio == pytest.approx(1.2)
    assert found.interval is not None
    assert found.ratio is not None
    low, high = found.interval
    assert 1 < low <= found.ratio <= high, "it holds 1 exactly where the intervals overlap"
    assert found.kind == "worse"
    assert f"({low - 1:+.1%} to {high - 1:+.1%})" in found.text


def test_only_a_significant_difference_is_coloured(tmp_path: Path) -> None:
    one = read_run(with_step_times(made(tmp_path / "one"), [0.05, 0.2]))
    two = read_run(with_step_times(made(tmp_path / "two"), [0.06, 0.25]))
    text = two_runs.sections([one, two])
    assert not re.search(r'class="(track )?(worse|better)"', text)


def test_memory_of_both_is_on_one_scale(tmp_path: Path) -> None:
    runs = [profiled(made(tmp_path / name), size << 20) for name, size in (("one", 40), ("two", 20))]
    text = two_runs.sections([read_run(run) for run in runs])
    widths = re.findall(r'k-other" style="width:([\d.]+)%', text)
    assert [float(width) for width in widths] == [80.0, 40.0]


def test_many_runs_are_a_table_with_small_curves(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"sweep-{n}", optim__lr=0.001 * n, optim__beta2=0.9) for n in (1, 2, 3)]
    out = tmp_path / "sweep.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    text = out.read_text()
    assert text.count('<svg class="spark"') == 3
    for n in (1, 2, 3):
        assert f"sweep-{n}" in text
        assert f'<span class="setting">optim.lr 0.00{n}</span>' in text
    assert '<span class="setting">optim.beta2' not in text, "the same in all"
    assert "optim.beta2" in text.partition("Same settings")[2]


def test_the_best_run_of_a_table_is_first(tmp_path: Path) -> None:
    runs = [made(tmp_path / name) for name in ("a", "b", "c")]
    for run, loss in zip(runs, (0.5, 0.125, float("nan")), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 300, "eval_loss": loss}) + "\n")
    out = tmp_path / "sweep.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    table = out.read_text().partition("<tbody>")[2]
    assert table.index("</span>b<") < table.index("</span>a<") < table.index("</span>c<")


def test_runs_of_one_name_have_their_paths(tmp_path: Path) -> None:
    runs = [made(tmp_path / folder / "run") for folder in ("a", "b")]
    assert [run.name for run in read_runs([RunSource(run) for run in runs])] == [str(run) for run in runs]

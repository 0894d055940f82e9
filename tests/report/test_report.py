"""The report of a run: complete, offline, small at a million steps, and its extremes kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp.config import load, to_toml
from fsdp.report.__main__ import main
from fsdp.report.curves import thin


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "night"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(load(["--optim.lr", "0.004"])))
    steps = [{"step": n, "loss": 2 / n, "grad_norm": 1.0, "lr": 1e-3, "step_time_s": 0.1, "per_s": 10.0} for n in range(1, 200)]
    lines = [*steps, {"step": 199, "eval_loss": 0.25, "eval_accuracy": 0.9553}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = [
        {"event": "start", "time": "T1", "launcher": "torchrun", "nodes": ["a"], "ranks": 2, "from_step": 0, "changed": []},
        {
            "event": "start",
            "time": "T2",
            "launcher": "ray",
            "nodes": ["<b>"],
            "ranks": 4,
            "from_step": 50,
            "changed": ["optim.lr: 1 → 2"],
        },
        {"event": "end", "time": "T3", "step": 199, "why": "the last step"},
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    return folder


def test_it_tells_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    text = Path(capsys.readouterr().out.strip()).read_text()
    for expected in (
        "95.53%",
        "0.2500",
        "killed, or still running",
        "the last step",
        "optim.lr",
        "0.004",
        "&lt;b&gt;",
        "<polyline",
    ):
        assert expected in text


def test_it_loads_nothing_from_anywhere(run: Path) -> None:
    main([str(run)])
    assert not re.findall(r"(?:src|href)=|https?://|url\(|<script", (run / "report.html").read_text())


def test_two_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in run.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert main([str(run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    assert "other training" in (tmp_path / "both.html").read_text()


def test_a_spike_in_a_million_steps_stays() -> None:
    points = [(float(n), 1.0) for n in range(1_000_000)]
    points[654_321] = (654_321.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 1200
    assert (654_321.0, 99.0) in kept


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "0 runs were named"),
        (["no-such-run"], "no-such-run is no run directory"),
        (["--outt", "x"], "--outt is not a flag"),
        (["x", "--out"], "--out has no value"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "HINT:" in error
    assert error.count("\n") == 1

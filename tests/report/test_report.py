"""The report of a run: its content, its extremes, its size and speed at a million steps, missing files."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.config import load, to_toml
from fsdp.report import compare, page
from fsdp.report.__main__ import main
from fsdp.report.curves import label, running_median, ticks
from fsdp.report.run_data import read_run
from fsdp.report.series import Series, thin


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def made(folder: Path, steps: int = 200, **flags: object) -> Path:
    """A run directory as a run leaves it, without having run."""
    folder.mkdir(parents=True)
    words = [word for name, value in flags.items() for word in (f"--{name.replace('__', '.')}", str(value))]
    (folder / "config.toml").write_text(to_toml(load(["--optim.lr", "0.004", *words])))
    lines = [
        {
            "step": n,
            "loss": 2 / n,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "step_time_s": 0.1,
            "data_wait_s": 0.004,
            "per_s": 10.0,
        }
        for n in range(1, steps)
    ]
    write(folder / "metrics.jsonl", [*lines, {"step": steps - 1, "eval_loss": 0.25, "eval_accuracy": 0.9553}])
    first = {
        "event": "start",
        "time": "T1",
        "launcher": "torchrun",
        "nodes": ["a"],
        "ranks": 2,
        "from_step": 0,
        "changed": [],
    }
    second = first | {"time": "T2", "launcher": "ray", "nodes": ["<b>"], "ranks": 4, "from_step": 50}
    second["changed"] = ["optim.lr: 1 → 2"]
    write(
        folder / "history.jsonl",
        [first, second, {"event": "end", "time": "T3", "step": steps - 1, "why": "the last step"}],
    )
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "night")


def report(*runs: Path, out: Path | None = None) -> str:
    words = [*map(str, runs), *(["--out", str(out)] if out else [])]
    assert main(words) == 0
    return (out or runs[0] / "report.html").read_text()


def test_the_page_shows_results_settings_and_starts(run: Path) -> None:
    text = report(run)
    for expected in (
        "95.53%",
        "0.2500",
        "killed, or its node was lost",
        "the last step",
        "optim.lr",
        "0.004",
        "&lt;b&gt;",
        "<polyline",
    ):
        assert expected in text, expected


def test_it_loads_nothing_from_anywhere(run: Path) -> None:
    text = report(run)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://|url\(|@import""", text)
    assert "default-src 'none'" in text


def test_two_runs_are_shown_with_their_differences(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", steps=100, optim__beta2=0.9)
    text = report(run, other, out=tmp_path / "both.html")
    assert "other, training" in text
    assert re.search(r"optim\.beta2</td>.*0\.95</td>.*0\.9</td>", text)
    assert "-50.3%" in text  # 199 steps and 99
    assert "Different settings" in text


def test_one_slow_step_does_not_change_the_step_time_that_is_compared(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other")
    lines = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines.replace('"step_time_s": 0.1', '"step_time_s": 90.0', 1))
    text = report(run, other, out=tmp_path / "both.html")
    assert re.search(r"median step</td>.*>the same<", text)


def with_step_times(run: Path, times: list[float]) -> Path:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in records if "step_time_s" in one]
    for one, seconds in zip(steps, itertools.cycle(times), strict=False):
        one["step_time_s"] = seconds
    write(run / "metrics.jsonl", steps)
    return run


@pytest.mark.parametrize(
    ("times", "told"),
    [([0.115, 0.125, 0.120], "+20.0% ("), ([0.05] * 20 + [0.2] * 20, "")],
)
def test_a_difference_within_the_spread_is_neither_better_nor_worse(
    times: list[float], told: str, run: Path, tmp_path: Path
) -> None:
    with_step_times(run, [0.095, 0.1, 0.105])
    other = with_step_times(made(tmp_path / "other"), times)
    rows = compare.figures(compare.differences(read_run(run), read_run(other)))
    row = next(row for row in rows if row[0] == "median step")
    assert " to " in str(row[1])
    assert told in str(row[3])
    assert ("worse" in str(row[3]) or "better" in str(row[3])) is bool(told)


# ---------------------------------------------------------------- starts


@pytest.mark.parametrize(
    ("event", "outcome", "why"),
    [
        ({"event": "end", "step": 9, "why": "the last step"}, "finished", "the last step"),
        ({"event": "end", "step": 9, "why": "the time limit"}, "stopped", "the time limit"),
        (
            {"event": "end", "step": 9, "why": "the step of the last", "how": "finished"},
            "finished",
            "the step of the last",
        ),
        ({"event": "end", "step": 9, "why": "TrainingError: step 10: loss nan"}, "failed", "loss nan"),
        ({"event": "crash", "step": 9, "code": 137}, "failed", "code 137"),
        ({"event": "lost", "step": 9, "why": "its node lost"}, "killed", "its node lost"),
        ({"event": "unmet", "step": 9}, "failed", "the rendezvous of its nodes failed"),
    ],
)
def test_each_start_has_its_outcome(tmp_path: Path, event: dict[str, Any], outcome: str, why: str) -> None:
    write(tmp_path / "history.jsonl", [{"event": "start", "from_step": 0, "ranks": 1}, event])
    (start,) = read_run(tmp_path).starts
    assert (start.outcome, start.to_step) == (outcome, 9)
    assert why in start.why


def test_a_start_without_an_end_is_running_while_its_lock_is_recent(tmp_path: Path) -> None:
    write(tmp_path / "history.jsonl", [{"event": "start", "from_step": 0, "ranks": 1}])
    assert read_run(tmp_path).outcome == "killed"
    (tmp_path / "CLAIM").touch()
    assert read_run(tmp_path).outcome == "running"


def test_save_times_are_read(run: Path) -> None:
    write(run / "saves.jsonl", [{"step": 100, "stall_s": 0.25, "write_s": 7.5, "bytes": 5}])
    assert read_run(run).saves[100].write_s == 7.5


# ---------------------------------------------------------------- what is missing or broken


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl", "history.jsonl"])
def test_one_file_alone_is_enough_for_a_page(run: Path, left: str) -> None:
    for file in run.iterdir():
        if file.name != left:
            file.unlink()
    assert "</html>" in report(run)


def test_of_very_many_numbers_the_first_are_drawn_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of 20,000 metrics took 17 seconds: it shows 12 curves, and 100 folded."""
    drawn, draw = list[str](), page.chart

    def chart(title: str, *args: Any, **more: Any) -> Any:
        drawn.append(title)
        return draw(title, *args, **more)

    monkeypatch.setattr(page, "chart", chart)
    write(
        tmp_path / "metrics.jsonl", [{"step": n, **{f"mine/{i:03}": n for i in range(300)}} for n in (1, 2)]
    )
    text = report(tmp_path)
    assert [title for title in drawn if title.startswith("mine/")] == [f"mine/{i:03}" for i in range(112)]
    assert "mine/111" in text


def test_empty_files_make_a_page(tmp_path: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "history.jsonl"):
        (tmp_path / name).touch()
    assert "no step was recorded" in report(tmp_path)


@pytest.mark.parametrize("steps", [2, 3])
def test_one_or_two_steps_make_a_page(tmp_path: Path, steps: int) -> None:
    text = report(made(tmp_path / "short", steps=steps))
    assert "nan" not in text.lower()


def test_lines_cut_off_or_garbled_are_counted_and_left_out(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text('garbage\n[1, 2]\n{"no": 1}\n' + whole + '{"step": 200, "lo')
    assert len(read_run(run).series["loss"]) == 199
    assert "left out: 4 lines of metrics.jsonl that could not be read" in report(run)


def test_values_that_are_not_finite_are_noted_and_not_drawn(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 200, "loss": NaN}\n{"step": 201, "loss": Infinity}\n'
            '{"step": 202, "loss": "x", "lr": true}\n'
        )
    text = report(run)
    assert "2 not finite" in text
    assert "first at step 200" in text
    assert not re.search(r'points="[^"]*(nan|inf)', text)


def test_a_curve_without_a_finite_value_has_their_number(run: Path) -> None:
    write(run / "metrics.jsonl", [{"step": n, "loss": float("nan"), "lr": 0.1} for n in range(1, 40)])
    text = report(run)
    assert "<b>Loss</b>" in text
    assert '<strong class="bad">39 not finite</strong>, the first at step 1' in text
    write(run / "metrics.jsonl", [{"step": 7, "loss": float("inf")}])
    text = report(run)
    assert "1 not finite" in text
    assert "no step was recorded" not in text


def test_curves_beyond_the_first_are_folded_and_many_are_counted(run: Path) -> None:
    def curves(count: int) -> str:
        write(run / "metrics.jsonl", [{"step": 1, **{f"loss/source-{n}": 1.0 for n in range(count)}}])
        return report(run)

    text = curves(50)
    assert [f"<b>loss/source-{n}</b>" in text for n in range(50)] == [True] * 50
    assert "<summary>38 further curves</summary>" in text
    assert "further curve" not in curves(12)
    assert "<summary>100 further curves; 8 more are in metrics.jsonl</summary>" in curves(120)


def test_a_config_that_is_not_toml_leaves_a_note(run: Path) -> None:
    (run / "config.toml").write_text("a = [")
    assert "is not TOML" in report(run)


def test_html_in_names_stays_text(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    run = made(tmp_path / "run & <i>", model__name=evil)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, evil: 1.0}) + "\n" + json.dumps({"step": 6, evil: 2.0}) + "\n")
    text = report(run)
    assert "<img" not in text
    assert "</script><img" not in text
    assert "<i>" not in text.replace('<i class="cursor"></i>', "").replace("<i class=", "")


def test_a_step_that_was_made_twice_keeps_its_last_value(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl",
        [{"step": n, "loss": v} for n, v in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0), (3, 6.0))],
    )
    loss = read_run(tmp_path).series["loss"]
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist() == [1, 5, 6]


# ---------------------------------------------------------------- a million steps


def test_a_spike_in_a_million_steps_stays() -> None:
    values = np.ones(1_000_000)
    values[654_321], values[7] = 99.0, -5.0
    band = thin(Series(np.arange(1_000_000.0), values))
    assert len(band.steps) <= 720
    assert band.high.max() == 99.0
    assert band.low.min() == -5.0
    assert abs(band.steps[band.high.argmax()] - 654_321) < 3000


@pytest.mark.long
@pytest.mark.slow
def test_a_million_steps_take_seconds_and_less_than_two_megabytes(tmp_path: Path) -> None:
    run = made(tmp_path / "long")
    names = ("loss", "grad_norm", "lr", "step_time_s", "data_wait_s", "per_s", "max_mem_gib")
    noise = np.random.default_rng(0).random((1000, len(names)))
    rows = [
        ", ".join(f'"{name}": {value!r}' for name, value in zip(names, row, strict=True))
        for row in noise.tolist()
    ]
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {n}, {rows[n * 7919 % 1000]}}}\n' for n in range(1_000_000))
    began = time.process_time()
    text = report(run)
    spent = time.process_time() - began
    assert len(text) < 2_000_000
    assert "999,999" in text
    assert spent < 60, f"{spent:.0f} s of processor time"


# ---------------------------------------------------------------- axes


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 17), (1e-9, 4e-9), (0, 1e12), (0.123, 0.124)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert all(low - 1e-12 <= value <= high * (1 + 1e-9) for value in found)
    assert len({label(value) for value in found}) == len(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1.235M"), (12500, "12.5k"), (0.5, "0.5"), (3e-5, "3e-5"), (1500, "1,500")],
)
def test_labels_are_short(value: float, text: str) -> None:
    assert label(value) == text


def test_a_running_median_is_unbiased_and_ignores_spikes() -> None:
    values = np.arange(50.0)
    assert np.allclose(running_median(values, 5), values)
    values[25] = 1e9
    assert running_median(values, 5).max() <= 49


# ---------------------------------------------------------------- memory


def with_accounts(run: Path, activations: int) -> Path:
    peak = {
        "bytes": (1 << 20) + activations,
        "step": 2,
        "phase": "backward",
        "kinds": {"parameters": 1 << 20, "activations": activations},
    }
    (run / "profile").mkdir()
    for rank in range(2):
        account = {"format": 1, "rank": rank, "peak": peak, "phases": {"backward": peak}}
        (run / "profile" / f"rank{rank}_memory.json").write_text(json.dumps(account))
    return run


def test_two_profiled_runs_have_bars_on_one_scale(run: Path, tmp_path: Path) -> None:
    other = with_accounts(made(tmp_path / "other"), 1 << 20)
    text = report(with_accounts(run, 3 << 20), other, out=tmp_path / "both.html")
    part = text[text.index("Memory of both") : text.index("Different settings")]
    assert "night, rank 0" in part
    assert "other, rank 0" in part
    assert "width:75.00%" in part.replace(" ", "")  # 3 of 4 MiB
    assert part.replace(" ", "").count("width:25.00%") == 3
    assert re.search(r"peak of tensors, a rank</td>.*4 MiB</td>.*2 MiB</td>.*-50.0% better", text)


def test_a_profiled_run_shows_memory_by_kind_and_phase(run: Path) -> None:
    with_accounts(run, 2 << 20)
    (run / "profile" / "rank2_memory.json").write_text('{"format": 1')
    text = report(run)
    assert "rank 1" in text
    assert "activations 2 MiB" in text
    assert "rank 2" not in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no run was named"),
        (["no-such-run"], "no-such-run is not a run directory"),
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

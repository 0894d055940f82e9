"""The report: what the page shows of a run, of two runs, of damaged files, and of a million steps."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdp.report.__main__ import main
from fsdp.report.run_data import read_run
from tests.report.made_run import NOON, made, report, verdict, watched, write

EVIL = """</script></title></style>"'><img src=x onerror=alert(1)>{{ 7 * 7777 }}"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return watched(made(tmp_path / "night"))


def test_the_page_has_outcome_failures_time_memory_and_settings(run: Path) -> None:
    text = report(run)
    expected = """95.53% | 0.2500 | killed, or its node was lost | the last step | 0.004 | &lt;b&gt;
        | &lt;i&gt;2 | <polyline | rank 2 is stopped (SIGSTOP) | ranks 0, 1, 3 wait in all_gather_single
        | kill -CONT 4242 on n1 | watch/stopped-000412/ | 2026-01-01 12:01:00 UTC | Stacks of stopped
        | &lt;forward&gt; | exposed communication | title="forward 40 ms" | activations 2 MiB
        | resumed at this step"""
    assert [part for part in expected.split("|") if part.strip() not in text] == []
    assert "evaluation" not in text.partition("Where the time goes")[2].partition("<section>")[0]
    assert 'class="note"' not in text


def test_it_loads_nothing_and_nothing_in_it_is_html(tmp_path: Path) -> None:
    run = watched(made(tmp_path / "run & <i>", model__name=EVIL))
    write(run / "metrics.jsonl", [{"step": n, EVIL: 1.0} for n in (1, 2)])
    write(run / "watch" / "verdicts.jsonl", [verdict(what=EVIL, hint=EVIL, nodes=[EVIL])])
    text = report(run)
    assert "<img" not in text
    assert "54439" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://|url\(|@import""", text)
    assert "default-src 'none'" in text


def test_held_out_answers_of_the_last_step_come_first(run: Path) -> None:
    rows = [{"step": n, "question": "why?", "reference": "so", "answer": f"at {n}"} for n in (5, 10)]
    write(run / "answers.jsonl", rows)
    text = report(run).partition("Held-out answers")[2]
    assert 0 < text.find("at 10") < text.find("At step 5") < text.find("at 5")


def test_curves_beyond_the_first_are_folded_and_the_rest_counted(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl", [{"step": n, **{f"mine/{i:03}": n for i in range(300)}} for n in (1, 2)]
    )
    text = report(tmp_path)
    assert "mine/111" in text
    assert "<b>mine/150" not in text
    assert "<summary>100 further curves; all are in metrics.jsonl" in text


# ---------------------------------------------------------------- two runs


def test_two_runs_are_shown_with_their_differences(run: Path, tmp_path: Path) -> None:
    other = watched(made(tmp_path / "other", steps=100, optim__beta2=0.9))
    text = report(run, other, out=tmp_path / "both.html")
    assert "other, training" in text
    assert re.search(r"optim\.beta2</td>.*0\.95</td>.*0\.9</td>", text)
    assert "-50.3%" in text  # 199 steps and 99
    assert "Where the time goes: other" in text


# ---------------------------------------------------------------- starts


@pytest.mark.parametrize(
    ("event", "outcome", "why"),
    [
        ({"event": "end", "step": 9, "why": "the time limit"}, "stopped", "the time limit"),
        (
            {"event": "end", "step": 9, "why": "the step of the last", "how": "finished"},
            "finished",
            "the last",
        ),
        ({"event": "crash", "job": "1", "restart": 0, "step": 9, "code": 137}, "failed", "code 137"),
        ({"event": "lost", "step": 9, "why": "its node lost"}, "killed", "its node lost"),
        ({"event": "unmet", "step": 9}, "failed", "rendezvous"),
    ],
)
def test_each_start_has_its_outcome(tmp_path: Path, event: dict[str, Any], outcome: str, why: str) -> None:
    write(tmp_path / "history.jsonl", [{"event": "start", "from_step": 0, "ranks": 1}, event])
    (start,) = read_run(tmp_path).starts
    assert (start.outcome, start.to_step) == (outcome, 9)
    assert why in start.why


def test_a_start_without_an_end_is_running_while_its_lock_is_recent(tmp_path: Path) -> None:
    write(tmp_path / "history.jsonl", [{"event": "start", "from_step": 0, "ranks": 1}])
    assert read_run(tmp_path).starts[-1].outcome == "killed"
    (tmp_path / "CLAIM").touch()
    assert read_run(tmp_path).starts[-1].outcome == "running"


STALL = verdict(kind="storage", step=100, what="storage is slow")
DIED = verdict(kind="died", step=5000, what="rank 2 died", time=NOON + 600)
ENDED = {"time": NOON + 601, "kind": "ended", "ranks": [0], "what": "by the watch"}
NO_END = "no end was recorded: killed, or its node was lost"


@pytest.mark.parametrize(
    ("verdicts", "why", "outcome"),
    [
        ([STALL, DIED, ENDED], f"{NO_END}; rank 2 died", "killed"),
        ([STALL, verdict(what="rank 1 stands still", step=5000), ENDED, DIED],
         f"{NO_END}; rank 1 stands still", "killed"),
        ([STALL], NO_END, "killed"),
        ([DIED], f"{NO_END}; rank 2 died", "killed"),
    ],
)  # fmt: skip
def test_the_reason_of_an_end_is_the_verdict_that_the_run_did_not_survive(
    verdicts: list[dict[str, Any]], why: str, outcome: str, tmp_path: Path
) -> None:
    start = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 0, "ranks": 4}
    write(tmp_path / "history.jsonl", [start])
    write(tmp_path / "metrics.jsonl", [{"step": 4999, "loss": 1.0}])
    write(tmp_path / "watch" / "verdicts.jsonl", verdicts)
    (ended,) = read_run(tmp_path).starts
    assert (ended.why, ended.outcome) == (why, outcome)
    assert why in report(tmp_path)


def test_a_rank_without_stacks_is_shown_by_one_that_waits_for_it(run: Path) -> None:
    folder = run / "watch" / "stopped-000412"
    (folder / "rank-2.txt").write_text("did not answer\n")
    (folder / "rank-0.txt").write_text("training:\n  torch/distributed.py:4394 all_gather_single\n")
    (only,) = read_run(run).faults
    assert only.stacks.startswith("rank-2:\ndid not answer\n\nrank-0:\ntraining:")
    assert only.ended


# ---------------------------------------------------------------- what is missing or broken


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "history.jsonl"])
def test_one_file_alone_is_enough_even_if_it_is_empty(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(run / name, tmp_path / "alone" / name)
    assert "</html>" in report(tmp_path / "alone")
    (tmp_path / "alone" / name).write_text("")
    assert "no step was recorded" in report(tmp_path / "alone")


@pytest.mark.parametrize(
    ("name", "odd", "note"),
    [
        ("metrics.jsonl", '{"step": 7, "lo', "1 line of metrics"),
        ("watch/timing.jsonl", '{"ranks": 3, "from_step": 0, "step": 1}\n', "timing.jsonl could not be"),
        ("profile/rank1_memory.json", "}", "rank1_memory.json could not be read"),
        ("config.toml", "a = [", "is not TOML"),
    ],
)
def test_what_cannot_be_read_is_left_out_and_noted_once(run: Path, name: str, odd: str, note: str) -> None:
    with (run / name).open("a") as file:
        file.write(odd)
    text = report(run)
    assert text.count(note) == 1
    assert text.count('class="note"') == 1


def test_values_that_are_not_finite_are_counted_and_not_drawn(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "loss": NaN}\n{"step": 201, "loss": 1e308}\n{"step": 202, "loss": "x"}\n')
    text = report(run)
    assert "2 not finite" in text
    assert "first at step 200" in text
    assert not re.search(r'points="[^"]*(nan|inf)', text)
    write(run / "metrics.jsonl", [{"step": n, "loss": float("nan")} for n in range(1, 40)])
    assert '<strong class="bad">39 not finite</strong>, the first at step 1' in report(run)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "0 runs: a page shows one run"),
        (["a", "b"], "two with --out"),
        (["no-such-run"], "no-such-run is not a run directory"),
        (["--outt", "x"], "--outt is not a flag"),
        (["x", "--out"], "--out has no value"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "HINT:" in error
    assert error.count("\n") == 1


# ---------------------------------------------------------------- numbers


def test_a_step_that_was_made_twice_keeps_its_last_value(tmp_path: Path) -> None:
    pairs = ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0), (3, 6.0))
    write(tmp_path / "metrics.jsonl", [{"step": step, "loss": value} for step, value in pairs])
    loss = read_run(tmp_path).series["loss"]
    assert (loss.steps.tolist(), loss.values.tolist()) == ([1, 2, 3], [1, 5, 6])


PROBE = """<script>
addEventListener("load", () => {
  const figure = document.querySelector("figure.chart");
  figure.focus();
  figure.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  document.body.dataset.readout = document.querySelector(".readout").textContent;
  document.body.dataset.loaded = performance.getEntriesByType("resource").length;
  document.body.dataset.wider = document.documentElement.scrollWidth - innerWidth;
});
</script></body>"""


@pytest.mark.needs("browser")
def test_in_a_browser_an_arrow_key_reads_a_curve_and_nothing_is_loaded(run: Path, tmp_path: Path) -> None:
    text = report(run, watched(made(tmp_path / "other")), out=tmp_path / "both.html")
    page = tmp_path / "probed.html"
    # without the policy of the page, which forbids the probe
    page.write_text(re.sub("<meta http-equiv=[^>]*>", "", text).replace("</body>", PROBE))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    command = ["chromium", *options, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    data = dict(re.findall(r'data-(readout|loaded|wider)="([^"]*)"', seen))
    assert data["readout"].startswith("step 1 "), data
    assert data["loaded"] == "0"
    assert int(data["wider"]) <= 0

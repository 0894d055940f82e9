"""The watch's files on the page: times by rank, verdicts with stacks, late ranks, spikes; and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp.report.__main__ import main
from fsdp.report.file_notes import Notes
from fsdp.report.run_data import read_run
from fsdp.report.watch_records import WAITING, read_watched
from tests.report.test_report import made, write

TIMES = {
    "data": 0.001,
    "forward": 0.02,
    "backward": 0.04,
    "reduce": 0.002,
    "optimizer": 0.01,
    "record": 0.0,
    "waiting": 0.008,
}
NOON = 1767268800.0
"""2026-01-01 12:00 UTC"""


def times(step: int, before: int, **changes: float) -> dict[str, Any]:
    return {
        "time": NOON,
        "from_step": before,
        "step": step,
        "seconds": 1.0,
        "ranks": {"0": TIMES, "1": {**TIMES, **changes}},
    }


def verdict(**changes: Any) -> dict[str, Any]:
    known = {
        "time": NOON + 60, "kind": "stopped", "ranks": [2], "nodes": ["n1"], "step": 412,
        "what": "rank 2 is stopped (SIGSTOP)", "others": "ranks 0, 1, 3 wait in all_gather_single",
        "hint": "kill -CONT 4242 on n1", "folder": "stopped-000412",
    }  # fmt: skip
    return known | changes


def watched(run: Path) -> Path:
    """Adds every file that the watch writes."""
    folder = run / "watch"
    (folder / "stopped-000412").mkdir(parents=True)
    (folder / "stopped-000412" / "rank-2.txt").write_text('  File "model.py", line 7 in <forward>\n')
    write(folder / "timing.jsonl", [times(10, 0), times(30, 10, forward=0.05, waiting=0.0)])
    write(
        folder / "verdicts.jsonl",
        [verdict(), {"time": NOON + 61, "kind": "ended", "ranks": [0, 1], "what": "by the watch"}],
    )
    late = {"time": NOON, "rank": 3, "node": "n2", "percent": 18.2, "since_step": 410, "step": 434}
    write(
        folder / "late.jsonl",
        [late, {"time": NOON, "over": "rank 3 is not late any more, at step 500"}, late | {"rank": 1}],
    )
    write(
        folder / "spikes.jsonl", [{"step": 99, "grad_norm": 57.5, "usual": 1.25, "samples": list(range(40))}]
    )
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return watched(made(tmp_path / "night"))


def text_of(run: Path) -> str:
    assert main([str(run)]) == 0
    return (run / "report.html").read_text()


def test_times_are_weighted_by_their_steps(run: Path) -> None:
    found = read_watched(run, Notes()).timing
    assert found.ranks[1]["forward"] == pytest.approx((10 * 0.02 + 20 * 0.05) / 30)
    assert found.mean("forward") == pytest.approx((0.02 + 0.04) / 2)
    assert found.course["forward"].steps.tolist() == [10, 30]
    assert found.course["forward"].values.tolist() == pytest.approx([0.02, 0.035])


def test_each_rank_has_its_times(run: Path) -> None:
    text = text_of(run)
    assert "Where the time goes" in text
    assert "exposed communication" in text
    assert 'title="forward 40 ms"' in text
    assert "Over the steps, mean of the ranks" in text
    assert "evaluation" not in text.partition("Where the time goes")[2].partition("<section>")[0], (
        "it took no time"
    )


def test_the_rank_that_waits_least_is_shown_among_many(tmp_path: Path) -> None:
    run = made(tmp_path / "wide")
    (run / "watch").mkdir()
    ranks = {str(rank): {**TIMES, WAITING: 0.0 if rank == 77 else 0.01} for rank in range(96)}
    write(run / "watch" / "timing.jsonl", [{"from_step": 0, "step": 5, "ranks": ranks}])
    text = text_of(run)
    assert '<span class="name">rank 77</span>' in text
    assert '<span class="name">rank 50</span>' not in text


def test_a_verdict_is_shown_with_its_hint_and_stacks(run: Path) -> None:
    text = text_of(run)
    for expected in (
        "<h2>Failures",
        "rank 2 is stopped (SIGSTOP)",
        "ranks 0, 1, 3 wait in all_gather_single",
        "kill -CONT 4242 on n1",
        "watch/stopped-000412/",
        "2026-01-01 12:01:00 UTC",
        "Stacks of rank 2",
        "&lt;forward&gt;",
    ):
        assert expected in text, expected
    (one,) = read_watched(run, Notes()).verdicts
    assert one.ended


def test_a_rank_without_stacks_is_shown_by_a_rank_that_waits_for_it(run: Path) -> None:
    folder = run / "watch" / "stopped-000412"
    (folder / "rank-2.txt").write_text("did not answer\n")
    (folder / "rank-0.txt").write_text("training:\n  torch/distributed.py:4394 all_gather_single\n")
    (one,) = read_watched(run, Notes()).verdicts
    assert one.stacks.startswith("did not answer\n\nrank 0:\ntraining:")


def test_a_start_without_a_recorded_end_has_the_watchs_verdict(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    first = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 0, "ranks": 4}
    write(tmp_path / "history.jsonl", [first, first | {"time": "2026-01-01T12:02:00+00:00", "from_step": 9}])
    ended = {"time": NOON + 61, "kind": "ended", "ranks": [0]}
    second = verdict(time=NOON + 300, what="of the second")
    write(tmp_path / "watch" / "verdicts.jsonl", [verdict(), ended, second])
    one, other = read_run(tmp_path).starts
    assert (one.why, one.outcome, one.to_step) == (
        "ended by the watch: rank 2 is stopped (SIGSTOP)",
        "failed",
        411,
    )
    assert other.why == "of the second; no end was recorded: killed, or its node was lost"


def test_a_crashed_start_has_both_reasons(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    start = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 0, "ranks": 4}
    write(tmp_path / "history.jsonl", [start, {"event": "crash", "code": 7, "step": 400}])
    write(tmp_path / "watch" / "verdicts.jsonl", [verdict()])
    (one,) = read_run(tmp_path).starts
    assert one.why == "its ranks exited with code 7; rank 2 is stopped (SIGSTOP)"


STALL = verdict(kind="storage", step=100, what="storage is slow")
DIED = verdict(kind="died", step=5000, what="rank 2 died", time=NOON + 600)
ENDED = {"time": NOON + 601, "kind": "ended", "ranks": [0], "what": "by the watch"}
NO_END = "no end was recorded: killed, or its node was lost"


@pytest.mark.parametrize(
    ("verdicts", "why", "outcome"),
    [
        ([STALL, DIED, ENDED], "ended by the watch: rank 2 died", "failed"),
        ([DIED, verdict(kind="lost", what="rank 0 ended", time=NOON + 600), ENDED],
         "ended by the watch: rank 2 died", "failed"),
        ([STALL, verdict(what="rank 1 stands still", step=5000), ENDED, DIED],
         "ended by the watch: rank 1 stands still", "failed"),
        ([STALL], NO_END, "killed"),
        ([STALL, verdict(kind="data", what="rank 1 reads", step=4999)], f"rank 1 reads; {NO_END}", "killed"),
    ],
)  # fmt: skip
def test_a_stall_that_was_survived_is_not_what_ended_a_start(
    verdicts: list[dict[str, Any]], why: str, outcome: str, tmp_path: Path
) -> None:
    (tmp_path / "watch").mkdir()
    start = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 0, "ranks": 4}
    write(tmp_path / "history.jsonl", [start])
    write(tmp_path / "metrics.jsonl", [{"step": 4999, "loss": 1.0}])
    write(tmp_path / "watch" / "verdicts.jsonl", verdicts)
    (one,) = read_run(tmp_path).starts
    assert (one.why, one.outcome) == (why, outcome)
    assert why in text_of(tmp_path), "the reason at the head of the page"


def test_a_survived_stall_is_no_reason_beside_the_recorded_one(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    start = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 0, "ranks": 4}
    crash = {"event": "crash", "code": 7, "step": 5000}
    write(tmp_path / "history.jsonl", [start, crash, start | {"time": "2026-01-01T12:02:00+00:00"}])
    write(tmp_path / "watch" / "verdicts.jsonl", [STALL])
    assert read_run(tmp_path).starts[0].why == "its ranks exited with code 7"


def test_a_stall_before_the_first_step_of_a_resumed_start_was_not_survived(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    start = {"event": "start", "time": "2026-01-01T12:00:00+00:00", "from_step": 400, "ranks": 4}
    write(tmp_path / "history.jsonl", [start])
    write(tmp_path / "metrics.jsonl", [{"step": 400, "loss": 1.0}])
    write(tmp_path / "watch" / "verdicts.jsonl", [STALL | {"step": 0}])
    assert read_run(tmp_path).starts[0].why == f"storage is slow; {NO_END}"


def test_late_ranks_and_spikes_are_shown(run: Path) -> None:
    text = text_of(run)
    assert "rank 3 is not late any more, at step 500" in text
    assert "18%" in text
    assert "the end of the run" in text
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 28 more" in text
    assert [one.rank for one in read_watched(run, Notes()).late] == [3, 1]


@pytest.mark.parametrize("name", ["timing", "verdicts", "late", "spikes"])
def test_unreadable_lines_are_left_out(run: Path, name: str) -> None:
    file = run / "watch" / f"{name}.jsonl"
    odd = [
        {"ranks": {"a": 1}, "from_step": 0, "step": 1},
        {"kind": "x", "ranks": ["a"]},
        {"rank": "a"},
        {"step": "a", "grad_norm": []},
    ]
    file.write_text("garbage\n" + "".join(json.dumps(one) + "\n" for one in odd) + file.read_text() + '{"kin')
    found = read_watched(run, Notes())
    assert len(found.timing.ranks) == 2
    assert [one.ranks for one in found.verdicts] == [(2,)]
    assert [one.rank for one in found.late] == [3, 1]
    assert [one.step for one in found.spikes] == [99]


def test_a_run_without_a_watch_has_none_of_it(tmp_path: Path) -> None:
    text = text_of(made(tmp_path / "plain"))
    for absent in (
        "Where the time goes",
        "<h2>Failures",
        "Late ranks",
        "Gradient spikes",
        "Planned and measured",
    ):
        assert absent not in text


def test_the_step_times_of_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = watched(made(tmp_path / "other"))
    write(other / "watch" / "timing.jsonl", [times(10, 0, forward=0.04)])
    out = tmp_path / "both.html"
    assert main([str(run), str(other), "--out", str(out)]) == 0
    assert "forward per step" in out.read_text()
    assert "Where the time goes: other" in out.read_text()


# ---------------------------------------------------------------- planned


def test_a_planned_run_shows_plan_and_measurement(tmp_path: Path) -> None:
    run = made(tmp_path / "planned", plan__predicted_peak_gib=2.0, plan__predicted_step_s=0.08)
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps({"event": "planned", "step": 199, "peak_gib": 2.5, "step_s": 0.1}) + "\n")
    text = text_of(run)
    assert "Planned and measured" in text
    assert "2.5 GiB" in text
    assert text.count("+25.0%") == 2


def test_a_planned_run_in_progress_shows_step_time_only(tmp_path: Path) -> None:
    text = text_of(made(tmp_path / "planned", plan__predicted_peak_gib=2.0, plan__predicted_step_s=0.08))
    assert text.count("+25.0%") == 1

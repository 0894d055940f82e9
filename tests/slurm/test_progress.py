"""What a job script does next: the bounds count progress. Each test writes what a run would have left and asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp import rundir, stop
from fsdp.rundir import RunDir
from launch import progress
from launch.progress import AGAIN, FINISHED, GIVE_UP, REQUEUE


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create(tmp_path / "run")


def reach(run: RunDir, step: int, from_step: int = 0) -> None:
    """A start that got as far as `step`."""
    rundir.append(run.history, {"event": "start", "from_step": from_step})
    rundir.append(run.metrics, {"step": step, "loss": 1.0})


def stopped(run: RunDir, step: int, reason: str) -> None:
    rundir.append(run.history, {"event": "end", "step": step, "why": reason})
    run.stopped.write_text(f"{reason} at step {step}\n")


def judge(run: RunDir, job: str = "7", restart: int = 0) -> progress.Verdict:
    return progress.judge(run, job=job, restart=restart, code=1)


def test_done_is_done(run: RunDir) -> None:
    run.done.touch()
    assert judge(run).code == FINISHED


@pytest.mark.parametrize("reason", progress.SCHEDULERS_REASONS)
def test_stopped_by_the_scheduler_goes_on_later(run: RunDir, reason: str) -> None:
    assert reason in stop.REASONS
    reach(run, 10)
    stopped(run, 10, reason)
    assert judge(run).code == REQUEUE


@pytest.mark.parametrize("reason", ["SIGINT", "the stop file", "--train.stop_after 10"])
def test_stopped_by_a_person_stays_stopped(run: RunDir, reason: str) -> None:
    reach(run, 10)
    stopped(run, 10, reason)
    verdict = judge(run)
    assert verdict.code == FINISHED
    assert reason in verdict.message
    assert f"--run.dir {run.path}" in verdict.message


def test_a_limit_too_short_for_one_step_is_not_requeued_for_ever(run: RunDir) -> None:
    codes = []
    for _ in range(progress.STOPS_WITHOUT_A_STEP):
        reach(run, 10, from_step=10)
        stopped(run, 10, "the deadline")
        codes.append(judge(run).code)
    assert codes == [REQUEUE] * (progress.STOPS_WITHOUT_A_STEP - 1) + [GIVE_UP]


def test_a_step_in_between_starts_the_count_anew(run: RunDir) -> None:
    for step in (10, 10, 10, 10, 11, 11):
        reach(run, step, from_step=10 if step == 10 else 11)
        stopped(run, step, "SIGTERM")
    rundir.append(run.history, {"event": "start", "from_step": 11})
    stopped(run, 12, "SIGTERM")
    assert judge(run).code == REQUEUE


def test_a_crash_is_tried_again_and_at_the_same_step_not_twice(run: RunDir) -> None:
    reach(run, 10)
    assert judge(run).code == AGAIN
    reach(run, 20)
    assert judge(run).code == AGAIN
    reach(run, 20, from_step=15)
    verdict = judge(run)
    assert verdict.code == GIVE_UP
    assert "crashed 2 times after step 20" in verdict.message


def test_a_crash_before_the_first_step_is_tried_once_more(run: RunDir) -> None:
    assert judge(run).code == AGAIN
    verdict = judge(run)
    assert verdict.code == GIVE_UP
    assert "before its first step" in verdict.message


def test_crashes_at_new_steps_leave_the_allocation_in_the_end(run: RunDir) -> None:
    codes = []
    for step in (10, 20, 30, 40):
        reach(run, step)
        codes.append(judge(run, restart=int(step == 40)).code)
    assert codes == [AGAIN, AGAIN, REQUEUE, AGAIN]


def test_the_same_command_again_is_a_new_job_with_new_chances(run: RunDir) -> None:
    reach(run, 20)
    judge(run)
    assert judge(run, job="8").code == AGAIN


def test_nodes_that_met_once_and_do_not_now_are_requeued_a_few_times(run: RunDir) -> None:
    codes = [progress.unmet(run, job="7").code for _ in range(progress.MEETINGS_MISSED)]
    assert codes == [REQUEUE, REQUEUE, GIVE_UP]


def test_begin_clears_the_marks_and_explains_a_start_without_an_end(run: RunDir, tmp_path: Path) -> None:
    reach(run, 30)
    for marker in (run.stopped, run.done):
        marker.touch()
    (tmp_path / "job-7.log").touch()
    begun = progress.begin(["--run.dir", str(run.path)], "unused", log=str(tmp_path / "job-7.log"))
    assert begun == run
    assert not run.stopped.exists()
    assert not run.done.exists()
    last = json.loads(run.history.read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("lost", 30)
    assert (run.path / "logs" / "job-7.log").exists()


def test_begin_takes_the_default_and_a_dry_run_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "runs" / "job-7")
    assert progress.main(["begin", "--dry-run", "--default-run-dir", where, "--train.steps", "3"]) == 0
    assert capsys.readouterr().out.strip() == where
    assert not Path(where).exists()


def test_begin_says_a_wrong_flag_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.main(["begin", "--default-run-dir", "unused", "--train.stepps", "3"]) == 2
    assert "did you mean --train.steps" in capsys.readouterr().err

"""What a Slurm job does next: each test writes what a run would have left and asks. The bounds:
tests/launch/test_policy.py.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from fsdp.base.errors import ConfigError, RefusedError
from fsdp.rundir import history, lock
from fsdp.rundir.history import RunDir
from launch import policy, slurm_job
from launch.guard import TOKEN, Failure, Marker
from launch.policy import Act, Allocation, Decision, Kind
from tests.support.locks import acquire


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return history.create(tmp_path / "run")


def reach(run: RunDir, step: int, from_step: int = 0) -> None:
    """A start that got as far as `step`."""
    history.append(run.history, {"event": "start", "from_step": from_step})
    history.append(run.metrics, {"step": step, "loss": 1.0})


def stopped(run: RunDir, step: int, reason: str) -> None:
    history.append(run.history, {"event": "end", "step": step, "why": reason, "how": "stopped"})
    run.stopped.write_text(f"{reason} at step {step}\n")


def judge(run: RunDir, job: str = "7", restart: int = 0, *, unmet: str = "", **allocation: bool) -> Decision:
    allowed = Allocation(**{"requeue": True, **allocation})
    return slurm_job.judge(run, job=job, restart=restart, code=1, allocation=allowed, unmet=unmet)


def fail(run: RunDir, monkeypatch: pytest.MonkeyPatch, kind: Kind, code: int) -> None:
    """What the rank that fails leaves in this start."""
    monkeypatch.setenv(TOKEN, "7-0-0")
    Marker(run, "7-0-0").write(Failure(kind, code, "step 3: loss nan"), rank=1)


def away(*words: object, **more: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_run_that_has_saved_is_requeued_where_its_directory_cannot_be_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reach(run, 10)
    stopped(run, 10, "SIGTERM")
    words = ["judge", str(run.path), "--job", "7", "--code"]
    monkeypatch.setattr(lock.Folder, "claim", away)
    monkeypatch.setattr(Path, "exists", away)
    assert slurm_job.main([*words, "0"]) == slurm_job.REQUEUE
    assert capsys.readouterr().out == "stopped: its ranks have ended with 0. To be requeued.\n"
    assert slurm_job.main([*words, "1"]) == 2
    monkeypatch.undo()
    monkeypatch.setattr(history, "events", away)
    run.stopped.unlink()
    assert slurm_job.main([*words, "1"]) == 4
    assert f"{run.path} cannot be read or written: [Errno 5]" in capsys.readouterr().err


def test_an_error_that_would_come_again_is_final_with_its_own_code(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun has ended with 1; the rank's own code comes from RUN/FAILED."""
    reach(run, 3)
    fail(run, monkeypatch, Kind.FINAL, 5)
    decision = judge(run)
    assert (decision.act, decision.code) == (Act.END, 5)
    assert "step 3: loss nan" in decision.why


@pytest.mark.parametrize(("code", "act"), [(2, Act.END), (4, Act.END), (1, Act.AGAIN), (137, Act.AGAIN)])
def test_a_start_without_a_marker_is_known_by_its_code(run: RunDir, code: int, act: Act) -> None:
    """srun passes a rank's own code on."""
    decision = slurm_job.judge(run, job="7", restart=0, code=code, allocation=Allocation(requeue=True))
    assert decision.act is act
    assert act is Act.AGAIN or decision.code == code


def test_a_refused_start_is_refused_whatever_the_other_job_has_left(run: RunDir) -> None:
    """It may end, or be stopped, between the refusal and this decision."""
    reach(run, 3)
    for leave in (lambda: stopped(run, 3, "SIGUSR1"), run.done.touch):
        leave()
        decision = slurm_job.judge(run, job="7", restart=0, code=4, allocation=Allocation(requeue=True))
        assert (decision.act, decision.code) == (Act.END, 4)


def test_nothing_is_written_where_another_job_holds_the_directory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(run, 10)
    stopped(run, 10, "SIGTERM")
    held = acquire(run.path, "torchrun")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    try:
        with pytest.raises(RefusedError, match="is being written by process"):
            slurm_job.begin(["--run.dir", str(run.path)], {})
        for unmet in ("", "before_node failed on n2"):
            decision = judge(run, unmet=unmet)
            assert (decision.act, decision.code) == (Act.END, 4)
            assert "is being written by process" in decision.why
        assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    finally:
        held.release()


def test_an_error_is_tried_again_and_at_the_same_step_not_twice(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(run, monkeypatch, Kind.ERROR, 1)
    for step in (10, 20):
        reach(run, step)
        assert judge(run).act is Act.AGAIN
    reach(run, 20, from_step=15)
    decision = judge(run)
    assert (decision.act, decision.code) == (Act.END, 1)
    assert "failed again after step 20: no restart. HINT: the first error above" in slurm_job.message(
        run, decision
    )


def test_begin_clears_the_marks_and_explains_a_start_without_an_end(run: RunDir) -> None:
    reach(run, 30)
    for marker in (run.stopped, run.done):
        marker.touch()
    assert slurm_job.begin(["--run.dir", str(run.path)], {})["SHARDRUN_RUN"] == str(run.path)
    assert not run.stopped.exists()
    assert not run.done.exists()
    last = json.loads(run.history.read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("lost", 30)


def test_the_job_s_own_history_is_what_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths at one step, then crashes at new ones, one while starting, and missed meetings."""
    acts = []
    for step in (20, 20, 30, 40):
        reach(run, step)
        acts.append(judge(run, restart=int(step == 40)).act)
    assert acts == [Act.AGAIN, Act.AGAIN, Act.REQUEUE, Act.AGAIN]
    fail(run, monkeypatch, Kind.ERROR, 1)
    assert judge(run, restart=1).act is Act.AGAIN, "no start of its own: before a first step"
    decision = judge(run, restart=2)
    assert decision.act is Act.END
    assert "before the first step of a start" in decision.why
    acts = [judge(run, unmet="the rendezvous failed").act for _ in range(policy.FAILED_RENDEZVOUS)]
    assert acts == [Act.REQUEUE, Act.REQUEUE, Act.END]
    stopped(run, 40, "SIGUSR1")
    said = slurm_job.message(run, judge(run, requeue=False))
    assert said.startswith("stopped: SIGUSR1; this launcher does not requeue. Not requeued;")
    run.done.touch()
    assert slurm_job.message(run, judge(run)) == "done: the run has all its steps."


def test_the_node_of_all_crashes_of_an_allocation_is_left_out(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the watch's verdicts; with those that the job leaves out already."""
    monkeypatch.setenv("SHARDRUN_RECORD", "JobId=7 Requeue=1 BatchFlag=1 ExcNodeList=n9")
    (run.path / "watch").mkdir()
    words = ["judge", str(run.path), "--job", "7", "--code", "137"]
    for step, expected in ((4, slurm_job.AGAIN), (8, slurm_job.AGAIN), (12, slurm_job.REQUEUE)):
        reach(run, step)
        history.append(
            run.path / "watch" / "verdicts.jsonl", {"time": 1e12, "kind": "died", "nodes": ["n2.x"]}
        )
        capsys.readouterr()
        assert slurm_job.main(words) == expected
    assert capsys.readouterr().out.startswith("left_out=(n9,n2)\n")


def test_a_hook_that_fails_on_all_nodes_ends_the_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDRUN_NODES", "n1 n2")
    words = ["judge", str(run.path), "--job", "7", "--code", "1", "--unmet", "the hook failed on n2"]
    assert slurm_job.main([*words, "--failed", "n1,n2"]) == 3
    assert slurm_job.main([*words, "--failed", "n2"]) == slurm_job.REQUEUE
    assert capsys.readouterr().out.endswith("left_out=(n2)\nthe hook failed on n2. To be requeued.\n")


def test_tasks_of_an_array_differ_by_a_flag(run: RunDir) -> None:
    words = ["--run.dir", str(run.path), "--optim.lr", "{task}e-3"]
    program = slurm_job.begin(words, {"SHARDRUN_JOB": "7_3"})["program"]
    assert program[-2:] == ["--optim.lr", "3e-3"]
    with pytest.raises(ConfigError, match=r"no array\. HINT: sbatch --array"):
        slurm_job.begin(words, {"SHARDRUN_JOB": "7"})


def test_a_python_without_torch_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{sys.executable}, has no torch\. HINT: VENV"):
        slurm_job.begin([], {})

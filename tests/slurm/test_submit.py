"""launch/submit.py: what a person types, what is submitted, and the same on this machine without Slurm."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import slurm_request, submit
from launch.slurm_request import Request, minutes
from tests.slurm.cluster import FOREIGN, REPOSITORY, Cluster
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS, STEPS, Run, Undisturbed
from tests.slurm.scenarios import submit as submitted


@pytest.mark.parametrize(("text", "count"), [("30", 30), ("0:30", 1), ("4:00:00", 240), ("1-12:30", 2190)])
def test_times_as_slurm_writes_them(text: str, count: int) -> None:
    assert minutes(text) == count


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "--cluster local --nodes 2",
            "--nodes 2 is for Slurm, and not for --cluster local. HINT: --cluster slurm",
        ),
        ("--cluster debug --tasks-per-node 2", "--cluster debug is one rank, not 2. HINT: --cluster local"),
        ("--cluster pbs", "--cluster pbs is not slurm, local or debug."),
        ("--cluster local --nodes 0", "--nodes 0"),
        ("--cluster local --time soon", "--time soon is not a time."),
        ("--cluster local --time 0", "--time 0 is for Slurm, and not for --cluster local."),
        (
            "--cluster local --gpus-per-node many",
            "--gpus-per-node many is not a number of GPUs, or TYPE:NUMBER. HINT: --gpus-per-node 8",
        ),
        (
            "--cluster local --config recipes/digits.toml",
            "--config is no option of sbatch. HINT: train.py's flags follow `--`: -- --config …",
        ),
        ("--cluster local -- --train.stepps 3", "did you mean --train.steps"),
        ("--cluster local --node 2", "--node is for Slurm, and not for --cluster local."),
        ("--cluster local -- --backend ray", "--backend ray starts the ranks, and so does launch.submit."),
        (
            "--cluster local --array recipes/digits.toml recipes/text.toml -- --backend ray",
            "--backend ray starts the ranks, and so does launch.submit.",
        ),
    ],
)
def test_what_is_typed_wrongly_is_said_in_one_line(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["--dry-run", *typed.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("launch.submit: ")
    assert said in error
    assert error.count("\n") == 1


def test_options_of_sbatch_are_read_with_and_without_values() -> None:
    words = ["--dependency", "afterok:12", "--exclusive", "--gpus-per-task=1"]
    passed = {"dependency": "afterok:12", "exclusive": True, "gpus-per-task": "1"}
    assert slurm_request.read_options(words) == passed


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--ntasks-per-node=4", "--tasks-per-node 8"),
        ("--wait", "--follow"),
        ("--gres=gpu:8", "--tasks-per-node 8, or --gpus-per-node 8 in its place"),
        ("--gpus-per-task=1", "--tasks-per-node 8, or --gpus-per-node 8 in its place"),
        ("--cluster local --dependency=afterok:12", "--cluster slurm"),
    ],
)
def test_an_option_of_sbatch_that_cannot_pass_is_one_line(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["--dry-run", *typed.split()]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f" HINT: {hint}\n")
    assert error.count("\n") == 1


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.slow
def test_any_option_of_sbatch_passes_through(slurm: Cluster, tmp_path: Path) -> None:
    """A dependency, a reservation, mail, GPUs a task, no requeue, a comment of two words."""
    before = slurm.sbatch("--hold", "--output=/dev/null", "--wrap", "true")
    user = getpass.getuser()
    kept = f"StartTime=now Duration=60 Users={user} Nodes=n3 ReservationName=kept Flags=OVERLAP".split()
    slurm.run("scontrol", "create", "reservation", *kept)
    options = [f"--dependency=afterok:{before}", "--reservation", "kept", "--mail-type=END", "--no-requeue"]
    options += ["--gpus-per-task=1", "--tasks-per-node", "2", "--comment=two words"]
    flags = [*FLAGS, "--train.steps", "2", "--run.device", "cpu"]
    job = submitted(slurm, tmp_path, *options, flags=flags)
    facts = slurm.job(job.id)
    slurm.run("scontrol", "release", before)
    assert facts["JobState"] == "PENDING"
    assert facts["Dependency"] == f"afterok:{before}(unfulfilled)"
    assert (facts["Reservation"], facts["Requeue"]) == ("kept", "0")
    assert job.wait() == "COMPLETED", job.log()
    assert job.run.steps == [1, 2]
    assert job.run.starts[0]["ranks"] == 2
    wrong = slurm.run(sys.executable, "-m", "launch.submit", "--typo=3", "--", *flags, check=False)
    assert wrong.returncode == 3
    last = wrong.stderr.splitlines()[-1]
    assert last.startswith("launch.submit: nothing was submitted: sbatch: ")
    assert "--typo" in last


def test_without_slurm_the_way_without_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit.main(["--dry-run"]) == 3
    assert "there is no sbatch here. HINT: --cluster local" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("squeue", "alive"),
    [
        ("echo RUNNING", True),
        ("true", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", True),
    ],
)
def test_a_controller_that_does_not_answer_ends_no_job(
    squeue: str, alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job: Any = SimpleNamespace(job_id="7")
    assert submit._is_alive(job, "slurm") == alive


def test_ranks_follow_the_gpus_or_a_number() -> None:
    assert Request(gpus_per_node="8").ranks_per_node == 8
    assert Request(gpus_per_node="a100:8").ranks_per_node == 8
    assert Request(gpus_per_node="8", tasks_per_node=4).ranks_per_node == 4
    assert Request().ranks_per_node == 1


def test_a_job_submitted_by_a_task_of_an_array_is_no_task_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit would look for the files of the array's task, and the job's script for its run directory."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with submit.job_variables(tmp_path, "slurm"):
        assert "SLURM_ARRAY_TASK_ID" not in os.environ
        assert os.environ["PYTHONPATH"].startswith(str(tmp_path))
    assert os.environ["SLURM_ARRAY_TASK_ID"] == "3"


def test_each_recipe_of_an_array_gets_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.toml").write_text(f"[run]\nseed = {seed}\n")
    batch = submit.plan(["--train.steps", "3"], ["a.toml", "b.toml"])
    assert [run.path.name for run in batch.runs] == ["0-a", "1-b"]
    assert {run.path.parent for run in batch.runs} == {batch.folder}
    assert [(config.run.seed, config.train.steps) for config in batch.configs] == [(1, 3), (2, 3)]


def test_a_queued_job_keeps_its_code_when_its_run_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is edited between two submissions to one run directory, and then not."""
    home = tmp_path / "clone"
    for name in ("fsdp/a.py", "launch/b.py", "slurm/lib.sh", "train.py", "fsdp/__pycache__/a.pyc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("one")
    monkeypatch.setattr(submit, "HOME", home)
    flags = ["--run.dir", str(tmp_path / "run")]
    first = submit.snapshot(submit.plan(flags))
    (home / "fsdp" / "a.py").unlink()
    (home / "train.py").write_text("two")
    second = submit.snapshot(submit.plan(flags))
    assert {path.name for path in first.parent.iterdir()} == {first.name, second.name}
    assert [(first / name).read_text() for name in ("train.py", "fsdp/a.py")] == ["one", "one"]
    assert (second / "train.py").read_text() == "two"
    assert not (second / "fsdp" / "a.py").exists()
    assert not (first / "fsdp" / "__pycache__").exists()


def launch(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch.submit WORDS`, typed in `folder`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return subprocess.run(
        [sys.executable, "-m", "launch.submit", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables},
    )


@pytest.mark.slurm
def test_a_dry_run_prints_the_sbatch_file_and_submits_nothing(tmp_path: Path) -> None:
    need_slurm()
    words = "--dry-run --nodes 4 --gpus-per-node a100:8 --time 4:00:00 --mem 64G --"
    said = launch(tmp_path, *words.split(), *FLAGS)
    assert said.returncode == 0, said.stderr
    lines = "--nodes=4 --gpus-per-node=a100:8 --ntasks-per-node=8 --time=240 --mem=64G --requeue"
    for line in lines.split():
        assert re.search(rf"^#SBATCH {line}$", said.stdout, re.MULTILINE), line
    assert "--signal=USR2@120" in said.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_local_runs_the_same_without_slurm(tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"
    words = ["--cluster", "local", "--tasks-per-node", "2", "--follow", "--"]
    mesh = ["--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "1"]
    said = launch(tmp_path, *words, *FLAGS, *mesh, "--run.dir", str(run))
    assert said.returncode == 0, said.stdout + said.stderr
    assert re.search(r"^cancel  kill \d+$", said.stdout, re.MULTILINE)
    assert f"step {STEPS}" in said.stdout or str(STEPS) in said.stdout, "--follow shows the log"
    assert Run(run).losses == undisturbed.losses(2, 1)
    assert Run(run).starts[0]["launcher"] == "submitit (local)"

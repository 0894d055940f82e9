"""launch/submit.py: what a person types, and what is submitted."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launch import submit
from tests.slurm.cluster import REPOSITORY, Cluster
from tests.slurm.conftest import need_slurm
from tests.slurm.job import FLAGS


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--nodes 0", "--nodes 0"),
        ("--gpus-per-node many", "--gpus-per-node many is not a number of GPUs, or TYPE:NUMBER."),
        (
            "--config recipes/digits.toml",
            "is no option of sbatch. HINT: train.py's flags follow `--`: -- --con",
        ),
        ("-- --train.stepps 3", "did you mean --train.steps"),
        ("-- --backend ray", "--backend ray starts the ranks, and so does launch.submit."),
        ("--ntasks-per-node=4", "HINT: --tasks-per-node 8"),
        ("--array=1-3", "arrays: sbatch --array=0-3 slurm/fsdp.sbatch"),
        ("--cluster local", "--cluster is not for launch.submit. HINT: python -m launch.local"),
        ("--gres=gpu:8", "HINT: --tasks-per-node 8"),
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


def test_without_slurm_the_way_without_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit.main(["--dry-run"]) == 3
    assert "there is no sbatch here. HINT: python -m launch.local" in capsys.readouterr().err


def test_a_queued_job_keeps_its_code_when_its_run_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is edited between two submissions to one run directory."""
    home = tmp_path / "clone"
    for name in ("fsdp/a.py", "launch/b.py", "slurm/lib.sh", "train.py", "fsdp/__pycache__/a.pyc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("one")
    monkeypatch.setattr(submit, "HOME", home)
    first = submit.snapshot(tmp_path / "run")
    (home / "fsdp" / "a.py").unlink()
    (home / "train.py").write_text("two")
    second = submit.snapshot(tmp_path / "run")
    assert {path.name for path in first.parent.iterdir()} == {first.name, second.name}
    assert [(first / name).read_text() for name in ("train.py", "fsdp/a.py")] == ["one", "one"]
    assert (second / "train.py").read_text() == "two"
    assert not (second / "fsdp" / "a.py").exists()
    assert not (first / "fsdp" / "__pycache__").exists()


@pytest.mark.slurm
def test_a_dry_run_prints_the_sbatch_file_and_submits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_slurm()
    monkeypatch.chdir(tmp_path)
    words = "--dry-run --nodes 4 --gpus-per-node a100:8 --time 4:00:00 --mem 64G --"
    assert submit.main([*words.split(), *FLAGS]) == 0
    printed = capsys.readouterr().out
    lines = "--nodes=4 --gpus-per-node=a100:8 --ntasks-per-node=8 --time=4:00:00 --mem=64G --requeue"
    for line in lines.split():
        assert re.search(rf"^#SBATCH {line}$", printed, re.MULTILINE), line
    assert "--signal=USR2@120" in printed
    assert not list(tmp_path.glob("runs/*/code"))


SUBMIT = """
from launch.submit import submit
job = submit([*{flags}, "--run.dir", "{run}"], nodes=2, tasks_per_node=1, time="5", exclude="n3")
try:
    print("RESULT", job.result(300)["step"])
except Exception as error:
    print("RESULT", type(error).__name__, error.exit_code, error)
"""


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "result"),
    [
        (("--train.steps", "3"), "3"),
        (("--optim.lr", "1e30", "--train.nonfinite", "stop"), "TrainingError 5 "),
    ],
)
def test_from_python_the_outcome_is_returned_and_the_error_raised(
    flags: tuple[str, ...], result: str, tmp_path: Path, slurm: Cluster
) -> None:
    program = SUBMIT.format(flags=[*FLAGS, *flags], run=tmp_path / "run")
    said = slurm.run(sys.executable, "-c", program, env={"PYTHONPATH": str(REPOSITORY)}, timeout_s=300).stdout
    assert said.startswith(f"RESULT {result}"), said

"""launch.local: ranks as forks, one that dies, what is not tried again, and a signal that is meant for the
ranks.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.base import proc
from fsdp.rundir import history
from fsdp.rundir.history import RunDir
from tests.support.faulty_file import always, faulty
from tests.support.processes import eventually
from tests.support.resumable import resumable_at

ROOT = Path(__file__).resolve().parents[2]
EVERY = 5
SYNTHETIC = ["--data.name", "synthetic", "--data.args.heldout", "0"]
MODEL = [
    "--model.name", "mlp", "--train.global_batch", "8", "--checkpoint.export", "false",
    "--checkpoint.every_steps", str(EVERY),
]  # fmt: skip


def start(run: Path, *flags: str, data: list[str] = SYNTHETIC) -> subprocess.Popen[str]:
    words = ["--ranks", "2", "--run.dir", str(run), *MODEL, *data, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "launch.local", *words],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def gated(file: Path, last: int) -> list[str]:
    return [
        "--data.name",
        "tests.support.gated:digits",
        f"--data.args.last={last}",
        f"--data.args.gate={file}",
    ]


def steps(run: Path) -> list[int]:
    return [int(record["step"]) for record in history.read_records(RunDir(run).metrics) if "loss" in record]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_rank_brings_all_back_and_loses_no_more_than_an_interval(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", tmp_path / "gate"
    process = start(run, "--train.steps", "60", data=gated(gate, last=30))
    reached = eventually("ten steps, five of them sealed", lambda: resumable_at(run, 10, EVERY), 120)
    victim = proc.children(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    gate.touch()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "a rank ended with SIGKILL after step" in said
    assert "trained: the cross entropy of the logits, the mean over the global batch's samples." in said
    assert steps(run) == list(range(1, 61))
    starts = [event for event in history.read_records(RunDir(run).history) if event["event"] == "start"]
    assert [event["from_step"] >= reached - EVERY for event in starts] == [False, True]


@pytest.mark.slow
def test_a_signal_is_the_ranks_to_act_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, "--train.steps", "100000")
    eventually("three steps", lambda: len(steps(run)) >= 3, 120)
    process.terminate()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert RunDir(run).stopped.read_text().startswith("SIGTERM at step")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "many"], "--ranks many is not a whole number from 1. HINT: --ranks 1"),
        (["--rank", "2"], "--rank is not a flag. HINT: did you mean --ranks?"),
        (["--ranks", "2", "--backend", "ray"], "--backend ray starts the ranks, and so does launch.local."),
    ],
)
def test_a_wrong_flag_is_one_line(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.local", *words], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.needs("fuse")
def test_records_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    """A traceback, and exit code 1."""
    (tmp_path / "history.jsonl").write_text("{}\n")
    with faulty(tmp_path / "history.jsonl", always("read", errno.EIO)):
        process = start(tmp_path, "--train.steps", "1")
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 4
    assert f"{tmp_path} cannot be read or written: [Errno 5]" in said
    assert "Traceback" not in said

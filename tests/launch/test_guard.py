"""launch/guard.py: what an exception means to a launcher, and a final one under torchrun's own restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from fsdp import config as configuration
from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    OneRankError,
    OtherRankFailed,
    RefusedError,
    TrainingError,
)
from fsdp.checkpoint.checkpointer import not_saved
from fsdp.checkpoint.sealing import SaveOutcome
from fsdp.config import load
from fsdp.memory.oom import OutOfMemory
from fsdp.rundir.history import RunDir
from launch import local
from launch.guard import Failure, Marker, failure_of, marker_of
from launch.policy import Kind
from tests.launch.ends import flags_of
from tests.launch.test_local import ROOT


def caused(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause or OSError("the storage is away")
    return error


LOST = SaveOutcome(20, "", "rank 1: lost", cause=RuntimeError("gloo: Connection closed by peer"))
"""A save on a rank whose peer was killed meanwhile."""


@pytest.mark.parametrize(
    ("error", "kind", "code", "echo"),
    [
        (ConfigError("a wrong mesh"), Kind.FINAL, 2, False),
        (TrainingError("loss nan: not finite"), Kind.FINAL, 5, False),
        (caused(OneRankError("sample 3 cannot be read")), Kind.ERROR, 5, False),
        (caused(ConfigError("no module mine"), ImportError("mine")), Kind.PROGRAM, 2, False),
        (LaunchError("rank 1 does not reach n1:29500"), Kind.ERROR, 3, False),
        (CheckpointError("no whole checkpoint"), Kind.ERROR, 4, False),
        (RefusedError("RUN is being written by"), Kind.REFUSED, 4, False),
        (OutOfMemory("rank 0: 3 GiB stood"), Kind.ERROR, 6, False),
        (ValueError("of the user's own"), Kind.ERROR, 1, False),
        (SystemExit(0), Kind.ERROR, 1, False),
        (OtherRankFailed(0, "loss nan", 5), Kind.ERROR, 5, True),
        (RuntimeError("gloo: Connection closed by peer"), Kind.ERROR, 1, True),
        (not_saved(LOST, "step 20 was not saved", ""), Kind.ERROR, 4, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_exception_has_a_kind_and_a_code(error: BaseException, kind: Kind, code: int, echo: bool) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.code, failure.echo) == (kind, code, echo)


def test_a_marker_is_read_by_its_own_start_alone_and_not_every_failure_leaves_one(tmp_path: Path) -> None:
    """Under a torchrun by hand nobody asks for the lock before the ranks do: the directory may be another
    job's.
    """
    config = load(["--run.dir", str(tmp_path)])
    by_hand = marker_of(config, {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "a"})
    assert by_hand is not None
    by_hand.write(Failure(Kind.FINAL, 2, "a wrong mesh"), rank=0)
    first = Marker(RunDir(tmp_path), "job 7, try 1")
    first.write(Failure(Kind.REFUSED, 4, "held"), rank=0)
    first.write(Failure(Kind.ERROR, 1, "peer", echo=True), rank=0)
    assert list(tmp_path.iterdir()) == []
    first.write(Failure(Kind.ERROR, 6, "3 GiB stood"), rank=1)
    assert first.read() == Failure(Kind.ERROR, 6, "3 GiB stood")
    assert Marker(RunDir(tmp_path), "job 7, try 2").read() is None
    assert marker_of(config, {}) is None


@pytest.mark.long
@pytest.mark.slow
def test_torchruns_own_restarts_do_not_meet_an_error_that_repeats_twice(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = [*flags_of("numbers that are not finite"), "--run.dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*torchrun, "--max-restarts=2", "train.py", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, "torchrun's own code"
    assert done.stderr.count("train.py: not tried again, it would fail the same way: ") == 2
    assert "not finite" in done.stderr.partition("Root Cause")[2], "torchrun's own summary"


@pytest.mark.parametrize("main", [train.main, local.main])
def test_ctrl_c_during_a_start_is_one_line(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(configuration, "load", interrupt)
    assert main(["--train.steps", "1"]) == 130
    assert capsys.readouterr().err.endswith(": interrupted while it started; no step was trained.\n")

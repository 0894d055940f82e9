"""ScalingConfig(num_workers=0): Ray calls the function in the driver's process, or in those of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_local import ROOT
from tests.support.runs import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import sys
import shardrun
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def work(flags):
    return shardrun.train(flags).step

def fit(steps, *more):
    flags = [*sys.argv[1:], "--train.steps", steps, *more]
    return TorchTrainer(work, train_loop_config=flags, scaling_config=ScalingConfig(num_workers=0)).fit()

def show(result):
    checkpoint, has_loss = result.metrics["checkpoint"], "loss" in result.metrics
    sys.stdout.write(f"step {result.return_value} of {checkpoint} {has_loss}\\n")  # whole: two ranks write

show(fit("3"))
"""

AFTER_A_FAILURE = """
try:
    fit("6", "--optim.lr", "1e30")
except shardrun.ShardrunError as error:
    print(type(error).__name__)
show(fit("4"))
"""


def printed_by(tmp_path: Path, program: str, *start: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    command = [sys.executable, *start, str(file), *QUIET, "--run.dir", str(tmp_path / "run")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def reported(tmp_path: Path, step: int) -> str:
    return f"step {step} of {tmp_path}/run/checkpoints/step-{step:08} True"


def test_a_function_in_the_drivers_process_trains_fails_and_goes_on(tmp_path: Path) -> None:
    said = printed_by(tmp_path, PROGRAM + AFTER_A_FAILURE)
    wanted = [reported(tmp_path, 3), "NotFiniteError", reported(tmp_path, 4)]
    assert [line for line in said if line in wanted] == wanted, said


def test_a_function_in_the_processes_of_torchrun_trains(tmp_path: Path) -> None:
    said = printed_by(tmp_path, PROGRAM, "-m", "torch.distributed.run", "--nproc_per_node=2")
    assert said.count(reported(tmp_path, 3)) == 2, said

"""A planned run logs and records at its end the plan beside the measured figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp.config import PlanSection
from fsdp.plan.__main__ import main
from fsdp.run.summary import compare_plan
from fsdp.rundir.history import RunDir

ROOT = Path(__file__).parents[2]
PLANNED = PlanSection(gpu="h100", predicted_peak_gib=0.5, predicted_step_s=0.1)


@pytest.mark.long
@pytest.mark.slow
def test_a_planned_run_compares_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = tmp_path / "planned.toml", tmp_path / "run"
    words = (
        f"--plan.fix true --plan.gpu cpu --plan.write {recipe} --train.steps 5 --train.eval_samples 10 "
        "--mesh.replicate 1 --mesh.shard 1 --mesh.strategy fsdp --checkpoint.export false "
        "--model.name mlp --model.args.in_features 784"
    )
    assert main(words.split()) == 0
    done = subprocess.run(
        [sys.executable, "train.py", "--config", str(recipe), "--run.dir", str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"planned [\d.]+ GiB and \S+ s a step; measured [\d.]+ GiB and \S+ s", done.stderr)
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "end", "planned"]
    assert events[-1]["peak_gib"] > 0
    assert events[-1]["step_s"] > 0


def test_the_median_leaves_the_first_steps_out(tmp_path: Path) -> None:
    run, cuda = RunDir(tmp_path), torch.device("cuda")
    assert not compare_plan(PLANNED, cuda, run), "no step"
    records = [
        {"step": step, "step_time_s": seconds, "max_mem_gib": 0.1 * step}
        for step, seconds in enumerate((9.0, 5.0, 0.1, 0.2, 0.3), 1)
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = {"planned_peak_gib": 0.5, "peak_gib": 0.5, "planned_step_s": 0.1, "step_s": 0.2}
    assert compare_plan(PLANNED, cuda, run) == figures
    assert not compare_plan(PLANNED, torch.device("cpu"), run)
    assert not compare_plan(PlanSection(), cuda, run)

"""The pages that lead from nothing to a trained model: docs/first-machine.md from its third part on, on two
CPU ranks in place of eight GPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands

PAGE = ROOT / "docs" / "first-machine.md"
RUN = "runs/first"


def typed() -> list[str]:
    """The page's commands on runs/first, in order, with two ranks and a tenth of the steps."""
    lines = [line for line in commands(PAGE) if RUN in line]
    short = [re.sub(r"--train\.steps 600", "--train.steps 60", line) for line in lines]
    first = " --train.steps 30"
    return [line.replace("_node=8", "_node=2") + (first if "recipes/" in line else "") for line in short]


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_of_one_machine_in_order(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run --standalone "$@"\n'
    )
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for name in ("torchrun", "python"):
        (tmp_path / name).chmod(0o755)
    for name in ("train.py", "fsdp", "launch", "shardrun", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    lines = typed()
    assert len(lines) == 6
    for line in lines:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    steps = [json.loads(record) for record in (tmp_path / RUN / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in steps) == 60
    assert (tmp_path / RUN / "report.html").exists()
    assert list((tmp_path / RUN / "full_model").iterdir())

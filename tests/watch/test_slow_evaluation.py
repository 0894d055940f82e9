"""Held-out data that come late: the watch says so, and waits as long as for a start's first data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.runs import QUIET
from tests.watch.slow_data import WAITS_FOR

ROOT = Path(__file__).parents[2]


def test_an_evaluation_whose_data_come_late_goes_on(tmp_path: Path) -> None:
    words = [one for one in QUIET if one not in ("--watch.enabled", "false")]
    words[words.index("tests.support.user_code:vectors")] = "tests.watch.slow_data:with_indexed_heldout"
    command = [sys.executable, "-m", "launch.local", "--ranks", "2", "--restarts", "0", *words]
    environment = {**os.environ, WAITS_FOR: str(tmp_path / "index"), "OMP_NUM_THREADS": "1"}
    flags = ["--train.eval_every_steps", "10", "--run.dir", str(tmp_path / "run")]
    with subprocess.Popen(
        [*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        said = ""
        for line in run.stderr:
            said += line
            if "ends the job in" in line:
                (tmp_path / "index").touch()
    assert run.returncode == 0, said
    waits = r"rank 1 .* waits for its data, .*: step 10, evaluate, at .*slow_data.py:\d+ __getitem__"
    assert re.search(waits, said), said
    assert re.search(r"ends the job in \d\d\d s unless it continues", said), said
    assert "watch: the run continues" in said, said

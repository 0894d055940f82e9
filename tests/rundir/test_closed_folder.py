"""A place that may not be searched is one line with a hint. Root starts without the right to search all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import QUIET

ROOT = Path(__file__).parents[2]
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
pytestmark = pytest.mark.skipif(bool(ORDINARY) and shutil.which("setpriv") is None, reason="no setpriv here")


def started(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*ORDINARY, sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    yield folder
    folder.chmod(0o700)


def test_a_run_directory_below_a_closed_folder_is_refused_in_one_line(closed: Path) -> None:
    program = "train.py"
    done = started(program, *QUIET, "--run.dir", str(closed / "runs" / "a"))
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith(f"{program}: ")]
    assert line.startswith(f"{program}: {closed / 'runs' / 'a'}")
    hint = f"HINT: ls -ld {closed} shows who may write there; --run.dir runs/NAME is another place"
    assert line.endswith(f" cannot be written (Permission denied). {hint}")
    assert "Traceback" not in done.stderr

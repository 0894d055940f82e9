"""Ray is refused behind a launcher that has started the ranks, and on a live run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.rundir import paths
from tests.ray.cluster import REPOSITORY, clean_environment
from tests.ray.runs import Driver
from tests.support.locks import acquire

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_ray_asked_for_under_torchrun_is_refused_in_one_line(tmp_path: Path) -> None:
    words = [
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
        "--backend",
        "ray",
        "--run.dir",
    ]
    command = [sys.executable, "-m", *words, str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, "torchrun's own code"
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert said == [
        "train.py: --backend ray starts the ranks, but torchrun has started them already. "
        "HINT: --backend torchrun, or python train.py --backend ray with nothing in front"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_driver_on_a_live_run_directory_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    place = paths.create(tmp_path / "run").path
    lock = acquire(place, "torchrun")
    before = sorted(path for path in place.rglob("*") if path.name != "CLAIM")
    try:
        driver = Driver(place)
        assert driver.wait(120) == 4, driver.said()
        (line,) = driver.err.splitlines()
        assert line.startswith(f"train.py: {place} is being written by process ")
        assert sorted(path for path in place.rglob("*") if path.name != "CLAIM") == before
    finally:
        lock.release()

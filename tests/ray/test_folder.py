"""Folders of Ray's own in /tmp: a killed driver's is removed by the next start, a living driver's is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.ray_own import _own_folder
from tests.ray.cluster import REPOSITORY
from tests.support.processes import dies_with_us

HOLD = """
import sys
from pathlib import Path
from launch.ray_own import _own_folder
with _own_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
pytestmark = pytest.mark.ray


def hold(tmp: Path) -> tuple[subprocess.Popen[str], Path]:
    holder = subprocess.Popen(
        [*dies_with_us(), sys.executable, "-c", HOLD, str(tmp)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def test_what_a_killed_driver_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    (alive, its_folder), (dead, left) = hold(tmp_path), hold(tmp_path)
    dead.kill()
    dead.communicate()
    foreign = tmp_path / "ray-of-somebody"
    foreign.mkdir()
    with _own_folder(tmp_path) as ours:
        assert sorted(tmp_path.iterdir()) == sorted([ours, its_folder, foreign])
    assert not left.exists()
    alive.communicate()
    assert list(tmp_path.iterdir()) == [foreign]

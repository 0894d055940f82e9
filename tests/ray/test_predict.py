"""Predictions from shards under Ray: the text of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.ray_predict import split
from tests.predict.test_sharded import FLAGS, of_one_process
from tests.ray.cluster import REPOSITORY, clean_environment
from tests.support.runs import on_a_rank
from tests.support.world import run_world

pytestmark = pytest.mark.ray


def test_the_words_of_ray_are_taken_out() -> None:
    words = ["RUN", "--ray.num_workers", "3", "--prompt", "--x", "--ray.address=auto"]
    assert split(words) == (["RUN", "--prompt", "--x"], ["--ray.num_workers", "3", "--ray.address=auto"])


@pytest.mark.long
def test_the_text_is_that_of_one_process(tmp_path: Path) -> None:
    assert run_world(2, on_a_rank, ["--run.dir", str(tmp_path / "run"), *FLAGS.split()]) == [None, None]
    words = [str(tmp_path / "run"), "--prompt", "def f", "--tokens", "5", "--temperature", "0"]
    command = [sys.executable, "-m", "launch.ray_predict", *words, "--ray.num_workers", "2"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == of_one_process(words)
    assert list((tmp_path / "run" / "logs").glob("ray-predict-*")) == []

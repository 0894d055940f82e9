"""Real faults on four real ranks, each kind once: the command that does it many times is python -m bench.faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EARLY = ("SIGKILL", "exception", "other shape", "another collective", "NaN", "full disk", "fault in C", "collective left out")
STILL = ("SIGSTOP", "sleep in data", "endless loop", "lock held in C", "deadlock in Python", "slow storage")


def right(*kinds: str) -> None:
    command = [sys.executable, "-m", "bench.faults", "--times", "1", "--kinds", ",".join(kinds), "--seed", str(os.getpid())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_what_ends_a_rank_is_named() -> None:
    right(*EARLY)


@pytest.mark.slow
def test_what_holds_a_rank_up_is_named() -> None:
    right(*STILL)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_node_that_cannot_be_reached_is_named() -> None:
    right("partitioned node")

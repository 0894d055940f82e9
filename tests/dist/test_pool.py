"""The pool of rank processes that tests share (tests/support/world.py)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fsdp.dist.env import DistEnv
from tests.support.runs import failures
from tests.support.world import run_world


def of_the_process(env: DistEnv) -> tuple[object, ...]:
    return (
        dict(os.environ),
        Path.cwd(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


def changes(env: DistEnv, folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    os.environ.pop("PATH")
    os.chdir(folder)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)


def test_a_function_leaves_the_process_to_the_next_as_it_was(tmp_path: Path) -> None:
    before = run_world(1, of_the_process)
    run_world(1, changes, str(tmp_path))
    assert run_world(1, of_the_process) == before
    assert failures(1, tmp_path / "run", "--watch.deterministic true --train.steps 2") == [None]
    assert run_world(1, of_the_process) == before

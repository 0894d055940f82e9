"""Evaluations and checkpoints once an epoch, or a part of one, and runs that start from an imported epoch."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.checkpoint.inspect import scan
from fsdp.checkpoint.store import open_store
from fsdp.run.job import Job
from tests.support.runs import Finished, run

HELD = "--data.name tests.support.user_code:vectors_with_heldout --precision.master fp64"
EACH = "--train.eval_every_epochs 0.5 --checkpoint.every_epochs 1 --checkpoint.keep_last 0"


def evaluated(done: Finished) -> list[tuple[int, float]]:
    return [(one["step"], one["epoch"]) for one in done.records if "eval_loss" in one]


def saved(folder: Path) -> list[tuple[int, float]]:
    found = [one.manifest for one in scan(open_store(str(folder / "checkpoints")))]
    return sorted((one.step, one.metrics["epoch"]) for one in found if one is not None)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_once_an_epoch_where_batches_do_not_divide_it(ranks: int, tmp_path: Path) -> None:
    """50 samples in batches of 12 are 5 steps an epoch; half of it, 25 samples, is complete at the third."""
    done = run(ranks, tmp_path, HELD, EACH, "--train.steps 12")
    halves = [(3, 0.72), (5, 1.0), (8, 1.72), (10, 2.0), (12, 2.48)]  # the last: the end of the run
    assert evaluated(done) == halves
    assert saved(tmp_path) == [(5, 1.0), (10, 2.0), (12, 2.48)]
    steps = [one["epoch"] for one in done.records if "loss" in one]
    assert steps == [float(k // 5 + Fraction(min(k % 5 * 12, 50), 50)) for k in range(1, 13)]


def test_a_fraction_of_an_epoch_is_due_at_exact_steps() -> None:
    from fsdp.data import Cursor

    job: Any = SimpleNamespace(cursor=Cursor(seed=0, samples=1000, global_batch=1))
    assert [step for step in range(1, 1001) if Job.epoch_ends(job, step, 0.1)] == list(range(100, 1001, 100))
    assert [step for step in range(1, 2501) if Job.epoch_ends(job, step, 1.5)] == [1500]
    assert not Job.epoch_ends(job, 100, 0)

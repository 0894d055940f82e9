"""Evaluations and checkpoints once an epoch, or a part of one, and runs that start from an imported epoch."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.checkpoint.inspect import scan
from fsdp.checkpoint.store import open_store
from fsdp.report.page import page as report_of
from fsdp.report.run_data import read_run
from fsdp.run.job import Job
from tests.support.data_ids import train_and_note
from tests.support.runs import Finished, failures, run

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


def test_a_resumed_run_on_other_ranks_keeps_the_epochs(tmp_path: Path) -> None:
    failures(2, tmp_path, HELD, EACH, "--train.steps 12 --train.stop_after 7")
    done = run(1, tmp_path, HELD, EACH, "--train.steps 12")
    assert evaluated(done) == [(3, 0.72), (5, 1.0), (8, 1.72), (10, 2.0), (12, 2.48)]
    assert saved(tmp_path) == [(5, 1.0), (7, 1.48), (10, 2.0), (12, 2.48)]
    page = report_of([read_run(tmp_path)])
    assert "of 12, epoch 2.48" in page
    assert "the interval, epoch 1.00" in page


def test_another_global_batch_and_other_ranks_within_an_epoch_repeat_and_lose_nothing(tmp_path: Path) -> None:
    words = [
        "--data.name",
        "tests.support.data_ids:numbered",
        "--data.args.count",
        "40",
        "--train.epochs",
        "2",
    ]
    one, said = train_and_note(
        1, tmp_path, "a", *words, "--train.global_batch", "4", "--train.stop_after", "6"
    )
    assert said == [None]
    more = [*words, "--train.global_batch", "7", "--train.micro_batch", "2"]
    two, said = train_and_note(2, tmp_path, "b", *more)
    assert said == [None, None]
    assert sorted(one) == list(range(1, 7))
    assert [len(ids) for _, ids in sorted(two.items())] == [7, 7, 2, 7, 7, 7, 7, 7, 5]
    seen = [n for step in sorted({**one, **two}) for n in {**one, **two}[step]]
    assert sorted(seen[:40]) == list(range(40)) == sorted(seen[40:])
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["epoch"]) == (15, 2.0)


def test_a_fraction_of_an_epoch_is_due_at_exact_steps() -> None:
    from fsdp.data import Cursor

    job: Any = SimpleNamespace(cursor=Cursor(seed=0, samples=1000, global_batch=1))
    assert [step for step in range(1, 1001) if Job.epoch_ends(job, step, 0.1)] == list(range(100, 1001, 100))
    assert [step for step in range(1, 2501) if Job.epoch_ends(job, step, 1.5)] == [1500]
    assert not Job.epoch_ends(job, 100, 0)


def test_a_stream_has_no_epochs(tmp_path: Path) -> None:
    words = "--data.name tests.support.data_ids:sharded --train.global_batch 12 --train.steps 4"
    for flag in ("checkpoint.every_epochs", "train.eval_every_epochs"):
        _, said = train_and_note(1, tmp_path, flag, *words.split(), f"--{flag}", "0.5")
        assert said[0] is not None
        assert (
            f"--{flag} 0.5: --data.name tests.support.data_ids:sharded is a stream, which has no epochs."
            in said[0]
        )
        assert f"HINT: --{flag} 0 --{flag.replace('epochs', 'steps')} 100" in said[0]
    _, said = train_and_note(1, tmp_path, "none", *words.split())
    assert said == [None]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all("epoch" not in json.loads(line) for line in lines)

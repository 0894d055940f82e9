"""A run directory that an earlier version wrote resumes to the losses of the unbroken run.

old_run_directory/ was written by commit c7ef28f, before its modules moved into rooms: an MLP on digits in
fp64 with AdamW on 2 ranks, stopped after step 5 of 8. unbroken.jsonl is the same run without the stop.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import on_a_rank
from tests.support.world import run_world

HERE = Path(__file__).parent / "old_run_directory"
OTHER_BLAS = 1e-9
"""Another CPU's BLAS sums a product in another order: 1e-16 of a number, which eight steps multiply."""


def losses(file: Path) -> dict[int, tuple[float, float]]:
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in records if "loss" in one}


@pytest.mark.parametrize("ranks", [2, 1])
def test_it_resumes_to_the_losses_of_the_unbroken_run(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(HERE / "stopped", run)
    words = ["--config", str(run / "config.toml"), "--run.dir", str(run), "--train.stop_after", "0"]
    if ranks == 1:
        words += ["--train.micro_batch", "6"]
    assert run_world(ranks, on_a_rank, words) == [None] * ranks
    found, expected = losses(run / "metrics.jsonl"), losses(HERE / "unbroken.jsonl")
    assert found.keys() == expected.keys() == set(range(1, 9))
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=OTHER_BLAS), f"step {step}"
    starts = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [one["from_step"] for one in starts if one["event"] == "start"] == [0, 5]

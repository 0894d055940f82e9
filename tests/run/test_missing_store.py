"""A run that has saved and finds its store empty: a disk that is not mounted, or checkpoints that were
deleted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import failures

SAVES = "--train.steps 6 --checkpoint.every_steps 2 --checkpoint.keep_last 1 --checkpoint.export false"


def steps(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "grad_norm" in record]


@pytest.fixture
def unmounted(tmp_path: Path) -> tuple[Path, str]:
    """A run stopped after step 4 whose store is elsewhere by now: its directory, and its flags."""
    words = f"{SAVES} --checkpoint.dir {tmp_path / 'store'}"
    assert failures(1, tmp_path / "run", f"{words} --train.stop_after 4") == [None]
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    return tmp_path / "run", words


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_does_not_start_over_and_the_same_command_continues_once_the_store_is_back(
    ranks: int, unmounted: tuple[Path, str]
) -> None:
    run, words = unmounted
    store = run.parent / "store"
    said = failures(ranks, run, words)
    assert all(one is not None for one in said)
    expected = (
        f"CheckpointError: {run} has saved step 4, but {store} holds no checkpoint: this start would go back "
        f"to step 0 and delete the records after it. HINT: mount or copy the checkpoints to {store} and "
        "start the same command; --checkpoint.resume never starts over at step 0"
    )
    assert said[0] == expected
    assert steps(run) == [1, 2, 3, 4]
    shutil.rmtree(store)
    (run.parent / "elsewhere").rename(store)
    assert failures(ranks, run, words) == [None] * ranks
    assert steps(run) == [1, 2, 3, 4, 5, 6]

"""A stream on real ranks: killed and resumed at 1, 3 and 2 ranks, with readers ahead of the steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.data_ids import killed_and_resumed, train_and_note


@pytest.mark.parametrize(
    "source",
    [
        "sharded --data.args.shards 6",
        pytest.param("sharded --data.args.shards 4", marks=pytest.mark.long),  # 3 ranks share shards
        pytest.param("lines", marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed_at_1_3_and_2_ranks_each_sample_comes_once_an_epoch(
    tmp_path: Path, source: str
) -> None:
    words = (
        f"--train.global_batch 12 --train.steps 12 --data.workers 2 --data.prefetch 3 --data.name {__name__}"
    )
    flags = words.replace(__name__, f"tests.support.data_ids:{source}").split()
    steps = killed_and_resumed(tmp_path, *flags, crashes=(5, 9))
    assert sorted(steps) == list(range(1, 13))
    for epoch in range(3):  # 48 samples in batches of 12
        ids = [n for step in range(4 * epoch + 1, 4 * epoch + 5) for n in steps[step]]
        assert sorted(ids) == list(range(48))


def test_shards_of_unlike_lengths_begin_their_epochs_alone_and_another_batch_continues(
    tmp_path: Path,
) -> None:
    flags = [
        "--data.name",
        "tests.support.data_ids:sharded",
        "--data.args.count",
        "27",
        "--data.args.shards",
        "2",
    ]
    one, said = train_and_note(2, tmp_path, "a", *flags, "--train.global_batch", "4", "--train.steps", "5")
    assert said == [None, None]
    two, said = train_and_note(1, tmp_path, "b", *flags, "--train.global_batch", "8", "--train.steps", "9")
    assert said == [None]
    total = Counter(n for ids in ({**one, **two}).values() for n in ids)
    # 26 items of each shard: the even ids 0 … 26 are 14, the odd ones 13
    assert total == {n: 1 if n in (24, 26) else 2 for n in range(27)}


def test_held_out_samples_beside_a_stream_are_evaluated(tmp_path: Path) -> None:
    flags = ["--data.name", "tests.support.data_ids:sharded_with_heldout", "--train.steps", "2"]
    _, said = train_and_note(2, tmp_path, "a", *flags, "--train.global_batch", "4")
    assert said == [None, None]
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()

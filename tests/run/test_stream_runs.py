"""A stream on real ranks: killed and resumed at 1, 3 and 2 ranks, with readers ahead of the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data_ids import killed_and_resumed


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

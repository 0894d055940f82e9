"""How a global batch is cut, padded, read ahead and closed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp.base.errors import TrainingError
from fsdp.data import Batch, Cursor, Loader, heldout_batches
from fsdp.distributed.mesh import DataRank


class Numbers:
    """Sample i is the number i; `read` lists what was asked for."""

    def __init__(self, count: int, bad: tuple[int, ...] = ()) -> None:
        self.count, self.bad = count, bad
        self.read: list[list[int]] = []

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        self.read.append(indices.tolist())
        if broken := set(indices.tolist()) & set(self.bad):
            raise OSError(f"disk says no to {sorted(broken)}")
        return {"inputs": torch.from_numpy(indices.copy()), "targets": torch.from_numpy(-indices)}


def make(samples: Any, cursor: Cursor, rank: int = 0, ranks: int = 1, **changes: Any) -> Loader:
    share = -(-cursor.global_batch // ranks)
    wanted = {"micro_batch": share, "accumulation": 1, "workers": 0, "prefetch": 2, "pin": False} | changes
    return Loader(samples, cursor, rank=DataRank(rank, ranks), **wanted)


def valid_numbers(batches: list[Batch]) -> list[int]:
    return [n for batch in batches for n in batch.data["inputs"][batch.valid].tolist()]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (3, 1), (3, 2), (4, 4)])
def test_ranks_and_micro_batches_together_are_the_global_batch(ranks: int, accumulation: int) -> None:
    cursor = Cursor(seed=1, samples=101, global_batch=16)
    micro = math.ceil(math.ceil(16 / ranks) / accumulation)
    loaders = [
        make(Numbers(101), cursor, rank, ranks, micro_batch=micro, accumulation=accumulation)
        for rank in range(ranks)
    ]
    for step in (0, 5, 6, 7):
        batches = [loader.step(step) for loader in loaders]
        assert {len(batch.micro) for batch in batches} == {accumulation}
        assert {len(one.valid) for batch in batches for one in batch.micro} == {micro}
        assert [n for batch in batches for n in valid_numbers(batch.micro)] == cursor.indices(step).tolist()
        assert {batch.samples for batch in batches} == {len(cursor.indices(step))}


def test_padding_is_spread_and_marked_at_the_end() -> None:
    cursor = Cursor(seed=0, samples=10, global_batch=10)
    micro = [
        one
        for rank in range(4)
        for one in make(Numbers(10), cursor, rank, 4, micro_batch=2, accumulation=2).step(0).micro
    ]
    assert [one.valid_rows for one in micro] == [2, 1, 2, 1, 1, 1, 1, 1]
    for one in micro:
        assert one.valid.tolist() == [True] * one.valid_rows + [False] * (2 - one.valid_rows)
        assert one.data["inputs"][one.valid_rows :].tolist() == [int(one.data["inputs"][0])] * (
            2 - one.valid_rows
        )


@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ahead_gives_what_reading_in_the_step_gives(workers: int) -> None:
    cursor = Cursor(seed=2, samples=97, global_batch=8)
    plain, ahead = make(Numbers(97), cursor), make(Numbers(97), cursor, workers=workers)
    for step in [*range(30), 7, 8, 9, 100, 3, 4]:
        expected, found = plain.step(step), ahead.step(step)
        assert valid_numbers(found.micro) == valid_numbers(expected.micro)
        assert found.samples == expected.samples
    ahead.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_with_rank_and_step(workers: int) -> None:
    cursor = Cursor(seed=0, samples=40, global_batch=8)
    bad = int(cursor.indices(2)[-1])
    loader = make(Numbers(40, bad=(bad,)), cursor, rank=1, ranks=2, workers=workers)
    loader.step(0)
    loader.step(1)
    with pytest.raises(
        TrainingError,
        match=rf"^rank 1, step 3: sample {bad} cannot be read: OSError: disk says no to \[{bad}\]",
    ):
        loader.step(2)
    loader.step(3)  # an error is of its step, not of the loader
    loader.close()


@pytest.mark.parametrize("more", [-1, 1])
def test_other_rows_than_asked_for_are_not_trained_on(more: int) -> None:
    class Odd(Numbers):
        def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
            return {"inputs": torch.zeros(len(indices)), "targets": torch.zeros(len(indices) + more)}

    loader = make(Odd(8), Cursor(seed=0, samples=8, global_batch=4))
    with pytest.raises(
        TrainingError, match=rf"4 samples were requested, but \{{'targets': {4 + more}\}} rows were returned"
    ):
        loader.step(0)


@pytest.mark.parametrize(
    ("count", "batch", "ranks", "limit"), [(179, 32, 1, 0), (179, 32, 3, 0), (5, 4, 4, 0), (179, 7, 2, 50)]
)
def test_each_heldout_sample_is_seen_once_by_one_rank(count: int, batch: int, ranks: int, limit: int) -> None:
    parts = [
        list(heldout_batches(Numbers(count), batch=batch, rank=DataRank(r, ranks), limit=limit))
        for r in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    assert {len(one.valid) for part in parts for one in part} == {batch}
    seen = sorted(n for part in parts for n in valid_numbers(part))
    assert len(seen) == len(set(seen)) == (limit or count)


class Masked(Numbers):
    """Sequences of six targets; sample i masks i of them."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        targets = torch.arange(6).expand(len(indices), 6).clone()
        for row, index in enumerate(indices.tolist()):
            targets[row, : index % 6] = -100
        return {"inputs": torch.zeros(len(indices), 6), "targets": targets}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_targets_that_count_are_counted_while_it_reads(workers: int) -> None:
    """Padding counts nothing."""
    cursor = Cursor(seed=1, samples=10, global_batch=4)
    loader = make(Masked(10), cursor, micro_batch=3, accumulation=2, workers=workers)
    for step in range(3):
        found = sum(micro.tokens for micro in loader.step(step).micro)
        assert found == sum(6 - index % 6 for index in cursor.indices(step).tolist())
    loader.close()

"""The global order: each sample once an epoch, a function of seed and step alone, computed where it is looked
at.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fsdp.data import Cursor

FIRST_OF_SEED_0 = [1438, 1389, 1013, 377, 1337, 393, 1136, 1180]
FAR_OF_SEED_1 = [345915446133, 238485537173]


def epoch_of(cursor: Cursor, epoch: int) -> np.ndarray:
    first = epoch * cursor.steps_per_epoch
    return np.concatenate([cursor.indices(first + k) for k in range(cursor.steps_per_epoch)])


@pytest.mark.parametrize("samples", [1, 2, 5, 64, 65, 1797, 100_003])
@pytest.mark.parametrize("global_batch", [64, 1000])
def test_every_sample_comes_once_an_epoch(samples: int, global_batch: int) -> None:
    cursor = Cursor(seed=3, samples=samples, global_batch=global_batch)
    assert cursor.steps_per_epoch == -(-samples // global_batch)
    for epoch in (0, 1, 7):
        assert np.array_equal(np.sort(epoch_of(cursor, epoch)), np.arange(samples))


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """A resumed run goes on where another version of this code left off: the order itself is a promise."""
    assert Cursor(seed=0, samples=1797, global_batch=8).indices(0).tolist() == FIRST_OF_SEED_0
    assert Cursor(seed=1, samples=10**12, global_batch=2).indices(12345).tolist() == FAR_OF_SEED_1


@pytest.mark.parametrize("batches", [(4, 8), (8, 3, 8), (7, 1, 100, 2), (40, 8), (8, 8)])
@pytest.mark.parametrize("each", [1, 3, 5])
def test_another_global_batch_at_a_resume_repeats_and_loses_nothing(
    batches: tuple[int, ...], each: int
) -> None:
    step, seen = 0, list[int]()
    for batch in batches:
        cursor = Cursor(seed=2, samples=40, global_batch=batch).resumed(step, len(seen))
        assert cursor.epoch(step) == Fraction(len(seen), 40)
        again = Cursor(seed=2, samples=40, global_batch=batch).resumed(
            step + 1, len(seen) + len(cursor.indices(step))
        )
        assert [again.indices(step + k).tolist() for k in range(1, 30)] == [
            cursor.indices(step + k).tolist() for k in range(1, 30)
        ]
        for _ in range(each):
            seen += cursor.indices(step).tolist()
            step += 1
    ends = cursor.steps_of(9)
    while step < ends:
        seen += cursor.indices(step).tolist()
        step += 1
    one_batch = Cursor(seed=2, samples=40, global_batch=40)
    assert seen == np.concatenate([one_batch.indices(epoch) for epoch in range(9)]).tolist()


def test_epochs_that_were_complete_before_a_resume_end_the_run() -> None:
    cursor = Cursor(seed=0, samples=40, global_batch=16).resumed(15, 60)
    assert cursor.epoch(15) == Fraction(3, 2)
    assert [cursor.steps_of(epochs) for epochs in (1, 2, 3)] == [14, 17, 20]
    assert Cursor(seed=0, samples=40, global_batch=1).resumed(2, 60).steps_of(1) == 1

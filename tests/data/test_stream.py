"""Streams: positions, states, epochs of a shard; and streams that are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from fsdp.base.errors import CheckpointError, ConfigError, OneRankError
from fsdp.config import DataSection, load
from fsdp.data import build_dataset
from fsdp.data.stream import ShardReader, StreamCursor, StreamItems, check_state
from fsdp.run.job import prepare
from tests.support.data_ids import Lines, Shards


def shard(ids: list[int], **begin: Any) -> ShardReader:
    made = ShardReader(0, lambda: Lines(ids))
    made.begin(None, 0, rows=3, held=2)
    return made


def ids_of(items: list[Any]) -> list[int]:
    return [int(item["ids"]) for item in items]


def test_items_come_by_number_in_any_order_and_epochs_follow_each_other() -> None:
    one = shard(list(range(7)))
    assert ids_of([one.item(n) for n in (4, 0, 5, 1)]) == [4, 0, 5, 1]
    assert ids_of([one.item(n) for n in (6, 7, 13, 14)]) == [6, 0, 6, 0]
    assert ids_of([one.item(0)]) == [0]  # no longer held: read again


def test_a_state_is_that_of_a_step_although_the_reader_is_ahead() -> None:
    one = shard(list(range(7)))
    one.item(5)
    state = one.state(3)
    after = ShardReader(0, lambda: Lines(list(range(7))))
    after.begin(state, 3, rows=2, held=2)
    assert ids_of([after.item(n) for n in range(3, 12)]) == [3, 4, 5, 6, 0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        one.state(9)


def test_an_empty_shard_is_an_error_and_a_reader_that_raised_raises_again() -> None:
    with pytest.raises(OneRankError, match="shard 0 of the stream has no item"):
        shard([]).item(0)
    with pytest.raises(ConfigError, match=r"a:b: Lines yields no item\. HINT: "):
        check_state("a:b", lambda: Lines([]))

    class Broken(Lines):
        def __iter__(self) -> Iterator[Any]:
            yield 1
            raise OSError("the line is cut")

    one = ShardReader(0, lambda: Broken([1, 2, 3]))
    for _ in range(2):
        with pytest.raises(OSError, match="the line is cut"):
            one.item(3)


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_a_step_takes_as_many_items_from_each_shard(shards: int) -> None:
    made = Shards(shards, 48)
    cursor = StreamCursor(StreamItems("x", made, lambda: made), global_batch=6, ahead=3)
    items = cursor.items
    steps = [sorted(ids_of([items[int(n)] for n in cursor.indices(step)])) for step in range(8)]
    assert steps == [list(range(6 * step, 6 * step + 6)) for step in range(8)]


def build(name: str, **args: Any) -> Any:
    return build_dataset(DataSection(name=f"tests.data.test_stream:{name}", args=args))


class Late(Lines):
    """Changes its state after the yield."""

    def __iter__(self) -> Iterator[Any]:
        for n in self.ids[self.given :]:
            yield n, n
            self.given += 1


class Draws(Lines):
    def __iter__(self) -> Iterator[Any]:
        while True:
            self.given += 1
            yield random.random(), 0


class Odd(Lines):
    def state_dict(self) -> Any:
        return {"given": np.arange(3)}


def late() -> Late:
    return Late(list(range(9)))


def draws() -> Draws:
    return Draws([1])


def odd() -> Odd:
    return Odd(list(range(9)))


class Archives(IterableDataset[Any]):
    """As the StreamingDataset of MosaicML and of LitData: a state with arguments, and items by index."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"inputs": [index, 1], "targets": [1, index]}

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return map(self.__getitem__, range(9))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def archives() -> Archives:
    return Archives()


def no_shards() -> Shards:
    return Shards(0, 9)


def test_an_iterable_dataset_with_items_by_index_is_read_by_them() -> None:
    data = build_dataset(DataSection(name=f"{__name__}:archives"))
    assert data.stream is None
    assert len(data.train) == 9
    assert data.train.batch(np.array([7, 2]))["inputs"].tolist() == [[7, 1], [2, 1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("late", r"the state of Late, leads to another item .*HINT: change the state"),
        ("draws", r"the state of Draws, leads to another item"),
        ("odd", r"the state of Odd, or its first items, cannot be read: "),
        ("no_shards", r"shards is 0, not a whole number from 1. HINT: shards = 8"),
    ],
)
def test_a_stream_that_cannot_be_resumed_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", r"sharded is a stream, which has no length in epochs. HINT: --train.steps 1000"),
        ("--train.epochs 2", r"--data.name .*has no length in epochs. HINT: --train.steps 1000"),
        (
            "--train.steps 3 --train.global_batch 8",
            r"--train.global_batch 8 is not a multiple of the 6 shards .*HINT: --train.global_batch 6",
        ),
    ],
)
def test_flags_that_a_stream_cannot_follow_are_refused(flags: str, message: str) -> None:
    words = ["--data.name", "tests.support.data_ids:sharded", "--train.global_batch", "12", *flags.split()]
    with pytest.raises(ConfigError, match=message):
        prepare(load(words), world_size=2, num_nodes=1, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("saved", "message"), [({"drawn": 3, "states": [None]}, "is of a stream of 1 shards, this one has 2")]
)
def test_a_checkpoint_of_another_stream_is_refused(saved: Any, message: str) -> None:
    made = Shards(2, 48)
    cursor = StreamCursor(StreamItems("x", made, lambda: made), global_batch=6, ahead=3)
    with pytest.raises(CheckpointError, match=message):
        cursor.resumed({"stream": saved}, 3)


def test_a_stream_is_no_source_of_a_mixture(tmp_path: Any) -> None:
    (tmp_path / "m.toml").write_text('[[data.sources]]\nname = "tests.support.data_ids:sharded"\n')
    with pytest.raises(ConfigError, match=r"sharded is a stream, and a mixture needs the number .*HINT"):
        build_dataset(load(["--data.sources", str(tmp_path / "m.toml")]).data)

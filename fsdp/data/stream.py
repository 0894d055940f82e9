"""Streams: data without a length, read in order from shards that each have a state.

Position p of the stream is item p // S of shard p % S. A shard that ends begins its next epoch. A stream
without a state, or whose state does not lead to the same items, is refused. Not here: which positions a step
takes, and what a checkpoint keeps (stream_cursor.py); the factory (custom.py); how items become a batch
(ItemSamples there).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fsdp.base.errors import ConfigError, OneRankError, ShardrunError, one_line

PAGE = "docs/data.md#streams"


def is_stream(made: Any) -> bool:
    """Whether a factory's object has no length, but items in order or shards of them. An IterableDataset of
    torch may have a length; one that has items by index too, as the StreamingDataset of MosaicML and of
    LitData, is read by them.
    """
    only_in_order = isinstance(made, IterableDataset) and type(made).__getitem__ is Dataset.__getitem__
    ordered = only_in_order or not hasattr(made, "__len__")
    return ordered and (hasattr(made, "__iter__") or hasattr(made, "shards"))


class ShardReader:
    """One shard's reader: its items by number, and its state where a step's items end."""

    def __init__(self, index: int, make: Callable[[], Any]) -> None:
        self.index, self._make = index, make
        self._lock = threading.Lock()
        self.begin(None, 0, rows=1, kept=1)

    def begin(self, state: str | None, first: int, *, rows: int, kept: int) -> None:
        """Continues with item `first`, at which `state` was noted. A step takes `rows` items; those of `kept`
        steps are held for threads that are behind.
        """
        self._iterator: Iterator[Any] | None = None
        self._reader: Any = None
        self._epoch, self._given = 0, False
        self._failed: Exception | None = None
        self._first = self._next = first
        self._rows, self._kept = rows, kept
        self._start = state
        self._items: dict[int, Any] = {}
        self._states: dict[int, str | None] = {first: state}

    @property
    def read(self) -> int:
        """Items read, over all epochs and starts of the run."""
        return self._next

    def item(self, number: int) -> Any:
        with self._lock:
            if number not in self._items and number < self._next:
                return self._from_the_start(number)
            # To the end of the step's items: another rank may have the rest of them, and a save their state.
            end = self._first + ((number - self._first) // self._rows + 1) * self._rows
            while self._next < end:
                self._read_one()
            found = self._items[number]
            self._forget(self._next - self._kept * self._rows)
            return found

    def state(self, number: int) -> str | None:
        """The state before item `number`, where a step begins; KeyError if this rank does not read it."""
        with self._lock:
            return self._states[number]

    def _read_one(self) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            item = self._following()
        except Exception as error:
            self._failed = error  # a generator that has raised is at its end
            raise
        self._items[self._next] = item
        self._next += 1
        if (self._next - self._first) % self._rows == 0:
            self._states[self._next] = self._now()

    def _following(self) -> Any:
        if self._iterator is None:
            self._open(self._start)
        while True:
            assert self._iterator is not None
            try:
                item = next(self._iterator)
            except StopIteration:
                if not self._given:
                    raise OneRankError(f"shard {self.index} of the stream has no item.") from None
                self._epoch += 1
                self._open(None)
                continue
            self._given = True
            return item

    def _open(self, state: str | None) -> None:
        """A new reader, at a state, or at the beginning of the epoch."""
        self._reader = self._make()
        if state is not None:
            noted = json.loads(state)
            self._epoch = int(noted["epoch"])
        if hasattr(self._reader, "set_epoch"):
            self._reader.set_epoch(self._epoch)
        if state is not None:
            self._reader.load_state_dict(noted["reader"])
        self._given = state is not None  # a state may be that of a shard's end
        self._iterator = iter(self._reader)

    def _now(self) -> str:
        """As text at once: a reader may change the object that it has returned."""
        return json.dumps({"epoch": self._epoch, "reader": self._reader.state_dict()})

    def _forget(self, before: int) -> None:
        for held in (self._items, self._states):
            for number in [one for one in held if one < before]:
                del held[number]  # type: ignore[attr-defined]

    def _from_the_start(self, number: int) -> Any:
        """An item before those held, as for a look at the first sample of a resumed run."""
        again = ShardReader(self.index, self._make)
        for _ in range(number):
            again._read_one()
            again._items.clear()
        return again.item(number)


class StreamItems:
    """The items of a stream by position."""

    def __init__(self, name: str, made: Any, again: Callable[[], Any]) -> None:
        """`again` makes the stream once more: a stream without shards is one shard."""
        self.name = name
        shards = getattr(made, "shards", 1)
        if type(shards) is not int or shards < 1:
            raise ConfigError(
                f"--data.name {name}: shards is {shards}, not a whole number from 1.", "shards = 8"
            )
        make = made.shard if hasattr(made, "shards") else lambda _: again()
        self.shards = [ShardReader(n, lambda n=n: make(n)) for n in range(shards)]  # type: ignore[misc]
        if hasattr(made, "collate"):
            self.collate = made.collate
        check_state(name, lambda: make(0))

    def __getitem__(self, position: int) -> Any:
        number, shard = divmod(position, len(self.shards))
        reader = self.shards[shard]
        try:
            return reader.item(number)
        except ShardrunError:
            raise
        except Exception as error:
            raise OneRankError(
                f"shard {shard} of the stream cannot be read at its item {reader.read}: {one_line(error)}."
            ) from error


class StreamSamples:
    """Samples without a length: an index is a position."""

    def __init__(self, items: StreamItems, batch: Callable[[np.ndarray], dict[str, Tensor]]) -> None:
        self.items, self._batch = items, batch

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._batch(indices)


def check_state(name: str, make: Callable[[], Any]) -> None:
    """Raises ConfigError unless a reader continues from the state of another with the same items."""
    reader = make()
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(reader, method, None)):
            lacks = "items by index" if hasattr(reader, "__len__") else "length"
            raise ConfigError(
                f"--data.name {name} returned a stream of type {type(reader).__name__}, which has no {lacks} "
                f"and no {method}: a resumed run would repeat or lose samples.",
                f"give it state_dict and load_state_dict ({PAGE}), or __len__ and __getitem__",
            )
    items = iter(reader)
    try:
        if next(items, items) is items:
            raise ConfigError(
                f"--data.name {name}: the first {type(reader).__name__} of the stream has no item.",
                "check the data that it reads",
            )
        state = reader.state_dict()
        try:
            text = json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--data.name {name}: state_dict() of {type(reader).__name__} is not JSON: {error}.",
                "return numbers, texts, lists and dicts, as checkpoints keep it",
            ) from None
        expected = next(items, None)
        other = make()
        other.load_state_dict(json.loads(text))
        found = next(iter(other), None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--data.name {name}: the stream's first items cannot be read: {one_line(error)}.",
            f"what it needs: {PAGE}",
        ) from error
    if not _same(expected, found):
        raise ConfigError(
            f"--data.name {name}: the state of one {type(reader).__name__}, loaded into another, leads to "
            "another item: a resumed run would repeat or lose samples.",
            "change the state before each yield, and draw nothing that it does not hold",
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (Tensor, np.ndarray)):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)

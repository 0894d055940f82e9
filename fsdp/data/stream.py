"""Streams: data without a length, read in order from shards that each have a state.

Position p of the stream is item p // S of shard p % S. A shard that ends begins its next epoch. A stream
without a state, or whose state does not lead to the same items, is refused. A step takes global_batch / S
items from each of the S shards. Not here: the factory, and how items become a batch (custom.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fsdp.base.errors import CheckpointError, ConfigError, OneRankError, ShardrunError, one_line
from fsdp.dist import collectives

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
        self._epoch, self._gave_item = 0, False
        self._failed: Exception | None = None
        self._first = self._next = first
        self._rows, self._kept, self._start = rows, kept, state
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
            item = self._items[number]
            oldest = self._next - self._kept * self._rows
            for held in (self._items, self._states):
                for old in [key for key in held if key < oldest]:
                    del held[old]  # type: ignore[attr-defined]
            return item

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
            # As text at once: a reader may change the object that it has returned.
            state = {"epoch": self._epoch, "reader": self._reader.state_dict()}
            self._states[self._next] = json.dumps(state)

    def _following(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open(self._start)
        while True:
            try:
                item = next(self._iterator)
            except StopIteration:
                if not self._gave_item:
                    raise OneRankError(f"shard {self.index} of the stream has no item.") from None
                self._epoch += 1
                self._iterator = self._open(None)
                continue
            self._gave_item = True
            return item

    def _open(self, state: str | None) -> Iterator[Any]:
        """A new reader, at a state, or at the beginning of the epoch."""
        self._reader, noted = self._make(), None if state is None else json.loads(state)
        if noted is not None:
            self._epoch = int(noted["epoch"])
        if hasattr(self._reader, "set_epoch"):
            self._reader.set_epoch(self._epoch)
        if noted is not None:
            self._reader.load_state_dict(noted["reader"])
        self._gave_item = noted is not None  # a state may be that of a shard's end
        return iter(self._reader)

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
        self.items, self.batch = items, batch


def check_state(name: str, make: Callable[[], Any]) -> None:
    """Raises ConfigError unless a reader continues from the state of another with the same items."""
    reader = make()
    kind = type(reader).__name__
    if not all(callable(getattr(reader, method, None)) for method in ("state_dict", "load_state_dict")):
        lacks = "items by index" if hasattr(reader, "__len__") else "length"
        raise ConfigError(
            f"--data.name {name} returned a stream of type {kind}, which has no {lacks} and no state_dict: a "
            "resumed run would repeat or lose samples.",
            f"give it state_dict and load_state_dict ({PAGE}), or __len__ and __getitem__",
        )
    items = iter(reader)
    try:
        next(items)
        state = json.dumps(reader.state_dict())
        expected, other = next(items, None), make()
        other.load_state_dict(json.loads(state))
        problem = (
            "" if _same(expected, next(iter(other), None)) else "leads to another item in another reader"
        )
    except Exception as error:
        problem = f"or its first items, cannot be read: {one_line(error)}"
    if problem:
        raise ConfigError(
            f"--data.name {name}: the state of {kind}, {problem}: a resumed run would repeat samples.",
            f"change the state before each yield, and draw nothing that it does not hold: {PAGE}",
        )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, (Tensor, np.ndarray)):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    return bool(first == second)


class StreamCursor:
    """The positions of each step: the same number of items from each shard.

    Ranks slice a step's items, shard after shard, as they slice any batch. So a rank reads the shards that
    its slice touches: 1/R of the data where the number of ranks R divides S, a shared shard twice elsewhere,
    and with one shard everything on every rank. The order is the same for any number of ranks.

    A checkpoint keeps each shard's state after the last item trained on: states are noted where a step's
    items end, while the readers are ahead. Any number of ranks takes them up.
    """

    end = None
    steps_per_epoch = 0

    def __init__(
        self, items: StreamItems, *, global_batch: int, ahead: int, step: int = 0, drawn: int = 0
    ) -> None:
        """`drawn`: items of each shard before `step`. `ahead`: steps that may be read in advance."""
        self.items, self.global_batch, self._ahead = items, global_batch, ahead
        self._step, self._drawn = step, drawn
        self.shards = len(items.shards)
        self._rows, rest = divmod(global_batch, self.shards)
        if rest:
            below = max(1, self._rows) * self.shards
            raise ConfigError(
                f"--train.global_batch {global_batch} is not a multiple of the {self.shards} shards of "
                f"--data.name {items.name}: a step takes as many items from each.",
                f"--train.global_batch {below}",
            )

    def indices(self, step: int) -> np.ndarray:
        """Returns global_batch positions, int64, shard after shard."""
        first = self._number(step)
        numbers = np.arange(first, first + self._rows, dtype=np.int64)
        return (numbers * self.shards + np.arange(self.shards, dtype=np.int64)[:, None]).reshape(-1)

    def _number(self, step: int) -> int:
        """The item of each shard that comes first in a step."""
        return self._drawn + (step - self._step) * self._rows

    def epoch(self, step: int) -> Fraction | None:
        """None: a stream has no length, and so no epochs."""
        return None

    def begin(self, states: list[str | None]) -> None:
        for shard, state in zip(self.items.shards, states, strict=True):
            shard.begin(state, self._drawn, rows=self._rows, kept=self._ahead)

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: each shard's state before `step`, from the ranks' readers. Collective."""
        number, ours = self._number(step), {}
        for shard in self.items.shards:
            with suppress(KeyError):
                ours[shard.index] = shard.state(number)
        known: dict[int, str | None] = {}
        for states in collectives.all_gather_objects(ours):
            known |= states
        missing = [shard.index for shard in self.items.shards if shard.index not in known]
        if missing:
            raise CheckpointError(f"no rank knows the state of shard {missing[0]} before step {step + 1}.")
        noted = [known[shard.index] for shard in self.items.shards]
        return {"stream": {"drawn": number, "states": [json.loads(s) if s else None for s in noted]}}

    def resumed(self, saved: Mapping[str, Any], step: int) -> StreamCursor:
        """The cursor of a run that resumes at `step`; the readers continue at the saved states."""
        drawn, states = _read(saved.get("stream"), self.shards)
        after = StreamCursor(
            self.items, global_batch=self.global_batch, ahead=self._ahead, step=step, drawn=drawn
        )
        after.begin(states)
        return after

    def note(self) -> str:
        return ""


def _read(saved: Any, shards: int) -> tuple[int, list[str | None]]:
    if saved is None:
        return 0, [None] * shards
    try:
        drawn, states = int(saved["drawn"]), list(saved["states"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's record of the stream cannot be read ({error}).", "--checkpoint.resume never"
        ) from None
    if len(states) != shards:
        raise CheckpointError(
            f"the checkpoint is of a stream of {len(states)} shards, this one has {shards}.",
            f"return a stream with shards = {len(states)}, or start a new --run.dir",
        )
    return drawn, [None if state is None else json.dumps(state) for state in states]

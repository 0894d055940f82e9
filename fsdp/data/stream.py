"""Streams: data without a length, read in order from shards that each have a state.

Position p of the stream is item p // S of shard p % S. A shard that ends begins its next epoch. A stream
without a state, or whose state does not lead to the same items, is refused. A step takes global_batch / S
items from each of the S shards. Not here: the factory, and how items become a batch (registry.py).
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
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
from fsdp.base.torch_private import tree_leaves
from fsdp.distributed import collectives

log = logging.getLogger(__name__)
PAGE = "docs/data.md#streams"
END = object()


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
        self.begin(None, 0, rows=1, held=1)

    def begin(self, state: Any, first: int, *, rows: int, held: int) -> None:
        """Continues with item `first`, at which `state` was noted. A step takes `rows` items; those of `held`
        steps are kept for threads that are behind.
        """
        self._iterator: Iterator[Any] | None = None
        self._reader: Any = None
        self._epoch, self._gave_item = 0, False
        self._failed: Exception | None = None
        self._first = self.read = first
        """`read`: items, over all epochs and starts of the run."""
        self._rows, self._held, self._start = rows, held, state
        self._items: dict[int, Any] = {}
        self._states: dict[int, Any] = {first: state}

    def item(self, number: int) -> Any:
        with self._lock:
            if number not in self._items and number < self.read:
                # before those held, as for a look at the first sample of a resumed run
                again = ShardReader(self.index, self._make)
                for earlier in range(number):
                    again.item(earlier)
                return again.item(number)
            # To the end of the step's items: another rank may have the rest of them, and a save their state.
            end = self._first + ((number - self._first) // self._rows + 1) * self._rows
            while self.read < end:
                self._read_one()
            item, oldest = self._items[number], self.read - self._held * self._rows
            self._items = {key: value for key, value in self._items.items() if key >= oldest}
            self._states = {key: value for key, value in self._states.items() if key >= oldest}
            return item

    def state(self, number: int) -> Any:
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
        self._items[self.read] = item
        self.read += 1
        if (self.read - self._first) % self._rows == 0:
            # A copy, as JSON has it: a reader may change the object that it has returned.
            state = {"epoch": self._epoch, "reader": self._reader.state_dict()}
            self._states[self.read] = json.loads(json.dumps(state))

    def _following(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open(self._start)
        while (item := next(self._iterator, END)) is END:
            if not self._gave_item:
                raise OneRankError(f"shard {self.index} of the stream has no item.")
            self._epoch += 1
            self._iterator = self._open(None)
        self._gave_item = True
        return item

    def _open(self, state: Any) -> Iterator[Any]:
        """A new reader, at a state, or at the beginning of the epoch."""
        reader = self._make()
        if state is not None:
            self._epoch = int(state["epoch"])
        if hasattr(reader, "set_epoch"):
            reader.set_epoch(self._epoch)
        self._reader = reader if has_state(reader) else Replayed(reader)
        if state is not None:
            self._reader.load_state_dict(copy.deepcopy(state["reader"]))
        self._gave_item = state is not None  # a state may be that of a shard's end
        return iter(self._reader)


class Replayed:
    """A reader without a state of its own: its state is the number of items read, and it is read again up to
    there.
    """

    def __init__(self, items: Any) -> None:
        self._items, self._read = items, 0

    def __iter__(self) -> Iterator[Any]:
        for item in itertools.islice(self._items, self._read, None):
            self._read += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"items": self._read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._read = state["items"]


def has_state(reader: Any) -> bool:
    return all(callable(getattr(reader, method, None)) for method in ("state_dict", "load_state_dict"))


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
    reader, other = make(), make()
    kind = type(reader).__name__
    if not has_state(reader):
        log.info("%s has no state_dict: a resumed run reads it again up to its place. %s", kind, PAGE)
        reader, other = Replayed(reader), Replayed(other)
    items = iter(reader)
    try:
        if next(items, None) is None:
            raise ConfigError(f"--data.name {name}: {kind} yields no item.", "an __iter__ that yields items")
        state = json.dumps(reader.state_dict())
        expected = next(items, None)
        other.load_state_dict(json.loads(state))
        leaves = zip(tree_leaves(expected), tree_leaves(next(iter(other), None)), strict=True)
        same = all(torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) for a, b in leaves)
        problem = "" if same else "leads to another item in another reader"
    except ConfigError:
        raise
    except Exception as error:
        problem = f"or its first items, cannot be read: {one_line(error)}"
    if problem:
        raise ConfigError(
            f"--data.name {name}: the state of {kind}, {problem}: a resumed run would repeat samples.",
            "change the state before each yield, and draw nothing that it does not hold: an order from "
            f"random.Random(SEED). {PAGE}",
        )


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
            raise ConfigError(
                f"--train.global_batch {global_batch} is not a multiple of the {self.shards} shards of "
                f"--data.name {items.name}: a step takes as many items from each.",
                f"--train.global_batch {max(1, self._rows) * self.shards}",
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

    def begin(self, states: list[Any]) -> None:
        for shard, state in zip(self.items.shards, states, strict=True):
            shard.begin(state, self._drawn, rows=self._rows, held=self._ahead)

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: each shard's state before `step`, from the ranks' readers. Collective."""
        number, ours, known = self._number(step), dict[int, Any](), dict[int, Any]()
        for shard in self.items.shards:
            with suppress(KeyError):
                ours[shard.index] = shard.state(number)
        for states in collectives.all_gather_objects(ours):
            known |= states
        if missing := sorted(set(range(self.shards)) - set(known)):
            raise CheckpointError(f"no rank knows the state of shard {missing[0]} before step {step + 1}.")
        return {"stream": {"drawn": number, "states": [known[index] for index in range(self.shards)]}}

    def resumed(self, saved: Mapping[str, Any], step: int) -> StreamCursor:
        """The cursor of a run that resumes at `step`; the readers continue at the saved states."""
        stream = saved.get("stream") or {"drawn": 0, "states": [None] * self.shards}
        states = stream["states"]
        if len(states) != self.shards:
            raise CheckpointError(
                f"the checkpoint is of a stream of {len(states)} shards, this one has {self.shards}.",
                f"return a stream with shards = {len(states)}, or start a new --run.dir",
            )
        after = StreamCursor(
            self.items, global_batch=self.global_batch, ahead=self._ahead, step=step, drawn=stream["drawn"]
        )
        after.begin(states)
        return after

    def note(self) -> str:
        return ""

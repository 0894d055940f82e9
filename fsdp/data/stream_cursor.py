"""The order of a stream, and the states that a checkpoint keeps.

A step takes global_batch / S items from each of the S shards; ranks slice them, shard after shard, as they
slice any batch. So a rank reads the shards that its slice touches: 1/R of the data where the number of ranks
R divides S, a shared shard twice elsewhere, and with one shard everything on every rank. The order is the
same for any number of ranks.

A checkpoint keeps each shard's state after the last item trained on: states are noted where a step's items
end, while the readers are ahead. Any number of ranks takes them up. Not here: the readers (stream.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.data.stream import StreamItems
from fsdp.dist import collectives


class StreamCursor:
    """The positions of each step: the same number of items from each shard."""

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
        number, own = self._number(step), {}
        for shard in self.items.shards:
            try:
                own[shard.index] = shard.state(number)
            except KeyError:
                continue
        known: dict[int, str | None] = {}
        for states in collectives.all_gather_objects(own):
            known |= states
        missing = [shard.index for shard in self.items.shards if shard.index not in known]
        if missing:
            raise CheckpointError(f"no rank knows the state of shard {missing[0]} before step {step + 1}.")
        states = [known[shard.index] for shard in self.items.shards]
        return {"stream": {"drawn": number, "states": [json.loads(s) if s else None for s in states]}}

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
        drawn, states = saved["drawn"], [None if one is None else json.dumps(one) for one in saved["states"]]
        if (
            type(drawn) is not int
            or drawn < 0
            or not all(s is None or "epoch" in json.loads(s) for s in states)
        ):
            raise ValueError("drawn or an epoch")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's record of the stream cannot be read ({error}).", "--checkpoint.resume never"
        ) from None
    if len(states) != shards:
        raise CheckpointError(
            f"the checkpoint is of a stream of {len(states)} shards, this one has {shards}.",
            f"return a stream with shards = {len(states)}, or start a new --run.dir",
        )
    return drawn, states

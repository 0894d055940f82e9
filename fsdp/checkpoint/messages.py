"""Words between ranks about checkpoints, on a gloo group of their own and in one order on each.

The default group is the model's: a save that used it from another thread would meet the step's own
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp.base.errors import CheckpointError, ShardrunError, error_number
from fsdp.base.phases import Activity, announces

T = TypeVar("T")


class Talk:
    """Rank 0 collects, rank 0 tells. Building one is collective.

    A rank that died is noticed by its connection; the time-out is for one whose storage takes very long.
    """

    def __init__(self, timeout_s: float = 3600.0) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.size > 1 else None
        )

    @announces(Activity.RANKS)
    def collect(self, value: Any) -> list[Any] | None:
        """On rank 0 everyone's value, elsewhere None."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    @announces(Activity.RANKS)
    def tell(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def on_main(self, act: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank; what fails there fails everywhere."""
        outcome: tuple[T | None, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (act(), None)
            except Exception as error:
                outcome = (None, error)
        told = (
            outcome
            if outcome[1] is None or isinstance(outcome[1], ShardrunError)
            else (None, _for_others(outcome[1]))
        )
        value, failure = self.tell(told)
        if failure is not None:
            raise outcome[1] or failure
        return value

    @announces(Activity.RANKS)
    def deal(self, values: list[Any] | None) -> Any:
        """Each rank its own of rank 0's values."""
        if self._group is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values if self.rank == 0 else None, src=0, group=self._group)
        return box[0]

    @announces(Activity.RANKS)
    def add(self, numbers: list[int]) -> list[int]:
        """The sums over ranks modulo 2⁶⁴."""
        if self._group is None:
            return [n % 2**64 for n in numbers]
        vector = torch.tensor(
            [n % 2**64 - (2**64 if n % 2**64 >= 2**63 else 0) for n in numbers], dtype=torch.int64
        )
        dist.all_reduce(vector, group=self._group)
        return [int(n) % 2**64 for n in vector]

    @announces(Activity.RANKS)
    def most(self, *numbers: int) -> list[int]:
        """The largest over ranks of each number: the cheap way to hear whether anyone says yes."""
        if self._group is None:
            return list(numbers)
        vector = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group)
        return [int(n) for n in vector]


def _for_others(error: Exception) -> CheckpointError:
    what = f"rank 0 failed: {type(error).__name__}: {error}"
    return CheckpointError(what, error_number=error_number(error))

"""Collectives on the default group: sums of tensors and numbers, objects broadcast from rank 0 or gathered.

Sum, sum_over_ranks    a tensor or numbers, summed over the ranks
broadcast_object       rank 0's object on every rank
all_gather_objects     every rank's object on every rank
on_main                a function of rank 0: its result, or its error, on every rank
all_to_all             elements from each rank to each rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.base.errors import CheckpointError, OtherRankFailed, ShardrunError, error_number
from fsdp.base.phases import Activity, announces
from fsdp.base.torch_private import at_end_of_backward

T = TypeVar("T")


def call_after_backward(tensor: Tensor, act: Callable[[], None]) -> None:
    """Call `act` when the backward of this tensor has computed all gradients.

    FSDP2 and DDP wait for their reductions after that.
    """
    tensor.register_hook(lambda _: at_end_of_backward(act))


class Sum:
    """An asynchronous sum over all ranks."""

    def __init__(self, tensor: Tensor, *, behind: Tensor | None = None) -> None:
        """The backward of `behind` starts the sum, when it has computed all gradients and before it waits for
        its reductions. A sum of two numbers during the backward took 0.7 ms of a step of 14, with one
        processor per rank, for gloo's threads.
        """
        self.tensor, self._work, self._started = tensor, None, False
        if behind is None or dist.get_world_size() == 1:
            self._start()
        else:
            call_after_backward(behind, self._start)

    def _start(self) -> None:
        if not self._started and dist.get_world_size() > 1:
            self._work = dist.all_reduce(self.tensor, async_op=True)
        self._started = True

    def wait(self) -> Tensor:
        self._start()
        if self._work is not None:
            self._wait(self._work)
            self._work = None
        return self.tensor

    @announces(Activity.RANKS)
    def _wait(self, work: Any) -> None:
        work.wait()


def sum_over_ranks(*numbers: float) -> list[float]:
    """The sum of each number over the ranks, computed on the host."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    return [float(v) for v in Sum(tensor).wait()]


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather_objects(value: Any) -> list[Any]:
    """Each rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(rank: int, act: Callable[[], T]) -> T:
    """The result of `act` on rank 0, on every rank; if it fails there, every rank raises."""
    value, failure = _tried(act, rank == 0)
    error = None if failure is None else (str(failure), getattr(failure, "exit_code", 1))
    value, error = broadcast_object((value, error))
    if error is not None:
        raise failure or OtherRankFailed(0, *error)
    return value  # type: ignore[return-value]


def _tried(act: Callable[[], T], here: bool) -> tuple[T | None, Exception | None]:
    """What it returns or raises, if it is called here."""
    try:
        return act() if here else None, None
    except Exception as error:
        return None, error


def ranks() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@announces(Activity.RANKS)
def all_to_all(sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Tensor:
    """What each rank sent to this one, in rank order: one-dimensional, as `sent`, whose elements are for rank
    0, 1, …: `counts` of them each. `received` is the number from each rank.
    """
    if ranks() == 1:
        return sent
    found, size = sent.new_empty(sum(received)), sent.element_size()
    # As bytes: not every backend sends every dtype.
    dist.all_to_all_single(
        found.view(torch.uint8),
        sent.view(torch.uint8),
        [size * count for count in received],
        [size * count for count in counts],
    )
    return found


class ObjectGroup:
    """Object collectives on a gloo group of its own, for a thread beside the training step.

    The default group is the model's: messages of another thread there would meet the step's collectives.
    Building one is collective; every rank calls its methods in the same order. A rank that died closes its
    connection, which ends the others' calls; the time-out is for slow storage.
    """

    def __init__(self, timeout_s: float = 3600.0) -> None:
        self.rank, self.size = this_rank(), ranks()
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.size > 1 else None
        )

    @announces(Activity.RANKS)
    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    @announces(Activity.RANKS)
    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def on_main(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; its ShardrunError is raised on every rank too."""
        value, failure = _tried(act, self.rank == 0)
        sent = failure
        if failure is not None and not isinstance(failure, ShardrunError):  # it may not survive pickling
            text = f"rank 0 failed: {type(failure).__name__}: {failure}"
            sent = CheckpointError(text, error_number=error_number(failure))
        value, sent = self.broadcast((value, sent))
        if sent is not None:
            raise failure or sent
        return value  # type: ignore[return-value]

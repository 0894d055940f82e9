"""What ranks must know of one another in a run: sums, one rank's word, everyone's word. The only collectives
of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.base.errors import ShardrunError, TrainingError
from fsdp.base.phases import Activity, announces
from fsdp.base.torch_private.distributed import at_end_of_backward

T = TypeVar("T")


class Elsewhere(TrainingError):
    """Another rank failed and tells the story; this one only leaves, with the same exit code."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.exit_code = exit_code


def lost_a_neighbour(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: its own words are the ones to read."""
    return isinstance(error, RuntimeError) and any(
        words in str(error)
        for words in ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    )


def call_behind(tensor: Tensor, act: Callable[[], None]) -> None:
    """Call `act` when the backward of this tensor has computed all gradients, before FSDP2 and DDP end their
    reductions.
    """
    tensor.register_hook(lambda _: at_end_of_backward(act))


class Sum:
    """A sum over all ranks that goes on while the caller works."""

    def __init__(
        self,
        tensor: Tensor | Callable[[], Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        behind: Tensor | None = None,
    ) -> None:
        """A function makes the tensor as the sum begins. `behind`: begun when the backward of this tensor has
        computed all, and before it waits for what it reduces. Beside it the sum of two numbers, which is
        gloo's threads' work, took 0.7 ms of a step of 14, each rank with one processor.
        """
        self._made: Tensor | Callable[[], Tensor] | None = tensor
        self._group = group
        self._work: Any = None
        self._begun = False
        if behind is None or dist.get_world_size() == 1:
            self._begin()
        else:
            call_behind(behind, self._begin)

    def _begin(self) -> None:
        if not self._begun:
            made, self._made = self._made, None  # what a function holds is freed as the sum begins
            assert made is not None
            self._begun, self.tensor = True, made if isinstance(made, Tensor) else made()
            if dist.get_world_size() > 1:
                self._work = dist.all_reduce(self.tensor, group=self._group, async_op=True)

    @announces(Activity.RANKS)
    def wait(self) -> Tensor:
        self._begin()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor


def sum_over_ranks(*numbers: float) -> list[float]:
    """On the host, whatever the device."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    return [float(v) for v in Sum(tensor).wait()]


def from_main(value: T) -> T:
    """Rank 0's value on every rank."""
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def everyones(value: Any) -> list[Any]:
    """Each rank's value, in rank order, on every rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def on_main(rank: int, act: Callable[[], T]) -> T:
    """Rank 0 looks at the disk, everyone hears; what fails there fails everywhere, told once."""
    value: T | None = None
    failure: Exception | None = None
    if rank == 0:
        try:
            value = act()
        except Exception as error:
            failure = error
    code = failure.exit_code if isinstance(failure, ShardrunError) else 1
    told = from_main((value, None if failure is None else str(failure), code))
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise Elsewhere(0, told[1], told[2])
    return told[0]  # type: ignore[return-value]

"""A step's micro-batches for one rank, read ahead by threads; and held-out samples, each once over all ranks.

A global batch is split into contiguous near-equal parts, one per rank, and a part into near-equal
micro-batches, which spreads the padding. Padding repeats a sample and is marked; all ranks always get the
same number of micro-batches. On CUDA a step's batch is copied on a separate stream while the previous step
computes. Not here: the order (fsdp/data/types.py).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.base.devices import set_thread_device, thread_device
from fsdp.base.errors import OneRankError, ShardrunError, one_line
from fsdp.base.phases import READER
from fsdp.base.text import listed
from fsdp.data.types import Batch, Samples, StepBatch
from fsdp.distributed.mesh import DataRank
from fsdp.models.loss import count_tokens

T = TypeVar("T")


class SampleOrder(Protocol):
    """The loader's view of a cursor."""

    def indices(self, step: int) -> np.ndarray: ...


def slices(indices: np.ndarray, rank: DataRank, accumulation: int) -> list[np.ndarray]:
    """Returns this rank's indices of a global batch, one array per micro-batch; the first ranks and
    micro-batches hold the remainder.
    """
    return np.array_split(np.array_split(indices, rank.count)[rank.index], accumulation)


def pad(indices: np.ndarray, rows: int, spare: int) -> np.ndarray:
    """Pads to `rows` with the first index, or with `spare` if there is none."""
    if len(indices) == rows:
        return indices
    filling = indices[0] if len(indices) else spare
    return np.concatenate([indices, np.full(rows - len(indices), filling, dtype=np.int64)])


class Loader:
    """step(k) returns step k's batch and starts reading the next ones; any order of steps works."""

    def __init__(
        self,
        samples: Samples,
        cursor: SampleOrder,
        *,
        micro_batch: int,
        accumulation: int,
        rank: DataRank,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
        device: torch.device | None = None,
        source_of: Callable[[np.ndarray], Tensor] | None = None,
        about: Callable[[int], tuple[int, float | None]] = lambda step: (0, None),
        cut: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> None:
        """Batches are copied to `device` while they are read ahead; None leaves them on the host. `about`
        gives the seed and the epoch of a step's batch; `cut` takes this rank's part of each row.
        """
        self._about, self._cut = about, cut
        self.samples, self.cursor, self._source_of = samples, cursor, source_of
        self.micro_batch, self.accumulation, self.rank = micro_batch, accumulation, rank
        # context and tensor ranks of one data index read the same rows
        self._name = f"rank {dist.get_rank() if dist.is_initialized() else rank.index}"
        self._pin = pin
        self._masks: dict[int, Tensor] = {}
        on_cuda = workers > 0 and device is not None and device.type == "cuda"
        self._prefetch = DevicePrefetch(device) if on_cuda and device is not None else None
        # At least one step per thread, or a thread would be idle.
        self._readers = Readers(self._read, workers, ahead=max(prefetch, workers)) if workers else None

    def step(self, step: int) -> StepBatch:
        """Raises the error of reading it, with the rank and the sample."""
        batch = self._readers.get(step) if self._readers else self._read(step)
        return batch if self._prefetch is None else self._prefetch.receive(batch)

    def close(self) -> None:
        """Waits for reads in progress and ends the threads."""
        if self._readers:
            self._readers.close()

    def _read(self, step: int) -> StepBatch:
        indices = self.cursor.indices(step)
        spare = int(indices[0])
        parts = slices(indices, self.rank, self.accumulation)
        batch = StepBatch(
            [self._micro(step, part, spare) for part in parts], len(indices), *self._about(step)
        )
        return batch if self._prefetch is None else self._prefetch.send(batch)

    def _micro(self, step: int, part: np.ndarray, spare: int) -> Batch:
        rows = pad(part, self.micro_batch, spare)
        data = read_batch(self.samples, rows, f"{self._name}, step {step + 1}")
        data = data if self._cut is None else self._cut(data)
        mask = self._mask(len(part))
        counted = count_tokens(data, mask)
        sources = None if self._source_of is None else self._source_of(rows)
        if self._pin:
            data = {name: value.pin_memory() for name, value in data.items()}
            sources = None if sources is None else sources.pin_memory()
        return Batch(data, mask, len(part), counted, sources)

    def _mask(self, rows: int) -> Tensor:
        """Which rows are samples. An epoch has few different numbers of them."""
        if rows not in self._masks:
            mask = torch.arange(self.micro_batch) < rows
            # A copy to the device from unpinned memory blocks the host, however small it is.
            self._masks[rows] = mask.pin_memory() if self._pin else mask
        return self._masks[rows]


def read_batch(samples: Samples, indices: np.ndarray, where: str) -> dict[str, Tensor]:
    """Calls samples.batch; an error becomes one line that names the sample."""
    try:
        data = samples.batch(indices)
    except ShardrunError as error:
        error.scope, error.args = "rank", (f"{where}: {error}",)
        raise
    except Exception as error:
        raise _named(samples, indices, where, error) from error
    short = {name: len(value) for name, value in data.items() if len(value) != len(indices)}
    if short:
        raise OneRankError(f"{where}: {len(indices)} samples were requested, but {short} rows were returned.")
    return data


def _named(samples: Samples, indices: np.ndarray, where: str, error: Exception) -> OneRankError:
    """Reads each sample alone, to find those that fail. Called only when the run is about to fail."""
    bad = []
    for index in np.unique(indices):
        try:
            samples.batch(index[None])
        except Exception:
            bad.append(int(index))
    samples_named = f"sample{'s' * (len(bad) != 1)} {listed(bad or indices.tolist())}"
    reason = f"{where}: {samples_named} cannot be read: {one_line(error)}."
    return OneRankError(reason, "mend it, or leave it out; the same command continues")


class _EvenlySpread:
    """`count` of `available` held-out samples, evenly spread: the first ones may all be of one class."""

    def __init__(self, available: int, count: int, at_once: int) -> None:
        self.chosen = np.arange(count, dtype=np.int64) * available // max(count, 1)
        self.at_once = at_once
        self.steps = -(-count // at_once)

    def indices(self, step: int) -> np.ndarray:
        return self.chosen[(step % self.steps) * self.at_once :][: self.at_once]


def heldout_batches(
    samples: Samples, *, batch: int, rank: DataRank, limit: int, **reading: Any
) -> Iterator[Batch]:
    """Yields as many batches on every rank, with each held-out sample in one of them; limit 0 takes all.
    `reading`: further arguments of Loader.
    """
    count = min(limit or len(samples), len(samples))
    order = _EvenlySpread(len(samples), count, batch * rank.count)
    loader = Loader(samples, order, micro_batch=batch, accumulation=1, rank=rank, **reading)
    try:
        for step in range(order.steps):
            yield loader.step(step).micro[0]
    finally:
        loader.close()


class Readers(Generic[T]):
    """Threads: get(k) returns make(k), or raises its error; `ahead` later ones are prepared. A jump discards
    them. Two C queues and a dict instead of an executor's futures: get() runs in every step, and a future
    costs ten times as much.
    """

    def __init__(self, make: Callable[[int], T], threads: int, *, ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._tasks: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[int, int, T | None, BaseException | None]] = SimpleQueue()
        self._ready: dict[int, tuple[T | None, BaseException | None]] = {}
        self._expected: int | None = None
        self._device = thread_device()  # the device to which the threads pin and copy
        self._jumps = 0  # numbers each sequence of consecutive steps: results of an earlier one are dropped
        # Daemons: a read that hangs does not keep the process from ending.
        self._threads: list[threading.Thread] = []
        for number in range(threads):
            thread = threading.Thread(target=self._work, name=f"{READER}{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def get(self, step: int) -> T:
        if step == self._expected:
            self._tasks.put((self._jumps, step + self._ahead))
        else:
            self._jumps += 1
            self._ready.clear()
            for later in range(step, step + self._ahead + 1):
                self._tasks.put((self._jumps, later))
        self._expected = step + 1
        while step not in self._ready:
            jumps, made, value, error = self._made.get()
            if jumps == self._jumps:
                self._ready[made] = (value, error)
        value, error = self._ready.pop(step)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _work(self) -> None:
        set_thread_device(self._device)
        while (task := self._tasks.get()) is not None:
            jumps, step = task
            if jumps != self._jumps:
                continue
            try:
                self._made.put((jumps, step, self._make(step), None))
            except BaseException as error:
                self._made.put((jumps, step, None, error))

    def close(self) -> None:
        """Ends the threads, each after its current task."""
        self._jumps += 1
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._expected = None


class DevicePrefetch:
    """`send` runs on a reader thread, `receive` on the training thread; the host waits in neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _copy_stream(device)

    def send(self, batch: StepBatch) -> StepBatch:
        # A new thread's current device is 0, whatever the process has chosen.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = [micro.to(self._device) for micro in batch.micro]
            return dataclasses.replace(batch, micro=moved, arrived=self._stream.record_event())

    def receive(self, batch: StepBatch) -> StepBatch:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(batch.arrived)
        for micro in batch.micro:
            for tensor in (*micro.data.values(), micro.valid, micro.sources):
                if tensor is not None:
                    # Allocated on the copy stream: without this the allocator could reuse the memory while it
                    # is still read.
                    tensor.record_stream(computing)
        return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: each evaluation makes a DevicePrefetch, and torch gives out 32 streams in turn."""
    return torch.cuda.Stream(device)

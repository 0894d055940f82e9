"""A step's micro-batches for one rank, read ahead by threads; and held-out samples, each once over all ranks.

A global batch is split into contiguous near-equal parts, one per rank, and a part into near-equal
micro-batches, which spreads the padding. Padding repeats a sample and is marked; all ranks always get the
same number of micro-batches. Not here: the order (fsdp/data/cursor.py) and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import OneRankError, ShardrunError, one_line
from fsdp.base.text import listed
from fsdp.data.device_prefetch import maybe_carrier
from fsdp.data.reader_threads import Readers
from fsdp.data.types import Batch, Samples, StepBatch
from fsdp.dist.mesh import DataRank
from fsdp.models.cross_entropy import count_tokens


class SampleOrder(Protocol):
    """The loader's view of a cursor."""

    def indices(self, step: int) -> np.ndarray: ...


def slices(indices: np.ndarray, rank: DataRank, accumulation: int) -> list[np.ndarray]:
    """Returns this rank's indices of a global batch, one array per micro-batch; the first ranks and
    micro-batches hold the remainder.
    """
    own = _part(indices, rank.index, rank.count)
    return [_part(own, place, accumulation) for place in range(accumulation)]


def _part(array: np.ndarray, place: int, parts: int) -> np.ndarray:
    each, odd = divmod(len(array), parts)
    start = place * each + min(place, odd)
    return array[start : start + each + (place < odd)]


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
        workers: int,
        prefetch: int,
        pin: bool,
        device: torch.device | None = None,
        source_of: Callable[[np.ndarray], Tensor] | None = None,
    ) -> None:
        """Batches are copied to `device` while they are read ahead; None leaves them on the host."""
        self.samples, self.cursor, self._source_of = samples, cursor, source_of
        self.micro_batch, self.accumulation, self.rank = micro_batch, accumulation, rank
        self._pin = pin
        self._masks: dict[int, Tensor] = {}
        self._carrier = maybe_carrier(device if workers else None)
        # At least one step per thread, or a thread would be idle.
        self._readers = Readers(self._read, workers, ahead=max(prefetch, workers)) if workers else None

    def step(self, step: int) -> StepBatch:
        """Raises the error of reading it, with the rank and the sample."""
        batch = self._readers.get(step) if self._readers else self._read(step)
        return batch if self._carrier is None else self._carrier.receive(batch)

    def close(self) -> None:
        """Waits for reads in progress and ends the threads."""
        if self._readers:
            self._readers.close()

    def _read(self, step: int) -> StepBatch:
        indices = self.cursor.indices(step)
        spare = int(indices[0])
        parts = slices(indices, self.rank, self.accumulation)
        batch = StepBatch([self._micro(step, part, spare) for part in parts], len(indices))
        return batch if self._carrier is None else self._carrier.send(batch)

    def _micro(self, step: int, part: np.ndarray, spare: int) -> Batch:
        rows = pad(part, self.micro_batch, spare)
        data = read_batch(self.samples, rows, f"rank {self.rank.index}, step {step}")
        mask = self._mask(len(part))
        counted = count_tokens(data, mask)
        if self._pin:
            data = {name: value.pin_memory() for name, value in data.items()}
        sources = None if self._source_of is None else self._source_of(rows)
        if sources is not None and self._pin:
            sources = sources.pin_memory()
        return Batch(data, mask, len(part), counted, sources)

    def _mask(self, rows: int) -> Tensor:
        """Which rows are samples. An epoch has few different numbers of them."""
        found = self._masks.get(rows)
        if found is None:
            mask = torch.arange(self.micro_batch) < rows
            # A copy to the device from unpinned memory blocks the host, however small it is.
            found = self._masks[rows] = mask.pin_memory() if self._pin else mask
        return found


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
    plural, named = "s" * (len(bad) != 1), listed(bad or indices.tolist())
    return OneRankError(f"{where}: sample{plural} {named} cannot be read: {one_line(error)}.")


class _EvenlySpread:
    """`count` of `available` held-out samples, evenly spread: the first ones may all be of one class."""

    def __init__(self, available: int, count: int, at_once: int) -> None:
        self.chosen = np.arange(count, dtype=np.int64) * available // max(count, 1)
        self.at_once = at_once
        self.steps = -(-count // at_once)

    def indices(self, step: int) -> np.ndarray:
        return self.chosen[(step % self.steps) * self.at_once :][: self.at_once]


def heldout_batches(
    samples: Samples,
    *,
    batch: int,
    rank: DataRank,
    limit: int,
    workers: int = 0,
    prefetch: int = 2,
    pin: bool = False,
    device: torch.device | None = None,
    source_of: Callable[[np.ndarray], Tensor] | None = None,
) -> Iterator[Batch]:
    """Yields as many batches on every rank, with each held-out sample in one of them; limit 0 takes all."""
    count = min(limit or len(samples), len(samples))
    order = _EvenlySpread(len(samples), count, batch * rank.count)
    loader = Loader(
        samples,
        order,
        micro_batch=batch,
        accumulation=1,
        rank=rank,
        workers=workers,
        prefetch=prefetch,
        pin=pin,
        device=device,
        source_of=source_of,
    )
    try:
        for step in range(order.steps):
            yield loader.step(step).micro[0]
    finally:
        loader.close()

"""--data.skip_unreadable N: samples that cannot be read are replaced, up to N different ones of a run.

The replacement is the next readable sample in the data's order (index + 1, + 2 …, wrapping around), in a
mixture that of the same source. It depends on the data only: any number of ranks, and a resumed run, train on
the same samples. Each unreadable sample is a line in RUN/unreadable/, and the bound counts those of all ranks
and all starts. A batch that fails although each of its samples can be read stops the run. Not here: how a
batch is split (loader.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from fsdp.base.errors import ConfigError, OneRankError, ShardrunError, one_line
from fsdp.data.types import DataSet, Samples
from fsdp.rundir.line_files import append, read_records

log = logging.getLogger(__name__)

FOLDER = "unreadable"


def first_readable(samples: Samples, allowed: int, name: str, hint: str) -> dict[str, Tensor]:
    """The batch of sample 0; where `allowed` samples may be unreadable, of the first that can be read.

    An error names the data set by `name`, such as "--data.name mine:build".
    """
    for index in range(min(allowed + 1, len(samples)) if allowed else 1):  # a stream has no length
        try:
            return samples.batch(np.array([index], np.int64))
        except Exception as error:
            why = error
    raise ConfigError(f"{name}: sample {index} cannot be read: {one_line(why)}.", hint) from why


def maybe_skipping(data: DataSet, allowed: int, run: Path, rank: int) -> DataSet:
    """Wraps the data to skip unreadable samples; unchanged if `allowed` is 0."""
    if not allowed:
        return data
    record = Unreadable(run / FOLDER, rank, allowed)
    train_ends, heldout_ends = (
        (data.sources.train_ends, data.sources.heldout_ends) if data.sources else ((), ())
    )
    train = ReadableSamples(data.train, "sample", record, train_ends)
    if data.heldout is None:
        return replace(data, train=train)
    return replace(
        data, train=train, heldout=ReadableSamples(data.heldout, "held-out sample", record, heldout_ends)
    )


class Unreadable:
    """Record of unreadable samples, a file per rank: appends of two nodes to one file may be lost."""

    def __init__(self, folder: Path, rank: int, allowed: int) -> None:
        self._folder, self._rank, self._allowed = folder, rank, allowed
        self._lock = threading.Lock()  # several threads read

    def add(self, kind: str, index: int, error: Exception) -> None:
        """Records a sample, and raises OneRankError if there are more than allowed."""
        what = one_line(error)
        with self._lock:
            known = self._known()
            if (kind, index) not in known:
                self._folder.mkdir(exist_ok=True)
                line = {"kind": kind, "index": index, "rank": self._rank, "why": what}
                append(self._folder / f"rank-{self._rank:05d}.jsonl", line)
                # Read again: another rank may have written since.
                known = self._known()
        if len(known) > self._allowed:
            raise OneRankError(
                f"{kind} {index} cannot be read: {what}: {len(known)} by now, --data.skip_unreadable "
                f"{self._allowed} allowed.",
                f"--data.skip_unreadable {2 * len(known)}, or repair what {self._folder} lists and remove "
                "that folder",
            )
        log.warning(
            "%s %d cannot be read (%s): the next one replaces it; %d of %d allowed",
            kind,
            index,
            what,
            len(known),
            self._allowed,
        )

    def _known(self) -> set[tuple[str, int]]:
        records = (record for path in self._folder.glob("rank-*.jsonl") for record in read_records(path))
        samples = ((record.get("kind"), record.get("index")) for record in records)
        return {(kind, index) for kind, index in samples if type(kind) is str and type(index) is int}


class ReadableSamples:
    """Samples, each unreadable one replaced by the next that can be read."""

    def __init__(
        self, samples: Samples, kind: str, record: Unreadable, ends: Sequence[int] | np.ndarray
    ) -> None:
        """`ends` are those of a mixture's sources; none for one data set."""
        self._samples, self._kind, self._record = samples, kind, record
        self._ends = np.array([*ends] or [len(samples)], np.int64)
        self._stand_ins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = self._replaced(indices)
        try:
            return self._samples.batch(chosen)
        except (ShardrunError, MemoryError):
            raise  # not an error of one sample
        except Exception:
            again = self._replaced(np.array([self._readable_from(int(index)) for index in chosen], np.int64))
            if np.array_equal(again, chosen):
                raise
        return self._samples.batch(again)

    def _replaced(self, indices: np.ndarray) -> np.ndarray:
        if not self._stand_ins:
            return indices
        return np.array([self._stand_ins.get(int(index), int(index)) for index in indices], np.int64)

    def _readable_from(self, index: int) -> int:
        """Returns `index`, or the first readable one after it."""
        place, missed = int(np.searchsorted(self._ends, index, side="right")), []
        start, end = int(self._ends[place - 1]) if place else 0, int(self._ends[place])
        while (error := self._error_of(index)) is not None:
            self._record.add(self._kind, index, error)
            missed.append(index)
            if len(missed) == end - start:
                these = f"{self._kind}s" if end - start == len(self) else f"{self._kind}s of a source"
                raise OneRankError(f"none of {end - start} {these} can be read: {error}.")
            following = index + 1 if index + 1 < end else start
            index = self._stand_ins.get(following, following)
        self._stand_ins.update(dict.fromkeys(missed, index))
        return index

    def _error_of(self, index: int) -> Exception | None:
        try:
            self._samples.batch(np.array([index], np.int64))
        except (ShardrunError, MemoryError):
            raise
        except Exception as error:
            return error
        return None

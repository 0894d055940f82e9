"""Data that a run reads up to a gate: a test meets the run while it trains, however busy the machine is.

--data.name tests.support.gated:digits --data.args.last 30 --data.args.gate FILE

What is read after the first `last` batches of a start (samples, of `vectors`) waits until FILE is there.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.data.types import DataSet, Samples
from tests.support.user_code import Vectors


class Gate:
    def __init__(self, last: int, file: str) -> None:
        self._last, self._file, self._read = last, Path(file), itertools.count(1)

    def pass_one(self) -> None:
        if next(self._read) > self._last:
            while not self._file.exists():
                time.sleep(0.05)


class GatedSamples:
    def __init__(self, samples: Samples, gate: Gate) -> None:
        self._samples, self._gate = samples, gate

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        self._gate.pass_one()
        return self._samples.batch(indices)


class GatedVectors(Vectors):
    def __init__(self, gate: Gate) -> None:
        super().__init__(50)
        self._gate = gate

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._gate.pass_one()
        return super().__getitem__(index)


def digits(last: int, gate: str) -> DataSet:
    made = build_dataset(DataSection(name="digits"))
    return dataclasses.replace(made, train=GatedSamples(made.train, Gate(last, gate)))


def vectors(last: int, gate: str) -> GatedVectors:
    return GatedVectors(Gate(last, gate))

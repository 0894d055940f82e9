"""A data set for jobs that must be met while they run: the digits, read slowly in the starts that should be
slow.

--data.name tests.slurm.slow:digits      with --data.args.seconds, or, in the job's environment:
SLOW_S        seconds that each batch takes
SLOW_STARTS   how many starts of the job are slow (default: all)
RAISE_AT      the batch of each start that raises
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.data.types import DataSet, Samples


@dataclass
class Slowly:
    samples: Samples
    seconds: float
    slow_from: int
    raise_at: int
    batches: int = 0

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        self.batches += 1
        if self.batches >= self.slow_from:
            time.sleep(self.seconds)
        if self.batches == self.raise_at:
            raise ValueError(f"batch {self.batches} cannot be read")
        return self.samples.batch(indices)


def digits(seconds: float = 0.0) -> DataSet:
    made = build_dataset(DataSection(name="digits"))
    start, slow_starts, slow_from, raise_at = (
        int(os.environ.get(name, default))
        for name, default in (
            ("SLURM_RESTART_COUNT", "0"),
            ("SLOW_STARTS", "1000"),
            ("SLOW_FROM", "0"),
            ("RAISE_AT", "0"),
        )
    )
    seconds = seconds or (float(os.environ.get("SLOW_S", "0")) if start < slow_starts else 0.0)
    return dataclasses.replace(made, train=Slowly(made.train, seconds, slow_from, raise_at))

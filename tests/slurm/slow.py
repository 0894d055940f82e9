"""A data set for jobs that must be met while they run: the digits, read slowly in the starts that should be
slow.

--data.name tests.slurm.slow:digits      with --data.args.seconds, or, in the job's environment:
SLOW_S        seconds that each batch takes
SLOW_STARTS   how many starts of the job are slow (default: all)
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

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return self.samples.batch(indices)


def digits(seconds: float = 0.0) -> DataSet:
    made = build_dataset(DataSection(name="digits"))
    is_slow = int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(os.environ.get("SLOW_STARTS", "1000"))
    seconds = seconds or (float(os.environ.get("SLOW_S", "0")) if is_slow else 0.0)
    return dataclasses.replace(made, train=Slowly(made.train, seconds))

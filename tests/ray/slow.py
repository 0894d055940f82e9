"""The digits, read slowly, for runs that must be met while they run: --data.name tests.ray.slow:digits"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.data.types import DataSet, Samples


@dataclass
class Slowly:
    samples: Samples
    seconds: float
    bad_file: str

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        if self.bad_file and Path(self.bad_file).exists():
            raise OSError(f"{self.bad_file} cannot be read")
        return self.samples.batch(indices)


def digits(seconds: float = 0.1, bad_file: str = "") -> DataSet:
    made = build_dataset(DataSection(name="digits"))
    return dataclasses.replace(made, train=Slowly(made.train, seconds, bad_file))

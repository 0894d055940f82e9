"""The digits, read at a pace that leaves a soak's processors time: --data.name tests.torture.paced:digits"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fsdp.data import digits as real
from fsdp.data.arguments import Where
from fsdp.data.types import DataSet, Samples


@dataclass
class Paced:
    samples: Samples
    seconds: float

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return self.samples.batch(indices)


def digits(seconds: float = 0.0) -> DataSet:
    made = real.build(Where("", 256, {}))
    return dataclasses.replace(made, train=Paced(made.train, seconds))

"""For --data.name: held-out data that are read once a file is there, as if they built an index first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from tests.support.user_code import Vectors

WAITS_FOR = "HELD_OUT_WAITS_FOR"


class Indexed(Vectors):
    """Rank 1 waits for it."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        while dist.get_rank() == 1 and not Path(os.environ[WAITS_FOR]).exists():
            time.sleep(0.05)
        return super().__getitem__(index)


def with_indexed_heldout() -> tuple[Vectors, Vectors]:
    return Vectors(50), Indexed(23)

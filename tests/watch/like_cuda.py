"""A model for --model.name whose ranks look to the watch as those on CUDA do, on a CPU: a stand-in for NCCL.

The wrappers that see collectives begin and end are gone, since on CUDA a call returns when its kernel is
queued: only PyTorch's flight recorder knows them, here that of gloo. FAULT selects what rank 2 does in its
fourth forward.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import fsdp.watch.rank
from fsdp.watch import status_page
from tests.support.user_code import Uneven

FAULT = os.environ["FAULT"]


class NoWrappers:
    """In place of CollectiveCounter."""

    def __init__(self, writer: status_page.Writer) -> None:
        writer.numbers[status_page.CUDA] = 1

    def close(self) -> None:
        pass


fsdp.watch.rank.CollectiveCounter = NoWrappers  # type: ignore[misc,assignment]
fsdp.watch.rank.device_clock = lambda writer: None  # type: ignore[assignment,return-value]


def blocks() -> None:
    time.sleep(1000)


def loops() -> None:
    while True:
        pass


def spins() -> None:
    """As a host that waits for its GPU: in C, without Python's lock."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def another_collective() -> None:
    dist.all_reduce(torch.zeros(5))


FAULTS = {"blocked": blocks, "loop": loops, "device": spins, "collective": another_collective}


class Faulty(Uneven):
    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Faulty.calls += 1
        if dist.get_rank() == 2 and Faulty.calls == 4:
            FAULTS[FAULT]()
        return super().forward(*args, **kwargs)

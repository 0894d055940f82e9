"""One rank of a run: train() in a forked process, so that a start does not import torch."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from fsdp import config
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from tests.golden.configurations import INPUTS
from tests.support import data_cache
from tests.support.env import env_of


def run(rank: int, ranks: int, flags: list[str], store: str, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path.insert(0, str(INPUTS))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    train(config.load(flags), env_of(rank, ranks, launcher="golden"), process_ends=True)
    sys.stdout.flush()
    os._exit(0)  # the group was made here and not by train(); nobody needs its orderly end


def on_a_rank(env: DistEnv, words: list[str], folder: str) -> str | None:
    """Trains on the pool's ranks (tests/support/world.py), in this folder; the error as a user reads it."""
    os.chdir(folder)
    if str(INPUTS) not in sys.path:
        sys.path.insert(0, str(INPUTS))
    return data_cache.on_a_rank(env, words, f"{folder}/cache")

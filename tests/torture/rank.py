"""One rank of such a run: train() in a forked process, so that a restart does not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp import config
from fsdp.run.loop import train
from tests.support.env import env_of


def run(rank: int, ranks: int, flags: list[str], store: str, log: str) -> None:
    _speak_into(Path(log))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    env = env_of(rank, ranks, launcher="torture")
    train(config.load(flags), env, process_ends=True)
    sys.stdout.flush()
    os._exit(0)  # the group was made here and not by train(); nobody needs its orderly end


def _speak_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

"""One rank's file of a save: what it holds, `.metadata`, and the bytes that torch.save writes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp.base.devices import digest_shard
from fsdp.checkpoint import Checkpointer, save
from fsdp.checkpoint import state as states
from fsdp.checkpoint.save import HEAD
from fsdp.checkpoint.state import take_snapshot
from fsdp.config import CheckpointSection
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv
from fsdp.optim.optimizer import TrainState
from tests.checkpoint.small import build_state
from tests.support.env import env_of
from tests.support.world import run_world

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(), (5,), (0,), (2, 0, 3), (2, 3, 1, 2, 2, 3)], ids=str)
def test_torch_load_reads_back_every_bit(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    count = int(np.prod(sizes, dtype=int)) * dtype.itemsize
    data = bytes(byte & 1 for byte in os.urandom(count)) if dtype == torch.bool else os.urandom(count)
    head, tail = save.frame(dtype, sizes)
    assert len(head) == HEAD or not count
    loaded = torch.load(io.BytesIO(head + data + tail), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape), loaded.stride()) == (dtype, sizes, torch.empty(sizes).stride())
    assert loaded.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data if count else True


def test_a_tensors_digest_is_the_sum_of_those_of_its_rows() -> None:
    whole = torch.randn(4, 5, 6, dtype=torch.float64)
    total = sum(states.digest(whole[row : row + 2], (row, 0, 0), (4, 5, 6)) for row in (0, 2))
    assert total % 2**64 == digest_shard(whole).at(0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [(0,), (), (7,), (3, 5), (2 * states.CHUNK + 7,)], ids=str)
def test_a_digest_is_the_same_on_a_cpu_and_on_a_device(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """numpy computes it on a CPU, torch elsewhere: one checkpoint is verified on both."""
    whole = torch.arange(int(np.prod(size, dtype=int))).reshape(size).to(dtype)
    assert states.digest(whole, (0,) * len(size), size) == digest_shard(whole).at(0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_written_once_and_read_by_torch_under_both_names(tmp_path: Path) -> None:
    model = Tied()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    env = env_of()
    checkpointer = Checkpointer(
        CheckpointSection(), tmp_path, env, build_state(env, "ddp")[2], config_hash="00"
    )
    checkpointer.save(state, metrics={}, reason="a test", wait=True)
    checkpointer.close()
    folder = tmp_path / "checkpoints" / "step-00000000"
    storage = FileSystemReader(folder).read_metadata().storage_data
    places = {index.fqn: info for index, info in storage.items()}
    assert places["model.embed.weight"] == places["model.head.weight"]
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(io.BytesIO((tmp_path / "whole.pt").read_bytes()), weights_only=False)["model"]
    assert torch.equal(whole["embed.weight"], model.embed.weight)
    assert torch.equal(whole["head.weight"], model.embed.weight)


def rows_written(env: DistEnv) -> tuple[list[int], int]:
    """Under DDP: the rows of a large weight, and what of a small one and a buffer is this rank's to write."""
    model = nn.Sequential(nn.Linear(512, 1025), nn.BatchNorm1d(1025))
    state = TrainState(
        nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    mine = {piece.key: piece for piece in take_snapshot(state, ObjectGroup()).pieces}
    return list(mine["model.0.weight"].sizes), sum("running" in key for key in mine)


def test_replicas_share_a_large_weight_by_rows_and_rank_0_writes_the_buffers() -> None:
    (first, buffers), (second, others) = run_world(2, rows_written)
    assert first == [512, 512]
    assert second == [513, 512]
    assert (buffers, others) == (2, 0)

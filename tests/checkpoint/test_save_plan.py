"""Which rank writes what, and the `.metadata` of a save."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp.checkpoint import Checkpointer, metadata, save_plan
from fsdp.checkpoint.state import Piece, Snapshot, take_snapshot
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from fsdp.optim.state import TrainState
from tests.checkpoint.small import build_state
from tests.support.env import env_of
from tests.support.world import run_world


def test_values_of_another_length_move_those_behind_them() -> None:
    tensor = torch.arange(6.0)
    snapshot = Snapshot([Piece("a", ("a",), (6,), (0,), tensor)], {})
    plan = save_plan.make_plan(snapshot, None, ObjectGroup())
    assert save_plan.make_plan(snapshot, plan, ObjectGroup()) is plan
    short = save_plan.metadata_bytes(plan, [("x", ("x",), b"1"), ("y", ("y",), b"22")])
    assert save_plan.metadata_bytes(plan, [("x", ("x",), b"9"), ("y", ("y",), b"88")]) is short
    long = save_plan.metadata_bytes(plan, [("x", ("x",), b"333"), ("y", ("y",), b"22")])
    for data, length in ((short, 1), (long, 3)):
        storage = metadata.read(data).storage_data
        places = {
            index.fqn: (info.offset - plan.values_begin, info.length) for index, info in storage.items()
        }
        assert (places["x"], places["y"]) == ((0, length), (length, 2))
        assert storage == pickle.loads(data).storage_data


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
    snapshot, group = take_snapshot(state), ObjectGroup()
    plan = save_plan.make_plan(snapshot, None, group)
    mine = {snapshot.pieces[nth].key: snapshot.pieces[nth] for nth in plan.mine}
    return list(mine["model.0.weight"].sizes), sum("running" in key for key in mine)


def test_replicas_share_a_large_weight_by_rows_and_rank_0_writes_the_buffers() -> None:
    (first, buffers), (second, others) = run_world(2, rows_written)
    assert first == [512, 512]
    assert second == [513, 512]
    assert (buffers, others) == (2, 0)

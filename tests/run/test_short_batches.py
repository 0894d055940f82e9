"""With unequal batches on the ranks a resumed run equals the unbroken run; ranks that read the same rows
count them once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes, build_mesh
from fsdp.run import build
from tests.data.test_documents import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.runs import failures, finished, run
from tests.support.world import run_world
from tests.tokenize.rows import write_lines

# 3 samples over 2 ranks × 2 rows: one rank has a row too few, and a product of one row rounds otherwise than
# one of two.
SHORT = "--data.args.count 27 --train.global_batch 3 --train.micro_batch 2 --train.steps 4"


class Autoencoder(nn.Module):
    """Returns a loss of its own and reads no targets, which only its first forward shows."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(12, 7), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(self.narrow(x), 0.3, self.training)
        return {"loss": (self.wide(hidden) - x).square().mean()}


@pytest.mark.parametrize("model", ["", "--model.name tests.run.test_short_batches:Autoencoder"])
def test_every_later_loss_is_the_same_to_the_bit(model: str, tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", SHORT, model)
    for stop in (1, 3):
        cut = tmp_path / f"cut-{stop}"
        assert failures(2, cut, SHORT, model, f"--train.stop_after {stop}") == [None, None]
        resumed = run(2, cut, SHORT, model)
        losses = [[r["loss"] for r in done.records if "loss" in r] for done in (resumed, straight)]
        assert losses[0] == losses[1]
        assert all(torch.equal(resumed.parameters[n], value) for n, value in straight.parameters.items())


def test_rows_of_padding_are_no_part_of_a_models_own_loss(tmp_path: Path) -> None:
    """The first step's loss on two ranks, one of which has a row of padding, is that of one process."""
    words = f"{SHORT} --model.name tests.run.test_short_batches:Even --precision.master fp64"
    losses = [run(ranks, tmp_path / str(ranks), words).records[0]["loss"] for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


class Even(Autoencoder):
    """Without dropout."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.wide(self.narrow(x)) - x).square().mean()}


def on_a_tensor_rank(env: DistEnv, words: list[str], cache: str) -> str | None:
    """The model is sharded over all ranks: gradients are as many times too large as there are ranks."""
    ranks, shard_model = env.world_size, build.shard_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp.run.job.resolve", lambda *_: MeshSizes("fsdp", 1, 1, tensor=ranks))
        sizes = MeshSizes("fsdp", 1, ranks)
        patch.setattr(build, "build_mesh", lambda _, device, timeout: build_mesh(sizes, device, timeout))
        patch.setattr(
            build, "shard_model", lambda m, job, mesh: shard_model(m, replace(job, sizes=sizes), mesh)
        )
        return on_a_rank(env, words, cache)


def test_tensor_ranks_read_and_draw_the_same_and_count_once(tmp_path: Path, own_cache: Path) -> None:
    rows = [{"prompt": "x" * (n % 9), "completion": f"={n % 9}"} for n in range(60)]
    words = (
        f"--data.name {write_lines(tmp_path / 'a.jsonl', rows)} --data.seq_len 12 --data.args.heldout 0.2 "
        "--model.name transformer --model.preset toy --model.args.dropout 0.5 --precision.master fp64 "
        "--optim.name sgd --optim.lr 1e-12 --train.steps 3 --train.global_batch 7 --train.micro_batch 3 "
        "--watch.enabled false --run.dir"
    ).split()
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        assert run_world(ranks, on_a_tensor_rank, [*words, str(folder)], str(own_cache)) == [None] * ranks
        names = ("loss", "tokens", "eval_loss", "eval_accuracy")
        records = finished(folder).records
        found.append([[one.get(name, 0.0) for name in names] for one in records])
        found[-1].append([one.get("grad_norm", 0.0) / ranks for one in records])
    assert len(found[0]) == 5
    assert found[1] == [pytest.approx(one, rel=1e-9) for one in found[0]]

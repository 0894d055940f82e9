"""Layers kept whole on each rank, and several blocks in one unit: trained as one process trains them, saved,
resumed elsewhere, planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from fsdp.config import Config, MeshSection, PrecisionSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh, resolve
from fsdp.shard.shard import shard_model, sharding_of
from tests.support import user_code
from tests.support.marks import quick_are
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import run, settings
from tests.support.world import run_world

FP64 = "--precision.master fp64"
WHOLE = "--mesh.unsharded blocks.*.norm.*,head.*"
PAIRS = "--mesh.wrap every:2"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
WAYS = {
    "whole, 1 rank": (1, WHOLE),
    "whole, 2 ranks": (2, WHOLE),
    "whole, 3 ranks, micro-batches": (3, f"{WHOLE} --train.micro_batch 2 --mesh.accumulate every"),
    "whole, hsdp": (4, f"{WHOLE} {HSDP} --train.micro_batch 2 --mesh.accumulate shard"),
    "pairs, 1 rank": (1, PAIRS),
    "pairs, 3 ranks": (3, PAIRS),
    "pairs, hsdp": (4, f"{PAIRS} {HSDP}"),
    "pairs, recomputed": (2, f"{PAIRS} --memory.activation_checkpointing full"),
    "both": (2, f"{PAIRS} {WHOLE}"),
}


@pytest.mark.parametrize("way", quick_are(["pairs, recomputed"], WAYS, ["both"]))
def test_trains_as_one_process(way: str, tmp_path: Path) -> None:
    ranks, words = WAYS[way]
    found = run(ranks, tmp_path, FP64, words)
    plain = train_plainly(settings(FP64), dtype="fp64")
    assert relative_difference(found.parameters, plain.parameters) <= 1e-10
    losses = [one["loss"] for one in found.records if "loss" in one]
    assert losses == pytest.approx(plain.losses, rel=1e-10)
    norms = [one["grad_norm"] for one in found.records if "loss" in one]
    assert norms == pytest.approx(plain.norms, rel=1e-10)


# ---------------------------------------------------------------- units


class Seldom(user_code.Uneven):
    """A scalar and a layer that only samples with a positive first number use."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom, self.scale = nn.Linear(12, 13), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        some = x[:, 0] > 0
        extra = self.scale * self.seldom(x[some]).sum() if some.any() else 0.0
        return super().forward(x) + extra * 1e-3


def gradients(env: DistEnv, accumulate: Literal["last", "every"]) -> dict[str, list[float]]:
    """Of a global batch of four samples, two a rank; those of rank 0 use neither the layer nor the scalar."""
    torch.manual_seed(0)
    model = Seldom().double()
    section = MeshSection(unsharded="seldom.*", accumulate=accumulate)
    sizes = resolve(section, env.world_size)
    sharded = shard_model(
        model,
        sharding_of(Config(mesh=section, precision=PrecisionSection(master="fp64")), sizes, env.device),
        build_mesh(sizes, env.device),
    )
    x = torch.linspace(0.1, 1, 48, dtype=torch.float64).view(4, 12)
    x[:2, 0] = -1
    for rows in x[2 * env.rank :][:2].split(1):
        with sharded.micro_batch(last=bool(rows[0, 1] == x[2 * env.rank + 1, 1])):
            sharded.called(rows).square().sum().backward()
    names = ("scale", "seldom.weight", "seldom.bias")
    found = dict(model.named_parameters())
    return {name: grad.flatten().tolist() for name in names if (grad := found[name].grad) is not None}


@pytest.mark.parametrize("accumulate", ["last", "every"])
def test_a_scalar_and_a_whole_layer_that_one_rank_does_not_use(accumulate: Literal["last", "every"]) -> None:
    torch.manual_seed(0)
    model = Seldom().double()
    x = torch.linspace(0.1, 1, 48, dtype=torch.float64).view(4, 12)
    x[:2, 0] = -1
    sum(model(rows).square().sum() for rows in x.split(1)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in run_world(2, gradients, accumulate):
        assert set(found) == {"scale", "seldom.weight", "seldom.bias"}
        for name, values in found.items():
            assert values == pytest.approx(expected[name].flatten().tolist(), rel=1e-12)

"""The update of a rank's own parts: torch's numbers to the bit, states sharded as the parameters are, no
DTensor on the way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import adam

from fsdp.config import OptimSection
from fsdp.dist.collectives import local_tensor
from fsdp.dist.env import DistEnv
from fsdp.optim.optimizer import ShardedAdam, ShardedAdamW, apply_hyperparameters, build_optimizer
from tests.support.world import run_world

KINDS = {"adamw": (torch.optim.AdamW, ShardedAdamW), "adam": (torch.optim.Adam, ShardedAdam)}


def trained(kind: type[torch.optim.Adam], **options: Any) -> tuple[list[Tensor], list[Any], list[set[type]]]:
    """Local parameters and states after three steps, and which tensors torch's update was given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for unit in (*model, model):
        fully_shard(unit)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    given: list[set[type]] = []
    before = adam.adam

    def told(params: list[Tensor], grads: list[Tensor], *rest: Any, **more: Any) -> None:
        given.append({type(t) for t in (*params, *grads)})
        before(params, grads, *rest, **more)

    adam.adam = told
    try:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
    finally:
        adam.adam = before
    return (
        [local_tensor(p).detach() for p in model.parameters()],
        [optimizer.state[p] for p in model.parameters()],
        given,
    )


def beside_torch(env: DistEnv, name: str, fused: bool) -> list[str]:
    """What differs."""
    theirs, ours = (trained(kind, fused=fused) for kind in KINDS[name])
    found = [] if all(types == {Tensor} or types == {nn.Parameter} for types in ours[2]) else [str(ours[2])]
    found += [
        f"parameter {n}"
        for n, (a, b) in enumerate(zip(theirs[0], ours[0], strict=True))
        if not torch.equal(a, b)
    ]
    for n, (a, b) in enumerate(zip(theirs[1], ours[1], strict=True)):
        for moment in ("exp_avg", "exp_avg_sq"):
            sharded = isinstance(b[moment], DTensor) and b[moment].placements == a[moment].placements
            if not sharded or not torch.equal(a[moment].to_local(), b[moment].to_local()):
                found.append(f"{moment} of parameter {n}")
    return found


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_torchs_update(name: str, fused: bool) -> None:
    assert run_world(3, beside_torch, name, fused) == [[], [], []]


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.3), ("adam", 0.0)])
def test_after_a_restore_rates_and_decay_follow_the_flags(name: Any, decay: float) -> None:
    """A checkpoint has the param_groups of the run that wrote it."""
    model = nn.Linear(3, 2)
    written = build_optimizer(OptimSection(name=name, weight_decay=0.1, beta1=0.5, eps=1e-3), model)
    section = OptimSection(name=name, weight_decay=0.3, beta1=0.7, eps=1e-5)
    resumed = build_optimizer(section, model)
    resumed.load_state_dict(written.state_dict())
    apply_hyperparameters(section, resumed)
    assert [group["weight_decay"] for group in resumed.param_groups] == [decay, 0.0], "matrix, vector"
    assert [(group["betas"], group["eps"]) for group in resumed.param_groups] == [((0.7, 0.95), 1e-5)] * 2

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

from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.optim.optimizer import ShardedAdam, ShardedAdamW
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

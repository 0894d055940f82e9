"""The hand-written loop as an expert writes it: the last unit stays gathered between forward and backward,
and clipping and AdamW work on the local shards.

The bare loop (bench/peers/bare.py) dispatches DTensors for each parameter in its clip and its update.
Here the norm is one foreach call and one all_reduce, and the optimizer's parameters share the
memory of the shards. A contender of bench.train, which saves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from bench.peers.base import CLIP, Given, cross_entropy, make_optimizer, mesh_of, prepare_units


class Expert:
    settings = (
        "fully_shard on each block and the root, the last block not resharded after forward; norm, clip and "
        "AdamW fused on to_local()"
    )

    def __init__(self, given: Given) -> None:
        mesh, policy = mesh_of(given), prepare_units(given)
        self.model = given.model
        for unit in given.units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not given.units[-1])
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.sharded: list[Any] = list(self.model.parameters())
        # Parameters of a module, so that matrices decay and vectors do not, as in the others.
        self.local = nn.ParameterList([nn.Parameter(one.to_local().detach()) for one in self.sharded])
        self.optimizer = make_optimizer(self.local)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            self._clip([one.grad.to_local() for one in self.sharded])
        self.optimizer.step()
        for sharded, local in zip(self.sharded, self.local, strict=True):
            sharded.grad = local.grad = None
        return loss.detach()

    def _clip(self, gradients: list[Tensor]) -> None:
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(square)
        torch._foreach_mul_(gradients, (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0))
        for local, gradient in zip(self.local, gradients, strict=True):
            local.grad = gradient

"""The hand-written loop: fully_shard, clip, step, as its page shows. Blocking DCP for checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from bench.peers.base import (
    CLIP,
    Given,
    cross_entropy,
    kept,
    make_optimizer,
    mesh_of,
    prepare_units,
    prune,
    same_everywhere,
)


class Bare:
    loss = staticmethod(cross_entropy)
    settings = "fully_shard on each block and the root, clip_grad_norm_, AdamW fused; dcp.save, blocking"

    def __init__(self, given: Given) -> None:
        mesh, policy = mesh_of(given), prepare_units(given)
        self.model = given.model
        for unit in given.units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = make_optimizer(self.model)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=str(folder / f"step-{step}"))
        prune(folder, ".metadata")

    def load(self, folder: Path) -> int:
        step = same_everywhere(max((step for step, _ in kept(folder, ".metadata")), default=0))
        if step:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optim": optimizer}, checkpoint_id=str(folder / f"step-{step}"))
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return step


class BareLoss(Bare):
    """The compiled loss alone: of what shardrun gains over the bare loop, its part."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        if given.compile:
            self.loss = torch.compile(cross_entropy)

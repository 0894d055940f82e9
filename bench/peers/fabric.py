"""Lightning Fabric with ModelParallelStrategy: fully_shard is given by us, the rest is Fabric's.

By default data_parallel is the number of nodes, which does not shard at all: both sizes are passed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric as LightningFabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from bench.peers.base import (
    CLIP,
    Given,
    cross_entropy,
    kept,
    make_optimizer,
    prepare_units,
    prune,
    same_everywhere,
)


class Fabric:
    settings = (
        "ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1), fully_shard a block; "
        "fabric.save"
    )

    def __init__(self, given: Given) -> None:
        units, policy = list(given.units), prepare_units(given)

        def parallelize(model: nn.Module, device_mesh: Any) -> nn.Module:
            for unit in units:
                fully_shard(unit, mesh=device_mesh["data_parallel"], mp_policy=policy)
            fully_shard(model, mesh=device_mesh["data_parallel"], mp_policy=policy)
            return model

        ranks = dist.get_world_size()
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
        self.fabric = LightningFabric(accelerator=given.device.type, devices=ranks, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup_module(given.model)
        self.optimizer = self.fabric.setup_optimizers(make_optimizer(self.model))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self.model(inputs), targets)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        self.fabric.save(
            str(folder / f"step-{step}"), {"model": self.model, "optimizer": self.optimizer, "step": step}
        )
        prune(folder, ".metadata")

    def load(self, folder: Path) -> int:
        step = same_everywhere(max((step for step, _ in kept(folder, ".metadata")), default=0))
        if step:
            self.fabric.load(str(folder / f"step-{step}"), {"model": self.model, "optimizer": self.optimizer})
        return step

"""Hugging Face Accelerate with its FSDP2 plugin (fsdp_version=2), blocks wrapped by class, sharded state
dicts.

On a CPU Accelerate silently ignores the plugin and trains DDP. Here its distributed type is set to FSDP after
it is created, and the rest is Accelerate's own; on CUDA nothing is set.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import ProjectConfiguration
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench.peers.base import CLIP, Given, cross_entropy, kept, make_optimizer, prune, same_everywhere

PROOF = "scheduler-free"  # written by us, after save_state has returned on every rank


class Accelerate:
    settings = "fsdp_version=2, TRANSFORMER_BASED_WRAP, reshard_after_forward, SHARDED_STATE_DICT; save_state"

    def __init__(self, given: Given) -> None:
        os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
        cpu = given.device.type == "cpu"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted({type(unit).__name__ for unit in given.units}),
            reshard_after_forward=True,
            state_dict_type="SHARDED_STATE_DICT",
        )
        for unit in given.units if given.compile else ():
            unit.compile()
        precision = "bf16" if given.bf16 else "no"
        self.accelerator = Accelerator(
            cpu=cpu, fsdp_plugin=plugin, mixed_precision=precision, project_config=ProjectConfiguration()
        )
        if cpu:
            # both: each AcceleratorState() that is made later copies PartialState's over its own
            self.accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        self.model, self.optimizer = self.accelerator.prepare(given.model, make_optimizer(given.model))
        assert any(isinstance(p, DTensor) for p in self.model.parameters()), (
            "Accelerate has not sharded the model"
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self.model(inputs), targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        place = folder / f"step-{step}"
        self.accelerator.save_state(str(place))
        dist.barrier()
        if dist.get_rank() == 0:
            (place / PROOF).touch()
        prune(folder, PROOF)

    def load(self, folder: Path) -> int:
        step = same_everywhere(max((step for step, _ in kept(folder, PROOF)), default=0))
        if step:
            self.accelerator.load_state(str(folder / f"step-{step}"))
        return step

"""DistributedDataParallel: a whole copy on each rank. torch.save on rank 0, renamed into place."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.peers.base import CLIP, Given, cross_entropy, kept, make_optimizer, prune, same_everywhere

FILE = "state.pt"


class Ddp:
    settings = (
        "gradient_as_bucket_view, static_graph, broadcast_buffers for stored buffers alone, AdamW fused; "
        "torch.save on rank 0"
    )

    def __init__(self, given: Given) -> None:
        for unit in given.units if given.compile else ():
            unit.compile()
        self.autocast = torch.autocast(given.device.type, dtype=torch.bfloat16, enabled=given.bf16)
        self.model = DistributedDataParallel(given.model, gradient_as_bucket_view=True, static_graph=True)
        # As shardrun does: a buffer that no checkpoint holds is a constant. An attribute, because the
        # argument has another name in torch 2.13 than in 2.11.
        buffers = {name for name, _ in given.model.named_buffers()}
        self.model.broadcast_buffers = not buffers.isdisjoint(given.model.state_dict())
        self.optimizer = make_optimizer(given.model)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.autocast:
            loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        if dist.get_rank() == 0:
            place = folder / f"step-{step}"
            place.mkdir(parents=True, exist_ok=True)
            torch.save(
                {"model": self.model.module.state_dict(), "optim": self.optimizer.state_dict()},
                place / "aside",
            )
            (place / "aside").rename(place / FILE)
            prune(folder, FILE)
        dist.barrier()

    def load(self, folder: Path) -> int:
        step = same_everywhere(max((step for step, _ in kept(folder, FILE)), default=0))
        if step:
            state = torch.load(folder / f"step-{step}" / FILE, map_location="cpu", weights_only=True)
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optim"])
        return step

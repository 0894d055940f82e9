"""A loop for one device without FSDP: the model and its loss in one torch.compile, under autocast.

A contender of bench.train at one rank, which saves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.peers.base import CLIP, Given, cross_entropy, make_optimizer


class Whole:
    settings = (
        "one rank, no FSDP; autocast, forward and loss in one torch.compile, clip_grad_norm_, AdamW fused"
    )

    def __init__(self, given: Given) -> None:
        self.model, bf16 = given.model, given.bf16
        kind = given.device.type

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
                return cross_entropy(self.model(inputs), targets)

        self.loss = torch.compile(loss) if given.compile else loss
        self.optimizer = make_optimizer(self.model)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

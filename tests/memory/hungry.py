"""A model with large activations and small parameters, which limits the address space of its process."""

from __future__ import annotations

import os
import resource

import torch
from torch import Tensor, nn

from fsdp.base import proc

WIDTH, TIMES = 64, 64


class Wide(nn.Module):
    """[rows, 64] → [rows, 4096] → [rows, 64]: it keeps 64 times its output for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(torch.sin(self.inner(x).repeat(1, TIMES)))
        return x + wide.view(len(x), TIMES, WIDTH).mean(1) * self.scale


class Hungry(nn.Module):
    """Limits its process at the first training step to its current address space and `room` MiB more."""

    def __init__(self, blocks: int, room: int, rank: int, unlike: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(Wide()) if unlike and n % 2 else Wide() for n in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 5)
        self._room, self._rank = room, rank

    def forward(self, x: Tensor) -> Tensor:
        if self._room and x.device.type != "meta" and int(os.environ.get("RANK", "0")) == self._rank:
            limit = proc.memory_bytes()["VmSize"] + self._room * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            self._room = 0
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(blocks: int = 12, room: int = 0, rank: int = 0, unlike: bool = False) -> Hungry:
    return Hungry(blocks, room, rank, unlike)

"""A model whose output depends on when it is computed."""

from __future__ import annotations

import time

from torch import Tensor, nn


class Clocked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layer(pictures.flatten(1)) * (1 + time.monotonic_ns() % 1000 / 1000)

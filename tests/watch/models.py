"""A model with an operation that torch cannot repeat, for --model.name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled = nn.functional.max_pool3d(inputs.reshape(-1, 1, 3, 2, 2), 2, return_indices=True)
        return (
            self.linear(inputs)
            + nn.functional.max_unpool3d(pooled[0], pooled[1], [2, 2, 2], output_size=[3, 2, 2]).mean()
        )


def histogram() -> nn.Module:
    assert torch.are_deterministic_algorithms_enabled()
    return Histogram()

"""Users' models that can be planned, and some that cannot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Words(nn.Module):
    """Rows of `vocab_size` and of `width` that no number of ranks above one divides, if one likes."""

    def __init__(self, vocab_size: int, width: int = 96, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Dropping(Words):
    """Layers dropped at random, as BART's and Whisper's."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            if not (self.training and torch.rand([]) < 0.1):
                x = block(x)
        return self.head(x)


class Attending(Words):
    """Attention with dropout, as transformers' models."""

    def __init__(self, vocab_size: int, width: int, layers: int, dropout: float) -> None:
        super().__init__(vocab_size, width, layers)
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            heads = block(x).unflatten(-1, (4, -1)).transpose(1, 2)
            x = (
                F.scaled_dot_product_attention(heads, heads, heads, None, self.dropout)
                .transpose(1, 2)
                .flatten(2)
            )
        return self.head(x)


class Looking(Words):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (2.0 if self.embedding(inputs).sum().item() > 0 else 1.0)


@torch.library.custom_op("shardrun_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """An operator that fake tensors do not know."""
    return 2 * x


class Scaling(Words):
    def forward(self, inputs: Tensor) -> Tensor:
        return scaled(super().forward(inputs))


class Masked(Words):
    """Its forward takes what the samples do not have."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs) * mask


class Reading(Words):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        if float(self.head.weight.sum()) > 0:
            self.head = nn.Linear(96, vocab_size, bias=False)

"""Models whose ranks may run different parts, as a person writes them: what they draw is torch's own stream,
seeded by rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.support.user_code import Block, Uneven, Vectors


class Dropped(Uneven):
    """LayerDrop: one of the three blocks is left out at each step from the third on, drawn on each rank or on
    all alike.
    """

    def __init__(self, same: bool = False) -> None:
        super().__init__()
        self.same, self.steps = same, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        x = self.stem(x)
        left_out = 0 if self.same else dist.get_rank() % 3
        for number, block in enumerate(self.blocks):
            if not (self.training and self.steps >= 3 and number == left_out):
                x = block(x)
        return self.head(x)


class Tower(nn.Module):
    """A tower that a batch without pictures leaves out."""

    def __init__(self, blocks: int = 0, always: bool = True) -> None:
        super().__init__()
        self.text, self.head, self.always = nn.Linear(12, 13), nn.Linear(13, 5), always
        self.vision = nn.Sequential(nn.Linear(12, 13), *(Block(13) for _ in range(blocks)))

    def forward(self, text: Tensor, picture: Tensor, has_picture: Tensor) -> Tensor:
        x = self.text(text)
        if self.always and has_picture.any():
            x = x + self.vision(picture) * has_picture.view(-1, 1)
        return self.head(x)


class Rows(Vectors):
    """One row in five has a picture."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        text, label = super().__getitem__(index)
        return {"text": text, "picture": text.flip(0), "has_picture": float(index % 5 == 0), "label": label}


def rows() -> Rows:
    return Rows(48)

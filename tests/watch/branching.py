"""Models whose ranks may run different parts, as a person writes them: what they draw is torch's own stream,
seeded by rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from tests.support.user_code import Block, Uneven


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


class Branches(nn.Module):
    """A unit of several branches, of which each rank uses its own. Named experts, a rank would reduce zeros
    for the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block(13) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[dist.get_rank() % 4](x)


class OwnBranch(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

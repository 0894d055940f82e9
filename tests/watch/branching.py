"""Models whose ranks may run different parts, as a person writes them: what they draw is torch's own stream,
seeded by rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.user_code import Block, Uneven


class Dropped(Uneven):
    """LayerDrop: one of the three blocks is left out at each step from the third on, drawn on each rank or on
    all alike.
    """

    def __init__(self, same: bool = False, order: bool = False) -> None:
        super().__init__()
        self.same, self.order, self.steps = same, order, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        x = self.stem(x)
        rank = 0 if self.same else dist.get_rank() % 3
        blocks = list(self.blocks)
        if self.training and self.steps >= 3:
            blocks = (
                blocks[::-1]
                if self.order and rank
                else blocks
                if self.order
                else blocks[:rank] + blocks[rank + 1 :]
            )
        for block in blocks:
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


class InTurn(Uneven):
    """The branches of one unit, in turn by micro-batch, in another order on each rank: after all, each has a
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": Block(13), "b": Block(13)})])
        self.calls = 0

    def units(self) -> list[nn.Module]:
        return []

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.tensor((self.calls + dist.get_rank()) % 2)
        self.calls += 1
        return self.head(self.blocks[0]["ab"[int(turn)]](self.stem(x)))  # type: ignore[index]

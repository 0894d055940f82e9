"""A classifier of the digits that trains only where certain environment variables are set."""

from __future__ import annotations

import os

from torch import Tensor, nn


class NeedsVariables(nn.Linear):
    def __init__(self, expected: dict[str, str]) -> None:
        super().__init__(784, 10)
        self.expected = expected

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            found = {name: os.environ.get(name) for name in self.expected}
            assert found == self.expected, found
        return super().forward(x.flatten(1))


def build(**expected: str) -> nn.Module:
    return NeedsVariables(expected)

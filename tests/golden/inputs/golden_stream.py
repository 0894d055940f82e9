"""A stream of six shards. Its folder is on PYTHONPATH: two trees that are compared read the same file."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Reader:
    def __init__(self, index: int) -> None:
        self.index, self.position = index, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < 9 + self.index:
            self.position += 1
            tokens = torch.arange(17) * (self.index + 2) + self.position * self.position
            yield {"inputs": tokens[:-1] % 256, "targets": tokens[1:] % 256}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Stream:
    shards = 6

    def shard(self, index: int) -> Reader:
        return Reader(index)


def stream() -> Stream:
    return Stream()

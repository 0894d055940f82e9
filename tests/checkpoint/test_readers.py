"""Which replica reads a piece for the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fsdp.checkpoint import load
from fsdp.checkpoint.state import LoadTarget, Piece, Replicas

RANKS = 4096


def target(name: str, numel: int, group: Any) -> LoadTarget:
    piece = Piece(name, (name,), (numel,), (0,), torch.empty(numel, device="meta"))
    piece.replicas = Replicas(group, RANKS, 0)
    return LoadTarget(name, piece)


def test_small_pieces_have_few_readers_and_large_ones_are_spread() -> None:
    """A step counter for each parameter: with a reader each, 844 broadcasts over all ranks."""
    group = object()
    steps = [target(f"step.{nth}", 1, group) for nth in range(844)]
    large = [target(f"weight.{nth}", 1 << 20, group) for nth in range(100)]
    load._choose_readers([*steps, *large])
    few = Counter(one.reader for one in steps)
    assert len(few) == load.READERS_OF_SMALL
    assert max(few.values()) - min(few.values()) <= 1
    assert len({one.reader for one in large}) == len(large)

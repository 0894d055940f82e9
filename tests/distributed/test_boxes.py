"""Which part of a tensor a place on the mesh holds, and that the parts' digests add up to the whole's."""

from __future__ import annotations

import itertools

import pytest
import torch

from fsdp.base.devices import digest_shard
from fsdp.checkpoint.state import digest
from fsdp.distributed.boxes import Box, box_at, digest_share

WHOLE = torch.arange(9 * 6 * 5, dtype=torch.int32).view(9, 6, 5)


def boxes(dim: int, tensor: int, shards: int) -> list[Box]:
    places = itertools.product(range(tensor), range(shards))
    return [box_at((9, 6, 5), iter([(dim, t, tensor), (0, s, shards)])) for t, s in places]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("tensor", "shards"), [(1, 4), (3, 2), (2, 4), (3, 5)])
def test_boxes_cover_a_tensor_once(dim: int, tensor: int, shards: int) -> None:
    held, share = torch.zeros_like(WHOLE), [0, 0]
    for box in boxes(dim, tensor, shards):
        part = WHOLE[box.slices]
        # as tensor ranks and then FSDP divide it
        assert list(part.shape) == [*box.sizes]
        held[box.slices] += 1
        assert not box.numel or WHOLE.flatten()[box.start] == part.flatten()[0]
        assert not box.contiguous or torch.equal(WHOLE.flatten()[box.start :][: box.numel], part.flatten())
        share[0] += digest_share(part, box)
        share[1] += digest(part, box.offsets, box.size)
    assert held.eq(1).all()
    assert [total % 2**64 for total in share] == [digest_shard(WHOLE).weighted] * 2


def test_fsdp_divides_what_a_plan_leaves() -> None:
    """9 rows: tensor 2 holds 5 and 4, of which two shards hold 3 and 2, 2 and 2: torch.chunk's rows."""
    found = [(box.offsets[0], box.sizes[0]) for box in boxes(0, 2, 2)]
    parts = [len(rows) for half in WHOLE.chunk(2) for rows in half.chunk(2)]
    assert found == [(0, 3), (3, 2), (5, 2), (7, 2)]
    assert [rows for _, rows in found] == parts

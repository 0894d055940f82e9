"""How a tensor is divided into shards: rows of dim 0, as torch.chunk divides them, along one mesh axis; and
this rank's part of a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """The elements of a flattened parameter that a rank keeps: dim-0 rows are contiguous, so two numbers
    suffice.
    """

    start: int
    numel: int


def rows_of(rows: int, index: int, count: int) -> range:
    """Rows of shard `index` of `count`: ceil(rows / count) each, the last ones fewer or none."""
    chunk = -(-rows // count)
    return range(min(rows, index * chunk), min(rows, (index + 1) * chunk))


def cut_of(shape: torch.Size, index: int, count: int) -> Cut:
    """Elements of shard `index` of `count`."""
    rows, row = (shape[0], shape[1:].numel()) if len(shape) else (1, 1)
    kept = rows_of(rows, index, count)
    return Cut(kept.start * row, len(kept) * row)


def shard_axis(tensor: Tensor) -> int | None:
    """The axis of the mesh along which a tensor is divided; None for one that is whole on each rank."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    assert len(axes) <= 1, "sharded along one axis"
    assert not axes or tensor.placements[axes[0]].is_shard(0), "sharded on dim 0 alone"
    return axes[0] if axes else None


def shard_count(tensor: Tensor) -> int:
    """The number of pieces of a parameter, replicas not counted."""
    axis = shard_axis(tensor)
    return tensor.device_mesh.size(axis) if isinstance(tensor, DTensor) and axis is not None else 1


def first_row(tensor: Tensor) -> int:
    """The place of this rank's shard in the whole."""
    axis = shard_axis(tensor)
    if axis is None or not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    # Not get_local_rank: a spec that DTensor caches from an earlier run of this process has groups that
    # are gone.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return rows_of(tensor.shape[0], coordinate[axis], mesh.size(axis)).start


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # or to_local records a graph
        return tensor.to_local()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and mappings of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)

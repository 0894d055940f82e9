"""Which part of a tensor a rank holds: the answer to every question "which rows".

Tensor and expert ranks divide a tensor along a dim of their plan, then FSDP divides dim 0 of what is left, as
torch.chunk does. DTensor's own arithmetic describes other rows where the first does not divide dim 0, and
takes a hundred microseconds for each tensor of a save.

box_of, box_at         this rank's part of a tensor; that of a place on a mesh
whole_on_tensor        whether no plan divides a tensor over tensor or expert ranks
gathered_numel         elements of it that a rank has while FSDP has gathered it
rows_of                rows of a shard, as torch.chunk divides dim 0
shard_axis, _count     of a tensor that FSDP alone divides: the axis of the mesh, the number of pieces
local_tensor           this rank's part of a DTensor
digest_share           of a part in the digest of the whole tensor
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp.base.devices import as_bits, digest_shard

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Contiguous rows of dim 0, of which at most one further dim is cut."""

    size: Sizes
    """Of the whole tensor."""
    offsets: Sizes
    sizes: Sizes

    @functools.cached_property
    def _cut(self) -> int:
        """The last dim of which this is a part; 0 where the elements are contiguous in the whole."""
        dims = (dim for dim in range(len(self.size) - 1, 0, -1) if self.sizes[dim] != self.size[dim])
        return next(dims, 0)

    @property
    def contiguous(self) -> bool:
        return not self._cut

    @property
    def start(self) -> int:
        """The index of the first element in the flattened tensor."""
        return sum(o * math.prod(self.size[dim + 1 :]) for dim, o in enumerate(self.offsets))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def run(self) -> int:
        """Elements that are neighbours in the whole too, where it is not contiguous."""
        return math.prod(self.sizes[self._cut :])

    @property
    def stride(self) -> int:
        """From one run to the next in the whole."""
        return math.prod(self.size[self._cut :])

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


def box_at(size: Sizes, cuts: Iterator[tuple[int, int, int]]) -> Box:
    """`cuts`, in their order: the dim, the index of the part and the number of parts."""
    offsets, sizes = [0] * len(size), [*size]
    for dim, index, count in cuts:
        rows = rows_of(sizes[dim], index, count)
        offsets[dim], sizes[dim] = offsets[dim] + rows.start, len(rows)
    return Box(size, tuple(offsets), tuple(sizes))


def _cuts(tensor: DTensor) -> Iterator[tuple[int, int, int]]:
    mesh = tensor.device_mesh
    # Not get_local_rank: a spec that DTensor caches from an earlier run of this process has groups that
    # are gone.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(len(coordinate))):  # the innermost axis cuts first
        # torch's own test of a shard says no of one that is strided, which FSDP makes over a plan's
        dim = getattr(tensor.placements[axis], "dim", None)
        if dim is not None:
            yield dim, coordinate[axis], mesh.size(axis)


def box_of(tensor: Tensor) -> Box:
    return box_at(tuple(tensor.shape), _cuts(tensor) if isinstance(tensor, DTensor) else iter(()))


def counts_here(tensor: Tensor, tensor_rank: int) -> bool:
    """Whether this rank is the first holder of its part among the ranks of one copy of the weights."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    placed = zip(names, tensor.placements, mesh.get_coordinate() or (), strict=True)
    others = (
        at for axis, placement, at in placed if axis != "dp_replicate" and not hasattr(placement, "dim")
    )
    # the mesh of what no plan divides leaves tensor out
    return not any(others) and (not tensor_rank or "tensor" in names or "expert" in names)


def whole_on_tensor(tensor: Tensor) -> bool:
    """Whether each tensor rank holds what the others hold too."""
    if not isinstance(tensor, DTensor):
        return True
    axes = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return "expert" not in axes and not hasattr(axes.get("tensor"), "dim")


def gathered_numel(tensor: Tensor) -> int:
    """Elements that a rank has of a tensor while FSDP has gathered it: a plan's part."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    mesh = tensor.device_mesh
    placed = zip(mesh.mesh_dim_names or (), tensor.placements, mesh.shape, strict=True)
    parts = (size for axis, at, size in placed if axis in ("tensor", "expert") and hasattr(at, "dim"))
    return tensor.numel() // math.prod(parts)


def rows_of(rows: int, index: int, count: int) -> range:
    """Rows of shard `index` of `count`: ceil(rows / count) each, the last ones fewer or none."""
    chunk = -(-rows // count)
    return range(min(rows, index * chunk), min(rows, (index + 1) * chunk))


def shard_axis(tensor: Tensor) -> int | None:
    """The axis of the mesh along which a tensor is divided; None for one that is whole on each rank."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    assert len(axes) <= 1, "sharded along one axis"
    assert not axes or tensor.placements[axes[0]].is_shard(0), "sharded on dim 0 alone"
    return axes[0] if axes else None


def shard_count(tensor: Tensor) -> int:
    """The number of pieces of a parameter, replicas not counted."""
    axis = shard_axis(tensor)
    return tensor.device_mesh.size(axis) if isinstance(tensor, DTensor) and axis is not None else 1


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # or to_local records a graph
        return tensor.to_local()


def digest_share(part: Tensor, box: Box) -> int:
    """The sum of all parts' shares modulo 2⁶⁴ is the digest of the whole."""
    return (digest_shard(part).at(box.start) + beside_runs(part, box)) % 2**64


def beside_runs(part: Tensor, box: Box) -> int:
    """What is to be added to the digest of a part as if it were contiguous."""
    if box.contiguous or not box.numel:
        return 0
    sums = as_bits(part).view(-1, box.run).sum(1, dtype=torch.int64)
    steps = torch.arange(len(sums), device=sums.device)
    return 2 * (box.stride - box.run) * int((sums * steps).sum())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and mappings of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)

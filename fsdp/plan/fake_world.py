"""A fake process group: any number of ranks, any one of them traced, and no memory behind a tensor.

The mesh is made outside FakeTensorMode (its ranks are read as numbers), fsdp/parallel/shard.py shards the
model on the meta device, and only then its shards become fake tensors. Not here: the step in that world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp.base.torch_private.core import init_fake_group
from fsdp.base.torch_private.fsdp import chunks_by
from fsdp.dist.mesh import MeshSizes, build_mesh


@contextlib.contextmanager
def fake_world(sizes: MeshSizes, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as seen from `rank`. Requires that no process group exists: a process is in one world."""
    assert not dist.is_initialized(), "a plan is made outside a run"
    init_fake_group(rank, sizes.ranks)
    try:
        with chunks_by(_Chunks):
            yield build_mesh(sizes, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class _Chunks:
    """torch.chunk's pieces, made on access: FSDP cuts a parameter into as many as there are ranks and
    keeps one.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._rows = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Tensor:
        if at < 0 or at >= self._count:
            raise IndexError(at)
        whole = self._tensor.size(self._dim)
        start = min(at * self._rows, whole)
        return self._tensor.narrow(self._dim, start, min(self._rows, whole - start))

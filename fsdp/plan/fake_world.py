"""A fake process group: any number of ranks, any one of them traced, and no memory behind a tensor.

The mesh is made outside FakeTensorMode (its ranks are read as numbers), fsdp/parallel/shard.py shards the
model on the meta device, and only then its shards become fake tensors. Not here: the step in that world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fsdp.dist.mesh import MeshSizes, build_mesh


@contextlib.contextmanager
def fake_world(sizes: MeshSizes, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as seen from `rank`. Requires that no process group exists: a process is in one world."""
    assert not dist.is_initialized(), "a plan is made outside a run"
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=sizes.ranks, store=FakeStore())
    try:
        with _one_chunk_only():
            yield build_mesh(sizes, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def fake_mode() -> FakeTensorMode:
    """A mode in which meta tensors and fake ones may be mixed: the model comes from meta."""
    return FakeTensorMode(allow_non_fake_inputs=True)


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


@contextlib.contextmanager
def _one_chunk_only() -> Iterator[None]:
    """Replaces torch.chunk in FSDP: at 16,384 ranks the list of pieces takes most of the time of sharding."""
    module: Any = _fsdp_param
    if not hasattr(module, "_chunk_with_empty"):
        # another version of torch cuts in another way: slower, not wrong
        yield
        return
    was = module._chunk_with_empty
    module._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        module._chunk_with_empty = was

"""The formats of torch.save and of distributed checkpoints (DCP): what their writers pickle by private names.

Files on disk hold these names, so a torch that renames them breaks its own old checkpoints too.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "DCP_OLD_PROPERTIES", "DCP_OLD_UNREAD", "DCP_PLACE", "DCP_UNREAD", "StorageInfo", "global_offset",
    "rebuild_call", "storage_class",
]  # fmt: skip

DCP_PLACE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
"""Module and name that `.metadata` has for the place of an item in a file (StorageInfo)."""

_OLD = "torch.distributed._shard.sharded_tensor.metadata"
DCP_OLD_PROPERTIES, DCP_OLD_UNREAD = (_OLD, "TensorProperties"), (_OLD, "MEM_FORMAT_ENCODING")
"""Names in older versions' `.metadata`: the same class with the same state, and a field's function."""

DCP_UNREAD = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
)
"""Functions that `.metadata` calls for fields of a tensor that no reader here uses."""


def storage_class(dtype: torch.dtype) -> Any:
    """The typed storage class that torch.save names for a dtype; None for dtypes that have none (fp8)."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None else getattr(torch, name)


def rebuild_call(
    storage: Any, sizes: Sequence[int], dtype: torch.dtype | None
) -> tuple[Any, tuple[Any, ...]]:
    """Function and arguments that torch.save pickles for a contiguous tensor; `dtype` only for an untyped
    storage.

    torch.load(weights_only=True) accepts these functions alone.
    """
    strides = tuple(math.prod(max(1, n) for n in sizes[at + 1 :]) for at in range(len(sizes)))
    hooks: OrderedDict[Any, Any] = OrderedDict()  # without arguments on the right: they would be pickled too
    arguments = (storage, 0, tuple(sizes), strides, False, hooks)
    if dtype is None:
        return torch._utils._rebuild_tensor_v2, arguments
    return torch._utils._rebuild_tensor_v3, (*arguments, dtype)


def global_offset(size: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Where this rank's shard starts in the whole tensor. DCP computes the places of its own checkpoints with
    it.
    """
    return tuple(compute_local_shape_and_global_offset(torch.Size(size), mesh, placements)[1])

"""Memory of a rank by kind, read from the objects that own it: the model, its FSDP groups, the optimizer.

`owned_storages` reads what exists now: a run that is not profiled pays nothing, and one that runs out of
memory can still be accounted. Activations have no owner; account_storages.py (CPU) and account_cuda.py (CUDA)
track them. Not here: files, pages, advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base import proc
from fsdp.base.torch_private.fsdp import parameter_groups, tensors_by_kind
from fsdp.base.units import byte_size
from fsdp.dist.local_tensors import local_tensor

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication", "other")
"""other: module buffers, temporaries of the optimizer, what a save stages. What the process or the allocator
holds beyond these is `beyond` in the records.
"""


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory under a tensor: a DTensor's shard, a quantized tensor's parts. Memory-mapped files are
    excluded.
    """
    local = local_tensor(tensor)
    if local is not tensor:
        yield from storages_of(local)
    elif type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or storage.filename is None:
            yield storage


@torch.no_grad()  # without gradients to_local returns the shard itself
def owned_storages(
    root: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[int, tuple[str, torch.UntypedStorage]]:
    """(kind, storage) of everything that model and optimizer own, by the address of the storage object."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    # Groups first: while one is gathered, its modules own the gathered parameters instead of the shards.
    for kind, tensor in _held(root, optimizer):
        if isinstance(tensor, Tensor):
            for storage in storages_of(tensor):
                found.setdefault(id(storage), (kind, storage))
    return found


def tally(root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str) -> dict[str, int]:
    """Bytes by kind on one type of device ("cpu", "cuda"); offloaded shards of a CUDA run are on "cpu"."""
    totals = dict.fromkeys(KINDS, 0)
    for kind, storage in owned_storages(root, optimizer).values():
        if storage.device.type == device:
            totals[kind] += storage.nbytes()
    return totals


def _held(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    for group in parameter_groups(root):
        yield from tensors_by_kind(group)
    for parameter in root.parameters():
        yield from (("parameters", parameter), ("gradients", parameter.grad))
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (("optimizer", value) for value in state.values())
    yield from (("other", buffer) for buffer in root.buffers())


# ---------------------------------------------------------------- the process and the device


def process_bytes() -> dict[str, int]:
    """Resident anonymous memory and address space of this process; empty where the system does not tell."""
    names = {"RssAnon": "rss_anon", "VmRSS": "rss", "VmHWM": "rss_peak", "VmSize": "address_space"}
    found = proc.memory_bytes()
    return {name: found[line] for line, name in names.items() if line in found}


def device_bytes(device: torch.device) -> dict[str, int]:
    """Statistics of CUDA's caching allocator; empty on the CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "free": free,
        "total": total,
    }


def by_size(kinds: Mapping[str, int]) -> str:
    """`activations 1.2 GiB, parameters 300 MiB`: the largest first, without kinds of 0 bytes."""
    present = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    return ", ".join(f"{kind} {byte_size(size)}" for size, kind in present) or "nothing"

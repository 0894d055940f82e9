"""What a rank's memory holds, by kind, read from the objects that hold it: the model, its FSDP groups, the
optimizer.

Nothing is measured ahead of time: `standing` looks at what exists now, so that a run that is not profiled
pays nothing and one that runs out of memory can still say what stood where. Activations are what no object
owns; fsdp/memory/account_storages.py (CPU) and account_cuda.py (CUDA) follow them. Not here: files, pages,
advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp.dist.local_tensors import local_tensor

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication", "other")
"""other: module buffers, temporaries of the optimizer, what a save stages. What the process or the allocator
holds beyond these is `beyond` in the records.
"""


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory under a tensor: a DTensor's shard, a quantized tensor's parts. A file mapped into memory is
    none.
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


def groups_of(root: nn.Module) -> Iterator[Any]:
    """FSDP's parameter groups; torch keeps them private, one a module before 2.13 and a list since."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from (
                groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]
            )


def standing(
    root: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[int, tuple[str, torch.UntypedStorage]]:
    """All that model and optimizer hold now, each storage once, by its address as an object."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    # Groups first: while one is gathered, its modules hold the gathered parameters in place of the shards.
    for kind, tensor in _held(root, optimizer):
        if isinstance(tensor, Tensor):
            for storage in storages_of(tensor):
                found.setdefault(storage._cdata, (kind, storage))
    return found


def tally(root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str) -> dict[str, int]:
    """Bytes by kind on one type of device ("cpu", "cuda"); offloaded shards of a CUDA run are the host's."""
    totals = dict.fromkeys(KINDS, 0)
    for kind, storage in standing(root, optimizer).values():
        if storage.device.type == device:
            totals[kind] += storage.nbytes()
    return totals


def _held(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    for group in groups_of(root):
        yield from _of_group(group)
    for parameter in root.parameters():
        yield from (("parameters", parameter), ("gradients", parameter.grad))
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (("optimizer", value) for value in state.values())
    yield from (("other", buffer) for buffer in root.buffers())


def _of_group(group: Any) -> Iterator[tuple[str, Any]]:
    for one in group.fsdp_params:
        yield from (("parameters", one.sharded_param), ("parameters", one._sharded_param_data))
        yield from (("gathered", tensor) for tensor in one.all_gather_outputs)
        gathered = getattr(one, "_unsharded_param", None)
        if gathered is not None:
            yield from (("gathered", gathered), ("gradients", gathered.grad))
        yield "gathered", getattr(one, "_sharded_post_forward_param_data", None)
        yield from (("gradients", one.unsharded_accumulated_grad), ("gradients", one.sharded_param.grad))
    yield "gradients", getattr(group, "_partial_reduce_output", None)


# ---------------------------------------------------------------- the process and the device


def process_bytes() -> dict[str, int]:
    """Resident anonymous memory and address space of this process; empty where the system does not tell."""
    wanted = {"RssAnon:": "rss_anon", "VmRSS:": "rss", "VmHWM:": "rss_peak", "VmSize:": "address_space"}
    try:
        with Path("/proc/self/status").open(encoding="ascii", errors="replace") as lines:
            words = (line.split() for line in lines)
            return {wanted[word[0]]: int(word[1]) * 1024 for word in words if word and word[0] in wanted}
    except OSError:
        return {}


def device_bytes(device: torch.device) -> dict[str, int]:
    """What CUDA's caching allocator says; empty on the CPU, which has no such book."""
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


def human(count: float) -> str:
    """Bytes for a person: 3 significant digits, binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if abs(count) < 1000 else f"{count / 1024:.3g} TiB"


def by_size(kinds: Mapping[str, int]) -> str:
    """`activations 1.2 GiB, parameters 300 MiB`: the largest first, nothing that is not there."""
    there = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    return ", ".join(f"{kind} {human(size)}" for size, kind in there) or "nothing"

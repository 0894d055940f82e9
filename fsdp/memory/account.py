"""Memory of a rank by kind: from shapes before a run, from the objects that own it, and over a CPU's steps.

`resting_bytes` is arithmetic: the start line, the dry run, the planner and the explanation of an
out-of-memory error read it. `owned_storages` reads what model, FSDP groups and optimizer own now: a run that
is not profiled pays nothing, and one that runs out of memory can still be accounted. Activations have no
owner. Not here: storages as operations create and release them (storages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.base.text import byte_size
from fsdp.base.torch_private import (
    parameter_groups,
    tensors_by_kind,
)
from fsdp.config import OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.distributed.boxes import local_tensor
from fsdp.optim.optimizer import is_custom

if TYPE_CHECKING:
    from fsdp.base.phases import Phases
    from fsdp.data.types import Samples
    from fsdp.distributed.mesh import BatchPlan
    from fsdp.models.registry import CustomLoss
    from fsdp.shard.shard import Sharded

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication", "other")
"""other: module buffers, temporaries of the optimizer, what a save stages."""


@dataclass(kw_only=True)
class OomContext:
    """The model and its step, filled in as they are built: what the page of an out-of-memory error reads."""

    sharded: Sharded
    batch: BatchPlan
    build: Callable[[], nn.Module]
    """Builds the trained model on the meta device."""
    samples: Samples
    loss: CustomLoss | None = None
    optimizer: torch.optim.Optimizer | None = None
    phases: Phases | None = None


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """Measured when the allocation failed, in bytes."""

    title: str
    error: str
    """The message of torch's error."""
    device: str
    phase: str
    kinds: Mapping[str, int]
    held: int
    requested: int
    around: Sequence[tuple[str, str]] = ()
    """The process, the device and the limits: name, size."""


# ---------------------------------------------------------------- from shapes


@dataclass(frozen=True, kw_only=True)
class RestingBytes:
    """What a whole model holds between steps. Shards divide it."""

    parameters: int
    gradients: int
    """As many bytes as the trained parameters."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def resting_bytes(
    section: OptimSection,
    model: nn.Module,
    master: torch.dtype,
    frozen: torch.dtype | None = None,
    *,
    only: Collection[nn.Parameter] | None = None,
) -> RestingBytes:
    """Of a model whose parameters are kept in `master`, and those that are not trained in `frozen`; `only`
    selects some of its parameters.
    """
    parameters = [p for p in model.parameters() if only is None or p in only]
    trained = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trained)
    fixed = sum(p.numel() for p in parameters) - count
    return RestingBytes(
        parameters=count * master.itemsize + fixed * (frozen or master).itemsize,
        gradients=count * master.itemsize,
        optimizer=_state_bytes(section, model, trained, master.itemsize),
    )


def _state_bytes(
    section: OptimSection, model: nn.Module, trained: Sequence[nn.Parameter], itemsize: int
) -> int:
    """Optimizer states of whole parameters, with the moving average of the weights."""
    count = sum(p.numel() for p in trained)
    average = itemsize * count if section.ema else 0
    if section.state != "master":
        from fsdp.optim.small_states import moment_bytes

        return average + sum(moment_bytes(p, section.state) for p in trained)
    # A user's optimizer counts as Adam: what it keeps is unknown before its first step.
    moments = 2 if is_custom(section) else len(MOMENTS[section.name])
    if section.name == "sgd" and not section.momentum:
        moments = 0
    lacking = 0
    if section.name == "muon":  # its matrices have one moment
        from fsdp.optim.muon import hidden_matrices

        matrices = set(hidden_matrices(model, section.muon_parameters))
        lacking = sum(p.numel() for p in trained if p in matrices)
    return average + itemsize * (moments * count - lacking)


# ---------------------------------------------------------------- what model and optimizer own


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
    owned: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for kind, tensor in _owned_tensors(root, optimizer):
        if isinstance(tensor, Tensor):
            for storage in storages_of(tensor):
                owned.setdefault(id(storage), (kind, storage))
    return owned


def _owned_tensors(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    # Groups first: while one is gathered, its modules own the gathered parameters instead of the shards.
    for group in parameter_groups(root):
        yield from tensors_by_kind(group)
    for parameter in root.parameters():
        yield from (("parameters", parameter), ("gradients", parameter.grad))
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (("optimizer", value) for value in state.values())
    yield from (("other", buffer) for buffer in root.buffers())


def tally(root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str) -> dict[str, int]:
    """Bytes by kind on one type of device ("cpu", "cuda"); offloaded shards of a CUDA run are on "cpu"."""
    totals = dict.fromkeys(KINDS, 0)
    for kind, storage in owned_storages(root, optimizer).values():
        if storage.device.type == device:
            totals[kind] += storage.nbytes()
    return totals


def largest_first(kinds: Mapping[str, int]) -> list[tuple[str, str]]:
    """Kind and size in words, without kinds of 0 bytes."""
    present = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    return [(kind, byte_size(size)) for size, kind in present]


def by_size(kinds: Mapping[str, int]) -> str:
    """`activations 1.2 GiB, parameters 300 MiB`."""
    return ", ".join(map(" ".join, largest_first(kinds))) or "nothing"

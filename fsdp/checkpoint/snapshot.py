"""TrainState as named pieces: what of each tensor lies on this rank, and where in the whole.

The names are DCP's: `model.<parameter>`, `optim.state.<parameter>.<moment>`,
`optim.param_groups.<n>.<field>`, `train.<counter>`, as `get_model_state_dict` and `get_optimizer_state_dict`
would give them, without those of wrappers. Only references are taken here; what a forward pass changes
(buffers) is copied at once. Not here: files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from fsdp.base.torch_private.saving import global_offset
from fsdp.models.lora import base_names
from fsdp.optim.train_state import TrainState

KeyPath = tuple[str | int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a piece within the whole tensor."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


@dataclass
class Piece:
    """One tensor's part on this rank. `aliases` are other keys of the same memory (tied weights)."""

    key: str
    path: KeyPath
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    aliases: list[tuple[str, KeyPath]] = field(default_factory=list)
    buffer: bool = False
    """Changed by forward passes, on each rank by its own samples: rank 0's is the one that is kept."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()


@dataclass
class Snapshot:
    pieces: list[Piece]
    values: dict[str, tuple[KeyPath, Any]]
    """What is no tensor: hyperparameters and counters. Equal on every rank."""


def clean(name: str, module: nn.Module) -> str:
    """A parameter's name without what wrappers put into it; `module.` only in front, where DDP puts it."""
    for wrapper in _WRAPPERS[:2]:
        name = name.replace(wrapper, "")
    return (
        name.removeprefix(_WRAPPERS[2]) if isinstance(module, nn.parallel.DistributedDataParallel) else name
    )


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clean name → tensor (a DTensor where sharded) of every parameter and persistent buffer; beside
    adapters, without what they lie over.
    """
    # A forward without backward leaves the root gathered: its parameters would be taken whole, and stale.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state, left_out = model.state_dict(), base_names(model)
    return {
        clean(name, model): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in left_out
    }


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's first clean name."""
    return {parameter: clean(name, model) for name, parameter in model.named_parameters()}


def take(state: TrainState) -> Snapshot:
    """References to all that is saved, in one order on every rank."""
    buffers = {clean(name, state.model) for name, _ in state.model.named_buffers(remove_duplicate=False)}
    pieces: list[Piece] = []
    for name, tensor in model_tensors(state.model).items():
        # BatchNorm's statistics change in the next forward, long before the optimizer writes.
        one = piece(("model", name), tensor.clone() if name in buffers else tensor)
        one.buffer = name in buffers
        pieces.append(one)
    values: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in _optimizer(state.optimizer, parameter_names(state.model)):
        if isinstance(value, torch.Tensor):
            pieces.append(piece(path, value))
        else:
            values[join(path)] = (path, value)
    for name, number in state.counters().items():
        values[f"train.{name}"] = (("train", name), number)
    return Snapshot(_merge_aliases([p for p in pieces if p.local.numel() or not math.prod(p.size)]), values)


def join(path: KeyPath) -> str:
    return ".".join(map(str, path))


@torch.no_grad()  # without gradients to_local returns the shard itself
def piece(path: KeyPath, tensor: torch.Tensor) -> Piece:
    if not isinstance(tensor, DTensor):
        return Piece(join(path), path, tuple(tensor.shape), (0,) * tensor.dim(), _inner(tensor.detach()))
    local = _inner(tensor.to_local().detach())
    offsets = _offsets(tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    return Piece(join(path), path, tuple(tensor.shape), offsets, local)


def _inner(local: torch.Tensor) -> torch.Tensor:
    """What a wrapper holds, as float8's of a weight. It has no memory of its own: all such weights would lie
    at address 0.
    """
    if not hasattr(local, "__tensor_flatten__"):
        return local
    names, _ = local.__tensor_flatten__()
    held = [getattr(local, name) for name in names]
    found: torch.Tensor = next(t for t in held if t.shape == local.shape and t.dtype == local.dtype)
    return found.detach()


@cache
def _offsets(size: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Asked for every tensor of every save while the step waits: a hundred microseconds each, so kept."""
    return global_offset(size, mesh, placements)


def _optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> Iterator[tuple[KeyPath, Any]]:
    """State that exists, as it is: before the first step there is none, and none is made up."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for field_name, value in optimizer.state.get(parameter, {}).items():
                yield ("optim", "state", names[parameter], field_name), value
    for index, group in enumerate(optimizer.param_groups):
        for field_name, value in group.items():
            what = [names[parameter] for parameter in value] if field_name == "params" else plain(value)
            yield ("optim", "param_groups", index, field_name), what


def plain(value: Any) -> Any:
    """A copy that does not change when the loop sets the next step's rate."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _merge_aliases(pieces: list[Piece]) -> list[Piece]:
    seen: dict[tuple[int, Any], Piece] = {}
    merged: list[Piece] = []
    for one in pieces:
        # Adam's steps are tiny and never tied; an empty tensor has no address.
        spot = (one.local.data_ptr(), (one.local.dtype, one.sizes, one.local.stride()))
        first = seen.get(spot) if one.nbytes else None
        if first is None or first.offsets != one.offsets or first.size != one.size:
            merged.append(one)
            seen[spot] = one
        else:
            first.aliases.append((one.key, one.path))
    return merged

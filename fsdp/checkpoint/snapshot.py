"""TrainState as named pieces: this rank's part of each tensor, and its place in the whole tensor.

The keys are DCP's: `model.<parameter>`, `optim.state.<parameter>.<moment>`,
`optim.param_groups.<n>.<field>`, `train.<counter>`, as `get_model_state_dict` and `get_optimizer_state_dict`
return them, without the names of wrappers; and `ema.<parameter>`. A snapshot holds references; buffers, which
a forward pass changes, are copied at once. Files are written in saver.py and rank_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from fsdp.base.torch_private.saving import global_offset
from fsdp.dist.local_tensors import local_tensor
from fsdp.models.lora import base_names
from fsdp.models.parameter_names import clean_name
from fsdp.optim.ema import averages
from fsdp.optim.train_state import TrainState

KeyPath = tuple[str | int, ...]
_Place = tuple[tuple[int, ...], tuple[Placement, ...]]
_known_offsets: WeakKeyDictionary[DeviceMesh, dict[_Place, tuple[int, ...]]] = WeakKeyDictionary()
"""Of a mesh, by size and placements. Weak: a mesh that stays keeps its process groups, and with gloo each of
them a thread that wakes 100 times a second.
"""


@dataclass
class Piece:
    """A tensor's part on this rank. `aliases` are other keys of the same memory (tied weights)."""

    key: str
    path: KeyPath
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    aliases: list[tuple[str, KeyPath]] = field(default_factory=list)
    buffer: bool = False
    """Each rank's forward passes change it by their own samples: the checkpoint keeps rank 0's."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def nbytes(self) -> int:
        return self.local.nbytes


@dataclass
class Snapshot:
    pieces: list[Piece]
    values: dict[str, tuple[KeyPath, Any]]
    """Values other than tensors (hyperparameters and counters), equal on every rank."""


def _clean(name: str, model: nn.Module) -> str:
    return clean_name(name, ddp=isinstance(model, nn.parallel.DistributedDataParallel))


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clean name → tensor (a DTensor where sharded) of every parameter and persistent buffer.

    The frozen weights under adapters are left out.
    """
    # A forward without backward leaves the root gathered: its parameters would be taken whole, and stale.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state, left_out = model.state_dict(), base_names(model)
    return {
        _clean(name, model): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in left_out
    }


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter with its first clean name."""
    return {parameter: _clean(name, model) for name, parameter in model.named_parameters()}


def take(state: TrainState) -> Snapshot:
    """References to everything a save writes, in the same order on every rank."""
    buffers = {_clean(name, state.model) for name, _ in state.model.named_buffers(remove_duplicate=False)}
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
    pieces += [piece(("ema", name), tensor) for name, tensor in averages(state.optimizer).items()]
    for name, number in state.counters().items():
        values[f"train.{name}"] = (("train", name), number)
    return Snapshot(_merge_aliases([p for p in pieces if p.local.numel() or not math.prod(p.size)]), values)


def join(path: KeyPath) -> str:
    return ".".join(map(str, path))


def piece(path: KeyPath, tensor: torch.Tensor) -> Piece:
    """This rank's part of a tensor, under the key of that path."""
    size = tuple(tensor.shape)
    offsets = (0,) * len(size)
    if isinstance(tensor, DTensor):
        offsets = _offsets(size, tensor.device_mesh, tensor.placements)
    return Piece(join(path), path, size, offsets, _inner(local_tensor(tensor).detach()))


def _inner(local: torch.Tensor) -> torch.Tensor:
    """The tensor inside a wrapper subclass such as float8's, which has no memory of its own (address 0)."""
    if not hasattr(local, "__tensor_flatten__"):
        return local
    names, _ = local.__tensor_flatten__()
    held = [getattr(local, name) for name in names]
    found: torch.Tensor = next(t for t in held if t.shape == local.shape and t.dtype == local.dtype)
    return found.detach()


def _offsets(size: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Cached: a hundred microseconds for each tensor of each save, while the step waits."""
    known = _known_offsets.setdefault(mesh, {})
    if (size, placements) not in known:
        known[size, placements] = global_offset(size, mesh, placements)
    return known[size, placements]


def _optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> Iterator[tuple[KeyPath, Any]]:
    """The optimizer's existing state and its groups' fields; before the first step there is no state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for field_name, value in optimizer.state.get(parameter, {}).items():
                yield ("optim", "state", names[parameter], field_name), value
    for index, group in enumerate(optimizer.param_groups):
        for field_name, value in group.items():
            kept = [names[parameter] for parameter in value] if field_name == "params" else _copied(value)
            yield ("optim", "param_groups", index, field_name), kept


def _copied(value: Any) -> Any:
    """A copy, which stays when the loop sets the next step's learning rate."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _merge_aliases(pieces: list[Piece]) -> list[Piece]:
    """One piece for each memory: the later keys of a tied weight become aliases of the first."""
    seen: dict[tuple[int, Any], Piece] = {}
    merged: list[Piece] = []
    for one in pieces:
        # Adam's steps are tiny and never tied; an empty tensor has no address.
        memory = (one.local.data_ptr(), (one.local.dtype, one.sizes, one.local.stride()))
        first = seen.get(memory) if one.nbytes else None
        if first is None or first.offsets != one.offsets or first.size != one.size:
            merged.append(one)
            seen[memory] = one
        else:
            first.aliases.append((one.key, one.path))
    return merged

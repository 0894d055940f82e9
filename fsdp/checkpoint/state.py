"""TrainState as named pieces: what a save writes, and what a load fills.

A piece is this rank's part of a tensor, some of its rows, and their place in the whole tensor. The keys are
DCP's: `model.<parameter>`, `optim.state.<parameter>.<moment>`, `optim.param_groups.<n>.<field>`,
`train.<counter>`, as `get_model_state_dict` and `get_optimizer_state_dict` return them, without the names of
wrappers; and `ema.<parameter>`. A snapshot holds references; buffers, which a forward pass changes, are
copied at once.

A load gives the optimizer exactly the saved state, created here where it does not exist yet; a parameter
saved without state gets none. What does not fit (a missing key, another shape, another precision) raises
CheckpointError before anything is read or changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp.base.devices import NAMES
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.manifest import SavedTensor
from fsdp.distributed.boxes import Box, beside_runs, box_of, digest_share, local_tensor
from fsdp.distributed.collectives import ObjectGroup
from fsdp.models.units import clean_name
from fsdp.optim.optimizer import TrainState, averages

SPLIT_BYTES = 1 << 18
"""Replicas of a larger piece write some of its rows each."""
KeyPath = tuple[str | int, ...]
Sizes = tuple[int, ...]
CHUNK = 1 << 16  # as 64-bit numbers these fit a core's own cache
_POSITIONS = np.arange(1, 2 * CHUNK, 2, dtype=np.int64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Piece:
    """A tensor's part on this rank. `aliases` are other keys of the same memory (tied weights)."""

    key: str
    path: KeyPath
    size: Sizes
    offsets: Sizes
    local: torch.Tensor
    aliases: list[tuple[str, KeyPath]] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        return tuple(self.local.shape)


@dataclass
class Snapshot:
    """`pieces`: those that this rank writes."""

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
    state, left_out = model.state_dict(), set[str]()
    if any(name.endswith("lora_a") for name in state):
        from fsdp.models.lora import base_names

        left_out = base_names(model)
    return {
        _clean(name, model): value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in left_out
    }


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter with its first clean name."""
    return {parameter: _clean(name, model) for name, parameter in model.named_parameters()}


def take_snapshot(state: TrainState, group: ObjectGroup) -> Snapshot:
    """References to what this rank writes: of what several ranks hold, one writes it, or each some rows."""
    buffers = {_clean(name, state.model) for name, _ in state.model.named_buffers(remove_duplicate=False)}
    tensors: list[tuple[KeyPath, torch.Tensor]] = []
    for name, tensor in model_tensors(state.model).items():
        # BatchNorm's statistics change in the next forward, long before the optimizer writes.
        tensors.append((("model", name), tensor.clone() if name in buffers else tensor))
    values: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in _optimizer(state.optimizer, parameter_names(state.model)):
        if isinstance(value, torch.Tensor):
            tensors.append((path, value))
        else:
            values[join(path)] = (path, value)
    tensors += [(("ema", name), tensor) for name, tensor in averages(state.optimizer).items()]
    for name, number in state.counters().items():
        values[f"train.{name}"] = (("train", name), number)
    pieces, first = [], dict[Any, Piece]()
    for nth, (path, tensor) in enumerate(tensors):  # in the same order on every rank that holds it
        part = piece(path, tensor)
        local, box = part.local, (part.size, part.offsets, part.sizes)
        memory = local.data_ptr() if local.numel() else part.key, local.dtype, local.stride(), box
        if memory in first:  # tied weights: one piece, the later keys are aliases
            first[memory].aliases.append((part.key, path))
            continue
        first[memory] = part
        # Each rank's forward passes change its own buffers by its samples: rank 0's are saved.
        is_buffer = path[0] == "model" and path[1] in buffers
        if not local.numel():
            written = group.rank == 0 and not math.prod(part.size)
        elif is_buffer:
            written = group.rank == 0
        else:
            written = _take_share(part, nth, *_replicas(tensor, group))
        pieces += [part] * written
    return Snapshot(pieces, values)


def _take_share(part: Piece, nth: int, count: int, index: int) -> bool:
    """Whether the replica of this index writes the piece. Of a large one all write equal numbers of rows."""
    if count == 1 or part.local.nbytes < SPLIT_BYTES or part.sizes[0] < count:
        return nth % count == index
    begin, end = (part.sizes[0] * share // count for share in (index, index + 1))
    part.offsets, part.local = (part.offsets[0] + begin, *part.offsets[1:]), part.local[begin:end]
    return True


def _replicas(tensor: torch.Tensor, group: ObjectGroup) -> tuple[int, int]:
    """The number of ranks that hold the same piece, and the index of this one among them."""
    if not isinstance(tensor, DTensor):
        return group.size, group.rank
    mesh = tensor.device_mesh
    # a mesh that leaves out an axis leaves out the innermost one, tensor
    count = group.size // mesh.size()
    index = group.rank % count
    for axis, coordinate in enumerate(mesh.get_coordinate() or ()):
        if tensor.placements[axis].is_replicate():
            count, index = count * mesh.size(axis), index * mesh.size(axis) + coordinate
    return count, index


def join(path: KeyPath) -> str:
    return ".".join(map(str, path))


def piece(path: KeyPath, tensor: torch.Tensor) -> Piece:
    """This rank's part of a tensor, under the key of that path."""
    size = tuple(tensor.shape)
    offsets = box_of(tensor).offsets
    return Piece(join(path), path, size, offsets, _inner(local_tensor(tensor).detach()))


def _inner(local: torch.Tensor) -> torch.Tensor:
    """The tensor inside a wrapper subclass such as float8's, which has no memory of its own (address 0)."""
    if not hasattr(local, "__tensor_flatten__"):
        return local
    names, _ = local.__tensor_flatten__()
    held = [getattr(local, name) for name in names]
    inner: torch.Tensor = next(t for t in held if t.shape == local.shape and t.dtype == local.dtype)
    return inner.detach()


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
            if field_name == "params":
                value = [names[parameter] for parameter in value]
            elif isinstance(value, torch.Tensor):  # the loop sets the next step's learning rate
                value = value.detach().clone()
            yield ("optim", "param_groups", index, field_name), value


# ---------------------------------------------------------------- boxes


def digest(part: torch.Tensor, offsets: Sizes, size: Sizes) -> int:
    """The share of this part in the tensor's digest; the sum of all shares modulo 2⁶⁴ is the digest.

    By numpy on a CPU: torch would wake threads on the step's cores. The chunks share an array: where malloc
    maps large blocks, a new one for each takes four times as long.
    """
    box = Box(size, offsets, tuple(part.shape))
    if part.device.type != "cpu" or part.is_complex() or not part.numel():
        return digest_share(part, box)
    begin = box.start
    bits = part.detach().contiguous().view(-1).view(_BITS[part.element_size()]).numpy()
    numbers, total = np.empty(min(bits.size, CHUNK), dtype=np.int64), 0
    for start in range(0, bits.size, CHUNK):
        some = numbers[: bits.size - start]
        np.copyto(some, bits[start : start + CHUNK])
        total += int(np.dot(some, _POSITIONS[: some.size])) + 2 * (begin + start) * int(some.sum())
    return (total + beside_runs(part, box)) % 2**64


def overlap(a: tuple[Sizes, Sizes], b: tuple[Sizes, Sizes]) -> tuple[Sizes, Sizes] | None:
    """The box that two boxes share, in the whole tensor's coordinates; None where they are disjoint."""
    offsets = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(n > 0 for n in sizes) else None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    return (
        tensor.detach().view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
    )


# ---------------------------------------------------------------- a load


def of_model(model: nn.Module, source: CheckpointSource, prefix: str = "model.") -> list[Piece]:
    """The pieces to fill: every parameter and persistent buffer."""
    tensors, own = model_tensors(model), source.manifest is not None
    unknown = {key for key in source.keys if key.startswith(prefix)} - {prefix + name for name in tensors}
    if own and unknown:
        raise source.misfit(f"it holds {min(unknown)} and {len(unknown) - 1} more that this model lacks")
    for name, tensor in tensors.items():
        key = prefix + name
        if (saved := source.tensors.get(key)) is None:
            raise source.misfit(f"it does not hold {key}")
        if saved.size != tuple(tensor.shape):
            raise source.misfit(f"its {key} is {saved.size} and this model's {tuple(tensor.shape)}")
        if own and saved.dtype != tensor.dtype:
            raise CheckpointError(
                f"{source.path} keeps {key} in {saved.dtype} and this run in {tensor.dtype}.",
                f"--precision.master {NAMES.get(saved.dtype, saved.dtype)}, or of a frozen parameter "
                f"--precision.frozen {'auto' if tensor.dtype == torch.bfloat16 else 'bf16'}",
            )
    return [piece((prefix + name,), tensor) for name, tensor in tensors.items()]


def of_averages(state: TrainState, source: CheckpointSource) -> tuple[list[Piece], list[str]]:
    """The moving averages that the checkpoint holds, as pieces to fill, and the names of the others."""
    current = averages(state.optimizer)
    missing = [name for name in current if not _fits(current[name], source.tensors.get(f"ema.{name}"))]
    return [piece(("ema", name), current[name]) for name in current if name not in missing], missing


class PendingState:
    """Optimizer state in the course of a load: pieces to fill, and values still to be read; `commit` gives
    both to the optimizer.
    """

    def __init__(self, state: TrainState, source: CheckpointSource, prefix: str) -> None:
        self._optimizer, names = state.optimizer, parameter_names(state.model)
        self._state: dict[nn.Parameter, dict[str, Any]] = {}
        self.pieces: list[Piece] = []
        self.values: list[tuple[nn.Parameter, str, str]] = []
        stored: dict[str, dict[str, str]] = {}
        for key in source.keys:
            if key.startswith(f"{prefix}state."):
                name, _, field_name = key.removeprefix(f"{prefix}state.").rpartition(".")
                stored.setdefault(name, {})[field_name] = key
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                fields = self._state[parameter] = dict[str, Any]()
                for field_name, key in sorted(stored.pop(names[parameter], {}).items()):
                    if (saved := source.tensors.get(key)) is None:
                        self.values.append((parameter, field_name, key))
                        continue
                    tensor = state.optimizer.state.get(parameter, {}).get(field_name)
                    if not _fits(tensor, saved):
                        tensor = _make(group, parameter, field_name, saved)
                    fields[field_name] = tensor
                    self.pieces.append(piece((key,), tensor))
        if source.manifest is not None and stored:
            raise source.misfit(f"it holds optimizer state of {min(stored)}, which this run does not train")

    def commit(self, values: dict[str, Any]) -> None:
        for parameter, name, key in self.values:
            self._state[parameter][name] = values[key]
        for parameter, fields in self._state.items():
            if fields:
                self._optimizer.state[parameter] = fields
            else:
                self._optimizer.state.pop(parameter, None)


def _fits(old: Any, saved: SavedTensor | None) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and saved is not None
        and (saved.size, saved.dtype) == (tuple(old.shape), old.dtype)
    )


def _make(group: dict[str, Any], parameter: nn.Parameter, name: str, saved: SavedTensor) -> torch.Tensor:
    """Sharded as the parameter if it has its shape; else whole, on the device that torch's optimizers use."""
    if name != "step" and saved.size == tuple(parameter.shape):
        # Not empty_like: for a float8 weight it would make a tensor that is cast as weights are.
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    on_device = name != "step" or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(saved.size, dtype=saved.dtype, device=device)

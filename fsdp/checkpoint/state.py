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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp.base.devices import NAMES, ShardDigest, digest_shard
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.manifest import SavedTensor
from fsdp.dist.collectives import first_row, local_tensor
from fsdp.models.units import clean_name
from fsdp.optim.state import TrainState, averages

SPLIT_BYTES = 1 << 18
"""Replicas of a larger piece write some of its rows each."""
KeyPath = tuple[str | int, ...]
Sizes = tuple[int, ...]
CHUNK = 1 << 16  # as 64-bit numbers these fit a core's own cache
_POSITIONS = np.arange(1, 2 * CHUNK, 2, dtype=np.int64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same piece: one reads it and sends it to the others."""

    group: dist.ProcessGroup
    size: int
    index: int


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
    replicas: Replicas | None = None
    reader: int | None = None
    """In a load: the index of the replica that reads it for all; None if each reads it."""

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


def take_snapshot(state: TrainState) -> Snapshot:
    """References to everything a save writes, in the same order on every rank."""
    buffers = {_clean(name, state.model) for name, _ in state.model.named_buffers(remove_duplicate=False)}
    pieces: list[Piece] = []
    for name, tensor in model_tensors(state.model).items():
        # BatchNorm's statistics change in the next forward, long before the optimizer writes.
        part = piece(("model", name), tensor.clone() if name in buffers else tensor)
        pieces.append(replace(part, buffer=name in buffers))
    values: dict[str, tuple[KeyPath, Any]] = {}
    for path, value in _optimizer(state.optimizer, parameter_names(state.model)):
        if isinstance(value, torch.Tensor):
            pieces.append(piece(path, value))
        else:
            values[join(path)] = (path, value)
    pieces += [piece(("ema", name), tensor) for name, tensor in averages(state.optimizer).items()]
    for name, number in state.counters().items():
        values[f"train.{name}"] = (("train", name), number)
    merged = _merge_aliases([p for p in pieces if p.local.numel() or not math.prod(p.size)])
    return Snapshot([_rows_to_write(piece) for piece in merged], values)


def _rows_to_write(piece: Piece) -> Piece:
    """Of a large piece that several ranks hold, the rows that this one writes: all write equal amounts."""
    replicas = piece.replicas
    if replicas is None or piece.buffer or piece.nbytes < SPLIT_BYTES or piece.sizes[0] < replicas.size:
        return piece
    first, last = (piece.sizes[0] * nth // replicas.size for nth in (replicas.index, replicas.index + 1))
    return replace(
        piece, offsets=(piece.offsets[0] + first, *piece.offsets[1:]), local=piece.local[first:last]
    )


def join(path: KeyPath) -> str:
    return ".".join(map(str, path))


def piece(path: KeyPath, tensor: torch.Tensor) -> Piece:
    """This rank's part of a tensor, under the key of that path."""
    local, size = _inner(local_tensor(tensor).detach()), tuple(tensor.shape)
    # DTensor's own function takes a hundred microseconds for each tensor of each save, while the step waits.
    offsets = (first_row(tensor), *(0,) * (len(size) - 1)) if size else ()
    return Piece(join(path), path, size, offsets, local, replicas=_replicas(tensor))


def _replicas(tensor: torch.Tensor) -> Replicas | None:
    """The ranks that hold the same piece; None if this rank reads its piece itself."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not isinstance(tensor, DTensor):
        assert dist.group.WORLD is not None
        return Replicas(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    mesh = tensor.device_mesh
    placements = enumerate(tensor.placements)
    axes = [axis for axis, place in placements if place.is_replicate() and mesh.size(axis) > 1]
    # Offloaded to the host, which the mesh's groups may not support: each rank reads its piece.
    if len(axes) != 1 or tensor.device.type != mesh.device_type:
        return None
    return Replicas(mesh.get_group(axes[0]), mesh.size(axes[0]), mesh.get_local_rank(axes[0]))


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


def _merge_aliases(pieces: list[Piece]) -> list[Piece]:
    """One piece for each memory: the later keys of a tied weight become aliases of the first."""
    seen: dict[tuple[int, Any], Piece] = {}
    merged: list[Piece] = []
    for part in pieces:
        local = part.local
        memory = (local.data_ptr(), (local.dtype, local.stride(), part.sizes, part.offsets, part.size))
        first = seen.get(memory) if part.nbytes else None  # an empty tensor has no address
        if first is None:
            merged.append(part)
            seen[memory] = part
        else:
            first.aliases.append((part.key, part.path))
    return merged


# ---------------------------------------------------------------- boxes


def digest(rows: torch.Tensor, offsets: Sizes, size: Sizes) -> int:
    """The share of these rows in the tensor's digest; the sum of all shares modulo 2⁶⁴ is the digest."""
    return _shard(rows).at(offsets[0] * math.prod(size[1:]) if size else 0)


def _shard(tensor: torch.Tensor) -> ShardDigest:
    """The two sums of fsdp.base.devices, by numpy on a CPU: torch would wake threads on the step's cores.

    The chunks share an array: where malloc maps large blocks, a new one for each takes four times as long.
    """
    if tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():
        return digest_shard(tensor)
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()]).numpy()
    numbers = np.empty(min(bits.size, CHUNK), dtype=np.int64)
    plain = weighted = 0
    for start in range(0, bits.size, CHUNK):
        part = numbers[: bits.size - start]
        np.copyto(part, bits[start : start + CHUNK])
        total = int(part.sum())
        plain += total
        weighted += int(np.dot(part, _POSITIONS[: part.size])) + 2 * start * total
    return ShardDigest(bits.size, plain % 2**64, weighted % 2**64)


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


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of a checkpoint's keys; the defaults are those of this program's checkpoints."""

    model: str = "model."
    optim: str | None = "optim."


def of_model(model: nn.Module, source: CheckpointSource, prefix: str = "model.") -> list[Piece]:
    """The pieces to fill: every parameter and persistent buffer."""
    tensors = model_tensors(model)
    frozen = {clean_name(name) for name, p in model.named_parameters() if not p.requires_grad}
    stored = {key for key in source.keys if key.startswith(prefix)}
    unknown = stored - {prefix + name for name in tensors}
    if source.manifest is not None and unknown:
        raise source.misfit(f"it holds {min(unknown)} and {len(unknown) - 1} more that this model lacks")
    for name, tensor in tensors.items():
        key = prefix + name
        if (saved := source.tensors.get(key)) is None:
            raise source.misfit(f"it does not hold {key}")
        if saved.size != tuple(tensor.shape):
            raise source.misfit(f"its {key} is {saved.size} and this model's {tuple(tensor.shape)}")
        if source.manifest is not None and saved.dtype != tensor.dtype:
            raise CheckpointError(
                f"{source.path} keeps {key} in {saved.dtype} and this run in {tensor.dtype}.",
                _dtype_hint(tensor, saved.dtype, name in frozen),
            )
    return [piece((prefix + name,), tensor) for name, tensor in tensors.items()]


def _dtype_hint(tensor: torch.Tensor, saved: torch.dtype, frozen: bool) -> str:
    if frozen and torch.bfloat16 in (tensor.dtype, saved):
        return f"--precision.frozen {'auto' if tensor.dtype == torch.bfloat16 else 'bf16'}"
    return f"--precision.master {NAMES.get(saved, str(saved))}"


def of_averages(state: TrainState, tensors: Mapping[str, SavedTensor]) -> tuple[list[Piece], list[str]]:
    """The moving averages that the checkpoint holds, as pieces to fill, and the names of the others."""
    current = averages(state.optimizer)
    missing = [name for name, tensor in current.items() if not _fits(tensor, tensors.get(f"ema.{name}"))]
    return [piece(("ema", name), current[name]) for name in current if name not in missing], missing


class PendingState:
    """Optimizer state in the course of a load: pieces to fill, and values still to be read; `commit` gives
    both to the optimizer.
    """

    def __init__(self, state: TrainState, source: CheckpointSource, prefix: str) -> None:
        self._optimizer = state.optimizer
        self._state: dict[nn.Parameter, dict[str, Any]] = {}
        self.pieces: list[Piece] = []
        self.values: list[tuple[nn.Parameter, str, str]] = []
        stored: dict[str, dict[str, str]] = {}
        for key in source.keys:
            if key.startswith(f"{prefix}state."):
                name, _, field_name = key.removeprefix(f"{prefix}state.").rpartition(".")
                stored.setdefault(name, {})[field_name] = key
        names = parameter_names(state.model)
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                self._state[parameter] = {}
                for field_name, key in sorted(stored.pop(names[parameter], {}).items()):
                    self._prepare(group, parameter, field_name, key, source.tensors.get(key))
        if source.manifest is not None and stored:
            raise source.misfit(f"it holds optimizer state of {min(stored)}, which this run does not train")

    def _prepare(
        self, group: dict[str, Any], parameter: nn.Parameter, name: str, key: str, saved: SavedTensor | None
    ) -> None:
        if saved is None:
            self.values.append((parameter, name, key))
            return
        old = self._optimizer.state.get(parameter, {}).get(name)
        tensor = old if _fits(old, saved) else _make(group, parameter, name, saved)
        self._state[parameter][name] = tensor
        self.pieces.append(piece((key,), tensor))

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

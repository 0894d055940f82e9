"""Maps the run's tensors to the keys of a checkpoint.

The optimizer gets exactly the saved state, created here where it does not exist yet; a parameter saved
without state gets none. What does not fit (a missing key, another shape, another precision) raises
CheckpointError before anything is read or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp.base.dtypes import NAMES
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.snapshot import Piece, model_tensors, parameter_names, piece
from fsdp.models.parameter_names import clean_name
from fsdp.optim.ema import averages
from fsdp.optim.train_state import TrainState


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same piece: one reads it and sends it to the others."""

    group: dist.ProcessGroup
    size: int
    index: int


@dataclass
class LoadTarget:
    """A local piece to fill from the checkpoint's key `source`."""

    source: str
    piece: Piece
    replicas: Replicas | None = None
    reader: int = 0
    """The index of the replica that reads it."""

    @property
    def reads(self) -> bool:
        return self.replicas is None or self.replicas.index == self.reader


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of a checkpoint's keys; the defaults are those of this program's checkpoints."""

    model: str = "model."
    optim: str | None = "optim."


def of_model(
    model: nn.Module, metadata: Metadata, prefixes: Prefixes, exact: bool, where: str
) -> list[LoadTarget]:
    """A target for every parameter and persistent buffer."""
    tensors = model_tensors(model)
    stored = {key for key in metadata.state_dict_metadata if key.startswith(prefixes.model)}
    frozen = {clean_name(name) for name, p in model.named_parameters() if not p.requires_grad}
    unknown = stored - {prefixes.model + name for name in tensors}
    if exact and unknown:
        raise _misfit(where, f"it holds {min(unknown)} and {len(unknown) - 1} more that this model lacks")
    return [
        _target(prefixes.model + name, tensor, metadata, exact, where, name in frozen)
        for name, tensor in tensors.items()
    ]


def _target(
    source: str, tensor: torch.Tensor, metadata: Metadata, exact: bool, where: str, frozen: bool
) -> LoadTarget:
    entry = metadata.state_dict_metadata.get(source)
    if not isinstance(entry, TensorStorageMetadata):
        raise _misfit(where, f"it does not hold {source}")
    if tuple(entry.size) != tuple(tensor.shape):
        raise _misfit(where, f"its {source} is {tuple(entry.size)} and this model's {tuple(tensor.shape)}")
    if exact and entry.properties.dtype != tensor.dtype:
        raise CheckpointError(
            f"{where} keeps {source} in {entry.properties.dtype} and this run in {tensor.dtype}.",
            _dtype_hint(tensor, entry.properties.dtype, frozen),
        )
    return LoadTarget(source, piece((source,), tensor), replicas(tensor))


def _dtype_hint(tensor: torch.Tensor, saved: torch.dtype, frozen: bool) -> str:
    if frozen and torch.bfloat16 in (tensor.dtype, saved):
        return f"--precision.frozen {'auto' if tensor.dtype == torch.bfloat16 else 'bf16'}"
    return f"--precision.master {NAMES.get(saved, str(saved))}"


def _misfit(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is not of this model: {what}.",
        "give the flags that the run had (config.toml beside it), or a new --run.dir",
    )


def replicas(tensor: torch.Tensor) -> Replicas | None:
    """The ranks that hold the same piece; None if this rank reads its piece itself."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not isinstance(tensor, DTensor):
        assert dist.group.WORLD is not None
        return Replicas(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    mesh = tensor.device_mesh
    if tensor.device.type != mesh.device_type:
        return (
            None  # offloaded to the host, which the mesh's groups may not support: each rank reads its piece
        )
    axes = [
        axis
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]
    if len(axes) != 1:
        return None
    return Replicas(mesh.get_group(axes[0]), mesh.size(axes[0]), mesh.get_local_rank(axes[0]))


def of_optimizer(
    state: TrainState, metadata: Metadata, prefix: str, exact: bool, where: str
) -> tuple[list[LoadTarget], PendingState]:
    """Targets for the saved optimizer state; after the read `commit` gives it to the optimizer."""
    pending = PendingState(state.optimizer)
    names = parameter_names(state.model)
    stored = _by_parameter(metadata, prefix)
    targets: list[LoadTarget] = []
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            for field, key in sorted(stored.pop(names[parameter], {}).items()):
                targets += pending.prepare(group, parameter, field, key, metadata.state_dict_metadata[key])
    if exact and stored:
        raise _misfit(where, f"it holds optimizer state of {min(stored)}, which this run does not train")
    return targets, pending


def of_averages(state: TrainState, metadata: Metadata) -> tuple[list[LoadTarget], list[str]]:
    """Targets for the moving averages that the checkpoint holds, and the names of the others."""
    targets, missing = [], []
    for name, tensor in averages(state.optimizer).items():
        entry = metadata.state_dict_metadata.get(f"ema.{name}")
        if isinstance(entry, TensorStorageMetadata) and _fits(tensor, entry):
            targets.append(LoadTarget(f"ema.{name}", piece(("ema", name), tensor), replicas(tensor)))
        else:
            missing.append(name)
    return targets, missing


def _by_parameter(metadata: Metadata, prefix: str) -> dict[str, dict[str, str]]:
    """The keys of the optimizer state: parameter → field → key."""
    found: dict[str, dict[str, str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith(prefix + "state."):
            name, _, field = key.removeprefix(prefix + "state.").rpartition(".")
            found.setdefault(name, {})[field] = key
    return found


class PendingState:
    """Optimizer state in the course of a load: tensors to be filled, and values still to be read."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[nn.Parameter, dict[str, Any]] = {
            p: {} for group in optimizer.param_groups for p in group["params"]
        }
        self.values: list[tuple[nn.Parameter, str, str]] = []

    def prepare(
        self, group: dict[str, Any], parameter: nn.Parameter, field: str, key: str, entry: Any
    ) -> Iterator[LoadTarget]:
        if not isinstance(entry, TensorStorageMetadata):
            self.values.append((parameter, field, key))
            return
        old = self._optimizer.state.get(parameter, {}).get(field)
        tensor = old if _fits(old, entry) else _make(group, parameter, field, entry)
        self._state[parameter][field] = tensor
        yield LoadTarget(key, piece((key,), tensor), replicas(tensor))

    def commit(self, values: dict[str, Any]) -> None:
        for parameter, field, key in self.values:
            self._state[parameter][field] = values[key]
        for parameter, fields in self._state.items():
            if fields:
                self._optimizer.state[parameter] = fields
            else:
                self._optimizer.state.pop(parameter, None)


def _fits(old: Any, entry: TensorStorageMetadata) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and tuple(old.shape) == tuple(entry.size)
        and old.dtype == entry.properties.dtype
    )


def _make(
    group: dict[str, Any], parameter: nn.Parameter, field: str, entry: TensorStorageMetadata
) -> torch.Tensor:
    """Sharded as the parameter if it has its shape; else whole, on the device that torch's optimizers use."""
    if field != "step" and tuple(entry.size) == tuple(parameter.shape):
        # Not empty_like: for a float8 weight it would make a tensor that is cast as weights are.
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    on_device = field != "step" or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

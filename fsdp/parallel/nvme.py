"""What rests in files between its uses: the optimizer's states, and with `all` the sharded parameters and
gradients too.

The tensors are ordinary ones whose memory is a mapped file (fsdp/parallel/mapped_files.py): kernels,
checkpoints and digests read them as any other. The update goes part by part, and a part's pages leave the
process as soon as it is done, so that what is resident at once is a part and not the whole. Numbers are those
of an update in memory, to the bit: it is elementwise.

Gathered parameters, activations, and gradients before they are reduced are not here: they are a unit's, not
the model's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp.config import MemorySection, OptimSection
from fsdp.dist.local_tensors import local_tensor
from fsdp.parallel.mapped_files import MappedFile, reserve, room_for

PART_BYTES = 64 << 20
"""States of a part: what is resident at once, and what one call of the optimizer updates."""
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
RETURNED_BYTES = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
FRAME = 4096  # more than head, tail and alignment of a tensor in a checkpoint's file


def maybe_shelf(
    memory: MemorySection,
    optim: OptimSection,
    root: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    state_dtype: torch.dtype,
) -> Shelf | None:
    """Collective where something rests in files. The model may stand on meta."""
    if memory.nvme == "off":
        return None
    kept = torch.bfloat16 if optim.state == "bf16" else state_dtype
    return Shelf(
        Path(memory.nvme_dir), root, units, optim=optim, state_dtype=kept, everything=memory.nvme == "all"
    )


class Shelf:
    """One rank's files. Building one is collective: all ranks have room, or all say why not."""

    def __init__(
        self,
        folder: Path,
        root: nn.Module,
        units: Sequence[Sequence[nn.Module]],
        *,
        optim: OptimSection,
        state_dtype: torch.dtype,
        everything: bool,
    ) -> None:
        give_freed_back()
        self._root, self._units, self._dtype, self._everything = root, units, state_dtype, everything
        self._moments = MOMENTS[optim.name] if optim.name != "sgd" or optim.momentum else ()
        self._slots: dict[tuple[nn.Parameter, str], Tensor] = {}
        sizes = self._sizes(root)
        files = reserve(
            folder,
            sizes.values(),
            flag="memory.nvme_dir",
            what=f"What --memory.nvme puts there ({_said(sizes)})",
        )
        self._files: dict[str, MappedFile] = dict(zip(sizes, files, strict=True))

    def _sizes(self, root: nn.Module) -> dict[str, int]:
        """Bytes by purpose; `staging` is a checkpoint's copy of the rank's file, which would else be in
        memory.
        """
        kept = {name: _local(p) for name, p in root.named_parameters()}
        trained = [_local(p) for p in root.parameters() if p.requires_grad]
        states = sum(room_for(part.numel() * self._dtype.itemsize) for part in trained) * len(self._moments)
        tensors = [*kept.values(), *(b for b in root.buffers())]
        framed = (
            sum(t.numel() * t.element_size() + FRAME for t in tensors)
            + states
            + 3 * FRAME * (len(trained) + 64)
        )
        sizes = {"states": states, "staging": framed}
        if self._everything:
            # Padded to the first rank's rows, as FSDP gathers them; those with fewer are laid twice.
            padded = [
                room_for(_padded(p).numel() * p.element_size())
                for p in root.parameters()
                if isinstance(p, DTensor)
            ]
            sizes |= {"parameters": 2 * sum(padded), "gradients": sum(padded)}
        return sizes

    # ------------------------------------------------------------ parameters

    def empty(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """As torch.empty_like, for a meta model on its way to real: a shard gets a file's memory."""
        if not (self._everything and isinstance(tensor, DTensor)):
            return torch.empty_like(tensor, device=device)
        room = self._files["parameters"].take(_padded(tensor).shape, tensor.dtype)
        return _like(tensor, room[: _local(tensor).shape[0]])

    def settle(self) -> None:
        """After the weights' memory is made: what FSDP has padded, in memory, gets a file's again."""
        for each in _fsdp_parameters(self._root) if self._everything else ():
            data = each._sharded_param_data
            if data.numel() and not self._files["parameters"].holds(data):
                room = self._files["parameters"].take(data.shape, data.dtype)
                room.copy_(data)
                rows = each.sharded_param._local_tensor.shape
                each._sharded_param_data = room
                each.sharded_param._local_tensor = room[: rows.numel()].view(rows)

    def watch(self) -> None:
        """When the weights are real. A unit's shards are read as it is gathered: after its forward and its
        backward they may leave; a gradient goes into its file as soon as it is reduced.
        """
        if not self._everything:
            return
        self.forget(self._root.parameters())
        held = [[p for module in unit for p in module.parameters()] for unit in self._units]
        for at, unit in enumerate(self._units):
            unit[-1].register_forward_hook(_Leave(self, held[at], held[at + 1] if at + 1 < len(held) else []))
        for parameter in self._root.parameters():
            if parameter.requires_grad and isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(self._keep_gradient)

    @torch.no_grad()
    def _keep_gradient(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter.grad, DTensor)
        local = _local(parameter.grad)
        room = self._slot(parameter, "grad", local.dtype, "gradients")
        if local.numel() and local.data_ptr() != room.data_ptr():
            room.copy_(local)
            parameter.grad = _like(parameter.grad, room)
        self.forget([room])

    # ------------------------------------------------------------ optimizer

    @contextlib.contextmanager
    def offered(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within it a checkpoint is read: it finds states to fill that lie in files. What it did not fill is
        gone after.
        """
        offers: dict[Tensor, Any] = {
            p: {m: self._state(p, m, self._dtype) for m in self._moments} for p in _trained(optimizer)
        }
        optimizer.state.update(offers)
        try:
            yield
        finally:
            for parameter, offer in offers.items():
                if optimizer.state.get(parameter) is offer:
                    del optimizer.state[parameter]
            self._adopt(optimizer, _trained(optimizer))
            self.forget(_trained(optimizer))
            self.forget(self._slots.values())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step, on one part after another; the next part is asked of the disk meanwhile."""
        parts = list(self._parts(optimizer))
        for at, part in enumerate(parts):
            for parameter in parts[at + 1] if at + 1 < len(parts) else ():
                self._fetch([parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()])
            step_some(optimizer, part)
            self._adopt(optimizer, part)
            for parameter in part:
                self.forget([parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()])

    def _parts(self, optimizer: torch.optim.Optimizer) -> Iterator[list[nn.Parameter]]:
        """Parameters in their order, cut where a part's states are enough. One parameter is never cut."""
        sized = [
            (p, _local(p).numel() * self._dtype.itemsize * len(self._moments)) for p in _trained(optimizer)
        ]
        yield from _cut(sized, PART_BYTES)

    @torch.no_grad()
    def _adopt(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """States that torch has just made in memory move to their file."""
        for parameter in parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    room = self._state(parameter, name, value.dtype)
                    if _local(value).numel() and not self._files["states"].holds(_local(value)):
                        _local(room).copy_(_local(value))
                        optimizer.state[parameter][name] = room

    def _state(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> Tensor:
        room = self._slot(parameter, name, dtype, "states")
        return _like(parameter, room) if isinstance(parameter, DTensor) else room

    def _slot(self, parameter: nn.Parameter, name: str, dtype: torch.dtype, purpose: str) -> Tensor:
        """One for each use of a parameter, made once."""
        found = self._slots.get((parameter, name))
        if found is None or found.dtype != dtype:
            found = self._slots[(parameter, name)] = self._files[purpose].take(_local(parameter).shape, dtype)
        return found

    # ------------------------------------------------------------ what is resident

    def in_turn(self, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
        """Local tensors a few at a time; what the caller touched leaves when it asks for the next."""
        for part in _cut([(t, t.numel() * t.element_size()) for t in tensors], PART_BYTES):
            yield part
            self.forget(part)

    def forget(self, tensors: Iterable[Any]) -> None:
        for file, local in self._held(tensors):
            file.forget(local)

    def _fetch(self, tensors: Iterable[Any]) -> None:
        for file, local in self._held(tensors):
            file.fetch(local)

    def _held(self, tensors: Iterable[Any]) -> Iterator[tuple[MappedFile, Tensor]]:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                local = _local(tensor)
                yield from ((file, local) for file in self._files.values() if file.holds(local))

    def take(self, size: int) -> Tensor:
        """Bytes for a checkpoint's copy: the largest that this run can need was reserved."""
        self._files["staging"].restart()
        return self._files["staging"].take((size,), torch.uint8)


def give_freed_back() -> None:
    """glibc keeps freed blocks of up to 32 MiB for later: layers as large as that left several times their
    size behind (measured: 2,545 MiB where 344 were in use). From now on blocks of a MiB go back to the system
    as they are freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's alone
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
        mallopt(M_TRIM_THRESHOLD, RETURNED_BYTES)


class _Leave:
    """A unit's forward hook: its shards leave; when its output's gradient comes, the next unit's backward is
    over.
    """

    def __init__(self, shelf: Shelf, own: Sequence[Tensor], later: Sequence[Tensor]) -> None:
        self._shelf, self._own, self._later = shelf, own, later

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        self._shelf.forget(self._own)
        first = next((t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad), None)
        if first is not None:
            first.register_hook(lambda grad: self._shelf.forget(self._later))


def step_some(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """The optimizer's step as if it had these parameters alone."""
    wanted, whole = set(parameters), optimizer.param_groups
    few = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in whole]
    try:
        optimizer.param_groups = [group for group in few if group["params"]]
        optimizer.step()
    finally:
        optimizer.param_groups = whole


def _cut(sized: Iterable[tuple[Any, int]], limit: int) -> Iterator[list[Any]]:
    part: list[Any] = []
    total = 0
    for one, size in sized:
        if part and total + size > limit:
            yield part
            part, total = [], 0
        part.append(one)
        total += size
    if part:
        yield part


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def _like(shard: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def _padded(shard: Tensor) -> Tensor:
    """A meta tensor as large as every rank's piece is in a gather."""
    assert isinstance(shard, DTensor)
    count = max(
        shard.device_mesh.size(at) if place.is_shard() else 1 for at, place in enumerate(shard.placements)
    )
    return torch.empty((-(-shard.shape[0] // count), *shard.shape[1:]), device="meta", dtype=shard.dtype)


def _fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # several groups a module since 2.12; one before
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                yield from group.fsdp_params if group is not None else ()


def _said(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items())

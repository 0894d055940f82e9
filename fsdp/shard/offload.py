"""Host memory in place of the device's: activations between forward and backward, optimizer states between
updates.

Activations: everything that a unit keeps is copied to pinned host memory beside the computation, and back at
its use; with recomputation its inputs, which are all that checkpointing keeps. The last unit's stay:
backward begins with them. Parameters and buffers are never copied: gathered ones are gathered again.

Optimizer states: the update goes part by part. A part's states are copied to the device, updated there by the
optimizer's own kernel, and copied back. The numbers are those of an update on the device, to the bit: it is
elementwise. The host waits for the copies at the end of the update, so that a checkpoint reads whole states.

On a CPU the same code copies within host memory. Not here: what is kept and what is recomputed
(activations.py), states in files (nvme.py), parameters on the host too (--memory.cpu_offload).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import compiled_call, like_shard, set_compiled_call, viewed
from fsdp.config import OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.distributed.boxes import local_tensor
from fsdp.models.units import WRAP_HINT, blocks_of


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def cut_into_parts(sized: Iterable[tuple[Any, int]], limit: int) -> Iterator[list[Any]]:
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


def step_some(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """The optimizer's step on these parameters alone."""
    chosen, groups = set(parameters), optimizer.param_groups
    parts = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
    try:
        optimizer.param_groups = [group for group in parts if group["params"]]
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> list[tuple[nn.Parameter, str, Tensor]]:
    """States of their parameter's shape: not the count of steps, which stays where torch has it."""
    return [
        (parameter, name, value)
        for parameter in parameters
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
    ]


class PartedStates:
    """The states of one rank, kept in memory of their own between updates, which go part by part."""

    def __init__(self, optim: OptimSection, dtype: torch.dtype) -> None:
        self._moments = MOMENTS[optim.name] if optim.name != "sgd" or optim.momentum else ()
        self._dtype = torch.bfloat16 if optim.state == "bf16" else dtype
        self._rooms: dict[tuple[nn.Parameter, str], Tensor] = {}

    @property
    def part_bytes(self) -> int:
        """Bytes of states in a part; one parameter is never cut."""
        raise NotImplementedError

    def memory(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """New memory for this rank's part of a moment."""
        raise NotImplementedError

    def bring(self, optimizer: torch.optim.Optimizer, part: list[Any], later: list[Any]) -> None:
        """Before the update of a part; `later` is the next one."""

    def settle(self) -> None:
        """At the end of an update."""

    @contextlib.contextmanager
    def preallocated(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which a checkpoint is read: it fills states whose memory exists. Those that it does not
        fill are dropped after.
        """
        parameters = trained_parameters(optimizer)
        states: dict[Any, dict[str, Tensor]] = {
            p: {name: self.room(p, name, self._dtype) for name in self._moments} for p in parameters
        }
        optimizer.state.update(states)
        try:
            yield
        finally:
            for parameter, state in states.items():
                if optimizer.state.get(parameter) is state:
                    del optimizer.state[parameter]
            self.put_back(optimizer, parameters)
            self.settle()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step, part by part."""
        width = self._dtype.itemsize * len(self._moments)
        sized = [(p, local_tensor(p).numel() * width) for p in trained_parameters(optimizer)]
        for part, later in itertools.pairwise([*cut_into_parts(sized, self.part_bytes), []]):
            self.bring(optimizer, part, later)
            step_some(optimizer, part)
            self.put_back(optimizer, part)
        self.settle()

    @torch.no_grad()
    def put_back(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Copies states into their memory: those that the update has created, or that were brought."""
        for parameter, name, value in moments_of(optimizer, parameters):
            room = self.room(parameter, name, value.dtype)
            if room is not value:
                local_tensor(room).copy_(local_tensor(value), non_blocking=True)
                optimizer.state[parameter][name] = room

    def room(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> Tensor:
        """One for each moment of a parameter, created once."""
        room = self._rooms.get((parameter, name))
        if room is None or room.dtype != dtype:
            room = like_shard(parameter, self.memory(name, local_tensor(parameter).shape, dtype))
            self._rooms[parameter, name] = room
        return room


PART_BYTES = 256 << 20
"""Bytes of states on the device at once."""


class HostStates(PartedStates):
    """In host memory, pinned if it is copied to CUDA."""

    def __init__(self, optim: OptimSection, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(optim, dtype)
        self._device = device
        self.copied = 0
        """Bytes copied to the device so far."""

    @property
    def part_bytes(self) -> int:
        return PART_BYTES

    def memory(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    @torch.no_grad()
    def bring(self, optimizer: torch.optim.Optimizer, part: list[Any], later: list[Any]) -> None:
        for parameter, name, value in moments_of(optimizer, part):
            local = local_tensor(value)
            moved = torch.empty_like(local, device=self._device).copy_(local, non_blocking=True)
            optimizer.state[parameter][name] = like_shard(parameter, moved)
            self.copied += moved.nbytes

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


SMALLEST = 1 << 16
"""Bytes from which on a copy over the bus is worth its overhead."""


def apply_activation_offload(
    units: Sequence[list[nn.Module]], device: torch.device, *, compiled: bool
) -> None:
    """Applied after the units are compiled and before they are sharded: a hook within compiled code would
    break its graph.
    """
    blocks = blocks_of(units)
    if not blocks:
        fault = "--memory.activation_offload true works on units, and this model has none."
        raise ConfigError(fault, WRAP_HINT)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for block in blocks[:-1] or blocks:
        if compiled and (call := compiled_call(block)) is not None:
            set_compiled_call(block, Offloaded(block, call, device, stream))
        else:
            block.forward = Offloaded(block, block.forward, device, stream)  # type: ignore[method-assign]


class Offloaded:
    """A unit's forward under hooks that copy the tensors it keeps to the host, on a stream of their own."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], device: torch.device, stream: Any
    ) -> None:
        self._block, self._forward, self._device, self._stream = block, forward, device, stream
        self.copied = 0
        """Bytes copied out so far."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # The sources live until the end: the address of a freed storage may be another's later.
        kept: dict[tuple[Any, ...], tuple[Tensor, _Kept]] = {}
        own: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            if not own:  # at the first kept tensor: a unit is gathered only within its forward
                held = [*self._block.parameters(), *self._block.buffers()]
                own.update(id(t.untyped_storage()) for t in held if type(t) in (Tensor, nn.Parameter))
            storage = id(tensor.untyped_storage()) if type(tensor) is Tensor else 0
            least = SMALLEST if self._stream is not None else 1
            elsewhere = tensor.device.type != self._device.type or isinstance(viewed(tensor), nn.Parameter)
            if not storage or storage in own or elsewhere or tensor.nbytes < least:
                return tensor
            key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in kept:
                pinned = self._stream is not None
                host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
                if host.stride() != tensor.stride():
                    return tensor  # compiled backwards rely on strides
                self._copy_out(tensor.detach(), host)
                kept[key] = tensor.detach(), _Kept(host)
            kept[key][1].uses += 1
            return kept[key][1]

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return self._forward(*args, **kwargs)

    def _copy_out(self, source: Tensor, host: Tensor) -> None:
        self.copied += source.nbytes
        if self._stream is None:
            host.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is another's only when it is copied

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        if kept.back is None:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            kept.back = kept.host.to(self._device, non_blocking=True)
        value = kept.back
        kept.uses -= 1
        if kept.uses <= 0:
            kept.back = None
        return value


class _Kept:
    """One tensor that autograd keeps: its host copy, and the device's while it is used."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.back: Tensor | None = None
        self.uses = 0

"""Host memory in place of the device's: activations between forward and backward, optimizer states between
updates.

Activations: everything that a unit keeps is copied to pinned host memory behind the next unit, and back ahead
of its use; with recomputation its inputs, which are all that checkpointing keeps. The last unit's stay:
backward begins with them. At most two units' are on the device, on their way out or back. Parameters and
buffers are never copied: gathered ones are gathered again.

Optimizer states: the update goes part by part. A part's states are copied to the device, updated there by the
optimizer's own kernel, and copied back. The numbers are those of an update on the device, to the bit: it is
elementwise. The host waits for the copies at the end of the update, so that a checkpoint reads whole states.

On a CPU the same code copies within host memory. Not here: what is kept and what is recomputed
(activations.py), states in files (nvme.py), parameters on the host too (--memory.cpu_offload).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import compiled_call, like_shard, set_compiled_call, viewed
from fsdp.config import OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.dist.collectives import local_tensor
from fsdp.models.units import WRAP_HINT, blocks_of


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parts_of(optimizer: torch.optim.Optimizer, itemsize: int, limit: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in their order, cut where their states of `itemsize` bytes an element reach `limit`. One
    parameter is never cut.
    """
    sized = [(p, local_tensor(p).numel() * itemsize) for p in trained_parameters(optimizer)]
    yield from cut_into_parts(sized, limit)


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
        parts = [*parts_of(optimizer, self._dtype.itemsize * len(self._moments), self.part_bytes), []]
        for part, later in itertools.pairwise(parts):
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
        raise ConfigError(
            "--memory.activation_offload true works on units, and this model has none.", WRAP_HINT
        )
    carrier = OffloadStreams(device)
    for block in blocks[:-1] or blocks:
        if compiled and (call := compiled_call(block)) is not None:
            set_compiled_call(block, _Offloaded(block, call, carrier))
        else:
            block.forward = _Offloaded(block, block.forward, carrier)  # type: ignore[method-assign]


class OffloadStreams:
    """The two streams over the bus, and the copies in progress. On a CPU there is no stream and nothing
    waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.smallest = SMALLEST if device.type == "cuda" else 0
        self.copied = 0
        """Bytes copied out so far."""
        self._out: Any = None
        self._back: Any = None
        self._leaving: Passage | None = None
        self._latest: weakref.ref[Passage] | None = None

    def streams(self) -> tuple[Any, Any]:
        if self._out is None and self.device.type == "cuda":
            self._out, self._back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._out, self._back

    def begin(self, module: nn.Module) -> Passage:
        """The previous one is held by a weak reference: a graph that is dropped frees its copies."""
        before = self._latest() if self._latest is not None else None
        passage = Passage(self, module, before)
        self._latest = weakref.ref(passage)
        return passage

    def left(self, passage: Passage) -> None:
        """Called after a unit's forward. The previous unit's tensors may be freed once they are copied."""
        passage.record_copy()
        if self._leaving is not None:
            self._leaving.release()
        self._leaving = passage


class Passage:
    """One forward of one unit: the tensors that it keeps, out and back. The graph holds them: one that is
    dropped frees its copies.
    """

    def __init__(self, carrier: OffloadStreams, module: nn.Module, before: Passage | None) -> None:
        self._carrier, self._module = carrier, module
        self._before = weakref.ref(before) if before is not None else None
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], _Kept] = weakref.WeakValueDictionary()
        self._own: set[int] | None = None
        self._out_done: Any = None
        self._back_done: Any = None
        self._fetched = False

    def pack(self, tensor: Tensor) -> Any:
        if not self._is_copied(tensor):
            return tensor
        place = (id(tensor.untyped_storage()), tensor.storage_offset())
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        kept = self._kept.get(key)
        if kept is None:
            out, _ = self._carrier.streams()
            host = torch.empty_like(tensor, device="cpu", pin_memory=out is not None, requires_grad=False)
            if host.stride() != tensor.stride():
                return tensor  # compiled backwards rely on strides
            self._copy_out(tensor.detach(), host, out)
            kept = self._kept[key] = _Kept(self, tensor.detach(), host)
        kept.uses += 1
        return kept

    def _copy_out(self, source: Tensor, host: Tensor, out: Any) -> None:
        self._carrier.copied += source.nbytes
        if out is None:
            host.copy_(source)
            return
        out.wait_stream(torch.cuda.current_stream(self._carrier.device))
        with torch.cuda.stream(out):
            host.copy_(source, non_blocking=True)

    def _is_copied(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self._carrier.device.type:
            return False
        if tensor.nbytes < max(1, self._carrier.smallest) or isinstance(viewed(tensor), nn.Parameter):
            return False
        if self._own is None:
            # Read at the first kept tensor: a unit is gathered only within its forward.
            own = [*self._module.parameters(), *self._module.buffers()]
            self._own = {id(t.untyped_storage()) for t in own if type(t) in (Tensor, nn.Parameter)}
        return id(tensor.untyped_storage()) not in self._own

    def record_copy(self) -> None:
        out, _ = self._carrier.streams()
        self._out_done = out.record_event() if out is not None else None

    def release(self) -> None:
        """Frees the device's copies: the stream that reuses their memory waits for the copy, the host
        does not.
        """
        if self._out_done is not None:
            torch.cuda.current_stream(self._carrier.device).wait_event(self._out_done)
        for kept in self._kept.values():
            kept.source = None

    def fetch(self) -> None:
        """At the first use in backward: copies this unit's back at once, unless they are on their way,
        and the previous unit's behind them.
        """
        self._begin_fetch()
        done, self._back_done = self._back_done, None
        if done is not None:
            # An event and not the stream: the next unit's copies are behind it there, and need not be waited
            # for.
            torch.cuda.current_stream(self._carrier.device).wait_event(done)
        before = self._before() if self._before is not None else None
        if before is not None:
            before._begin_fetch()

    def _begin_fetch(self) -> None:
        if self._fetched:
            return
        self._fetched = True
        _, back = self._carrier.streams()
        for kept in self._kept.values():
            kept.back = kept.source  # None if it has left
            if kept.back is None and back is not None:
                back.wait_event(self._out_done)
                with torch.cuda.stream(back):
                    kept.back = kept.host.to(self._carrier.device, non_blocking=True)
            kept.source = None
        self._back_done = back.record_event() if back is not None else None


class _Kept:
    """One tensor that autograd keeps: its host copy, and the device's while it is used."""

    def __init__(self, passage: Passage, source: Tensor, host: Tensor) -> None:
        self.passage, self.host = passage, host
        self.source: Tensor | None = source
        self.back: Tensor | None = None
        self.uses = 0

    def take(self, device: torch.device) -> Tensor:
        self.passage.fetch()
        if self.back is None:  # on a CPU, or a second backward over the same graph
            self.back = self.host.to(device)
        value = self.back
        if device.type == "cuda":
            value.record_stream(torch.cuda.current_stream(device))
        self.uses -= 1
        if self.uses <= 0:
            self.back = None
        return value


class _Offloaded:
    """A unit's forward under hooks that receive the tensors it keeps."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], carrier: OffloadStreams) -> None:
        self._block, self._forward, self.carrier = block, forward, carrier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        passage = self.carrier.begin(self._block)
        with torch.autograd.graph.saved_tensors_hooks(passage.pack, self._unpack):
            output = self._forward(*args, **kwargs)
        self.carrier.left(passage)
        return output

    def _unpack(self, kept: Any) -> Tensor:
        return kept.take(self.carrier.device) if isinstance(kept, _Kept) else kept

"""Offload of activations: pinned host memory, copied out behind the next unit, and back ahead of its use.

Everything that a unit keeps is copied, or with recomputation its inputs, which are all that checkpointing
keeps. The last unit's stay: backward begins with them. At most two units' are on the device, on their way out
or back. Parameters and buffers are never copied: gathered ones are gathered again. On a CPU the same code
copies from host memory to host memory. Not here: what is kept and what is recomputed (activations.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import compiled_call, set_compiled_call, viewed
from fsdp.config import MemorySection
from fsdp.models.units import blocks_of

SMALLEST = 1 << 16
"""Bytes from which on a copy over the bus is worth its overhead."""


def apply_activation_offload(
    units: Sequence[list[nn.Module]], memory: MemorySection, device: torch.device, *, compiled: bool
) -> None:
    """Applied after the units are compiled and before they are sharded: a hook within compiled code would
    break its graph.
    """
    if not memory.activation_offload:
        return
    blocks = blocks_of(units)
    if not blocks:
        raise ConfigError(
            "--memory.activation_offload true works on units, and this model has none.",
            "--mesh.wrap class:NAME says which modules are units",
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
    """One forward of one unit: the tensors that it keeps, out and back."""

    def __init__(self, carrier: OffloadStreams, module: nn.Module, before: Passage | None) -> None:
        self._carrier, self._module = carrier, module
        self._before = weakref.ref(before) if before is not None else None
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._fetchable: list[weakref.ref[_Kept]] = []
        self._own: set[int] | None = None
        self._out_done: Any = None
        self._back_done: Any = None
        self._fetched = False

    def pack(self, tensor: Tensor) -> Any:
        if not self._is_copied(tensor):
            return tensor
        key = (
            id(tensor.untyped_storage()),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        known = self._kept.get(key)
        if known is None:
            known = _Kept.leave(self, tensor, self._carrier)
            if known is None:
                return tensor
            self._kept[key] = known
            self._fetchable.append(weakref.ref(known))
        known.uses += 1
        return known

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
        self._kept.clear()
        for kept in self._alive():
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
        for kept in self._alive():
            kept.fetch(self._carrier, self._out_done)
        self._kept.clear()
        _, back = self._carrier.streams()
        self._back_done = back.record_event() if back is not None else None

    def _alive(self) -> list[_Kept]:
        return [kept for one in self._fetchable if (kept := one()) is not None]


class _Kept:
    """One tensor that autograd keeps: its host copy, and the device's while it is used."""

    def __init__(self, passage: Passage, source: Tensor, host: Tensor) -> None:
        self.passage, self.host = passage, host
        self.source: Tensor | None = source
        self.uses = 0
        self._back: Tensor | None = None

    @classmethod
    def leave(cls, passage: Passage, tensor: Tensor, carrier: OffloadStreams) -> _Kept | None:
        """None if a copy would have other strides: compiled backwards rely on them."""
        out, _ = carrier.streams()
        host = torch.empty_like(tensor, device="cpu", pin_memory=out is not None, requires_grad=False)
        if host.stride() != tensor.stride():
            return None
        carrier.copied += tensor.nbytes
        if out is None:
            host.copy_(tensor.detach())
        else:
            out.wait_stream(torch.cuda.current_stream(carrier.device))
            with torch.cuda.stream(out):
                host.copy_(tensor.detach(), non_blocking=True)
        return cls(passage, tensor.detach(), host)

    def fetch(self, carrier: OffloadStreams, out_done: Any) -> None:
        _, back = carrier.streams()
        if self.source is not None:
            self._back = self.source  # it has not left yet
        elif back is not None:
            back.wait_event(out_done)
            with torch.cuda.stream(back):
                self._back = self.host.to(carrier.device, non_blocking=True)
        self.source = None

    def take(self, carrier: OffloadStreams) -> Tensor:
        self.passage.fetch()
        if self._back is None:  # a second backward over the same graph
            self._back = self.host.to(carrier.device)
        value = self._back
        if carrier.device.type == "cuda":
            value.record_stream(torch.cuda.current_stream(carrier.device))
        self.uses -= 1
        if self.uses <= 0:
            self._back = None
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
        return kept.take(self.carrier) if isinstance(kept, _Kept) else kept

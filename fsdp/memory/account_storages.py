"""Tracks every storage that operations create and release on the CPU, whose allocator has no history.

A dispatch mode receives the outputs of each operation, a weak reference reports their release, and a wrapped
`resize_` what FSDP gathers and frees. Active only while entered, on the thread that entered it (autograd runs
CPU backward there). Allocations inside compiled code are not seen: they count as `beyond`. Costs 5–20 µs per
operation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.torch_private.core import TorchDispatchMode
from fsdp.base.torch_private.fsdp import Run, after_resizes, around_collectives
from fsdp.dist.local_tensors import tensors_in
from fsdp.memory.account import KINDS, owned_storages, storages_of
from fsdp.memory.account_timeline import Mark, Timeline
from fsdp.memory.live_storages import LiveStorages

ACTIVATIONS = ("forward", "backward", "evaluate")


@dataclass
class _Block:
    """The number in the timeline, and the bytes, which FSDP's gathers change."""

    number: int
    size: int = 0


class StorageTracker(TorchDispatchMode):
    """Context manager around the profiled steps; `phase` marks each phase."""

    def __init__(self, root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str = "cpu") -> None:
        super().__init__()
        self.timeline = Timeline(KINDS)
        self._root, self._optimizer, self._device = root, optimizer, device
        self._live = LiveStorages(self._gone)
        self._kind = "other"
        self._patches = contextlib.ExitStack()

    # ------------------------------------------------------------ events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it becomes operations on shards, which are dispatched here
        for tensor in tensors_in(args):
            self._meet(tensor, "other")
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._meet(tensor, self._kind)
        return out

    def phase(self, mark: Mark) -> None:
        """Start of a phase. Storages that model and optimizer own now get the kind of their owner."""
        self.identify()
        self.timeline.mark(mark)
        self._kind = "activations" if mark.phase in ACTIVATIONS else "other"

    def identify(self) -> None:
        for kind, storage in owned_storages(self._root, self._optimizer).values():
            self._name(storage, kind)

    def _name(self, storage: torch.UntypedStorage, kind: str) -> None:
        if storage.device.type == self._device:
            self.timeline.kind_of[self._see(storage, kind).number] = kind

    def _meet(self, tensor: Tensor, kind: str) -> None:
        for storage in storages_of(tensor):
            if storage.device.type == self._device:
                self._see(storage, kind)

    def _see(self, storage: torch.UntypedStorage, kind: str) -> _Block:
        size, block = storage.nbytes(), self._live.get(storage)
        if block is None:
            block = _Block(self.timeline.block(kind))
            self._live.add(storage, block)
        if size != block.size:
            self.timeline.change(time.perf_counter(), block.number, size - block.size)
            block.size = size
        return block

    def _gone(self, block: _Block) -> None:
        self.timeline.change(time.perf_counter(), block.number, -block.size)

    # ------------------------------------------------------------ enter and exit

    def __enter__(self) -> StorageTracker:
        self._patches.enter_context(after_resizes(self._resized))
        self._patches.enter_context(around_collectives(self._communicating))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def forget(self) -> None:
        """Drops all weak references, after the last step."""
        self._live.clear()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == self._device:
            self._see(storage, "gathered")

    def _communicating(self, run: Run, gradients: Sequence[Tensor]) -> Any:
        # The gradients that come in are the unsharded ones: named here, since none is left when the phase
        # ends.
        for tensor in gradients:
            for storage in storages_of(tensor):
                self._name(storage, "gradients")
        before, self._kind = self._kind, "communication"
        try:
            return run()
        finally:
            self._kind = before

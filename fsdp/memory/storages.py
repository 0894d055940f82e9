"""Storages as operations create and release them.

StorageTracker counts a step's on a CPU, whose allocator has no history; on CUDA torch's own snapshot has
them. `LiveStorages`, `Pool` and `packing` are the planner's too (fsdp/plan/trace.py). Not here: what model,
groups and optimizer own (account.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fsdp.base.torch_private import (
    WRAPPERS,
    Run,
    TorchDispatchMode,
    after_resizes,
    around_collectives,
)
from fsdp.distributed.boxes import tensors_in
from fsdp.memory.account import KINDS, owned_storages, storages_of

if TYPE_CHECKING:
    pass

Info = TypeVar("Info")


class LiveStorages(Generic[Info]):
    """The storages that exist, each with a tracker's notes; `released` receives those of one that is gone.

    A storage is known by the address of its object, which is one for all tensors that share it.
    """

    def __init__(self, released: Callable[[Info], None]) -> None:
        self._released = released
        self._known: dict[int, tuple[Info, weakref.ref[torch.UntypedStorage]]] = {}

    def get(self, storage: torch.UntypedStorage) -> Info | None:
        """None for a storage that was not added."""
        known = self._known.get(id(storage))
        return None if known is None else known[0]

    def add(self, storage: torch.UntypedStorage, info: Info) -> None:
        key = id(storage)
        self._known[key] = (info, weakref.ref(storage, functools.partial(self._gone, key)))

    def clear(self) -> None:
        """Drops all weak references: no release is reported any more."""
        self._known.clear()

    def _gone(self, key: int, _: Any) -> None:
        self._released(self._known.pop(key)[0])


# ---------------------------------------------------------------- CUDA's allocator, replayed

MIB = 1 << 20
GRAIN = 512


class Pool:
    """A segment of CUDA's allocator that grows at its end: start → size of each free block. The planner's."""

    def __init__(self, grows_by: int) -> None:
        self.reserved = 0
        self._grows_by = grows_by
        self._free: dict[int, int] = {}

    def take(self, size: int) -> int:
        last = next((start for start, free in self._free.items() if start + free == self.reserved), None)
        # Best fit. The last block can grow, and is taken only if no other fits.
        fits = [(free, start) for start, free in self._free.items() if free >= size and start != last]
        start = min(fits)[1] if fits else self.reserved if last is None else last
        block = self._free.pop(start, 0)
        if block < size:
            grown = -(-(size - block) // self._grows_by) * self._grows_by
            self.reserved, block = self.reserved + grown, block + grown
        if block > size:
            self._free[start + size] = block - size
        return start

    def free(self, start: int, size: int) -> None:
        """Neighbours that are free become one block."""
        size += self._free.pop(start + size, 0)
        before = next((first for first, free in self._free.items() if first + free == start), start)
        self._free[before] = self._free.pop(before, 0) + size


def packing(events: Iterable[tuple[int, int, int]]) -> float:
    """What is reserved after all events, over the sum of the streams' peaks. An event: storage, bytes
    (negative for a free), stream; a storage that shrinks or grows is allocated anew.

    A replay by c10's rules with expandable segments. Each stream has two pools, for blocks up to 1 MiB and
    for larger ones, and each pool one segment that grows at its end by 2 or 20 MiB: 512-byte grains, best
    fit, blocks split from 512 bytes on, free neighbours joined.
    """
    pools: dict[tuple[int, bool], Pool] = {}
    taken: dict[int, tuple[Pool, int, int]] = {}
    alive, peaks = Counter[int](), Counter[int]()
    for storage, size, stream in events:
        if storage in taken:
            pool, start, before = taken.pop(storage)
            pool.free(start, before)
            alive[stream] -= before
            size += before
        size = -(-size // GRAIN) * GRAIN
        if size > 0:
            pool = pools.setdefault((stream, size <= MIB), Pool(2 * MIB if size <= MIB else 20 * MIB))
            taken[storage] = (pool, pool.take(size), size)
            alive[stream] += size
            peaks[stream] = max(peaks[stream], alive[stream])
    return sum(pool.reserved for pool in pools.values()) / max(1, sum(peaks.values()))


# ---------------------------------------------------------------- a CPU's steps


@dataclass
class _Block:
    """A storage; its kind may be corrected after its release: a reduction's output becomes gradients."""

    kind: str
    size: int = 0


class StorageTracker(TorchDispatchMode):
    """Context manager around the profiled steps on the thread that runs them; `phase` marks each phase.

    A dispatch mode receives the outputs of each operation, a weak reference reports their release, and a
    wrapped `resize_` what FSDP gathers and frees. Allocations inside compiled code are not seen.
    Costs 5–20 µs per operation.
    """

    def __init__(self, root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str = "cpu") -> None:
        super().__init__()
        self._root, self._optimizer, self._device = root, optimizer, device
        self._live: LiveStorages[_Block] = LiveStorages(
            lambda block: self._events.append((block, -block.size))
        )
        self._events: list[tuple[_Block, int] | tuple[str, int]] = []
        """Changes of a block's size, and phases with their steps."""
        self._kind = "other"
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> StorageTracker:
        self._patches.enter_context(after_resizes(lambda storage: self._see(storage, "gathered")))
        self._patches.enter_context(around_collectives(self._communicating))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self._live.clear()

    def phase(self, phase: str, step: int) -> None:
        """Start of a phase. Storages that model and optimizer own now get the kind of their owner."""
        for kind, storage in owned_storages(self._root, self._optimizer).values():
            self._see(storage, kind, rename=True)
        self._events.append((phase, step))
        self._kind = "activations" if phase in ("forward", "backward", "evaluate") else "other"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # it becomes operations on shards, which are dispatched here
        for tensor in tensors_in(args):
            self._see_all(tensor, "other")
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._see_all(tensor, self._kind)
        return out

    def _see_all(self, tensor: Tensor, kind: str, *, rename: bool = False) -> None:
        for storage in storages_of(tensor):
            self._see(storage, kind, rename=rename)

    def _see(self, storage: torch.UntypedStorage, kind: str, *, rename: bool = False) -> None:
        if storage.device.type != self._device:
            return
        size, block = storage.nbytes(), self._live.get(storage)
        if block is None:
            block = _Block(kind)
            self._live.add(storage, block)
        if rename:
            block.kind = kind
        if size != block.size:
            self._events.append((block, size - block.size))
            block.size = size

    def _communicating(self, run: Run, gradients: Sequence[Tensor]) -> Any:
        # The unsharded gradients are named here, since none is left when the phase ends.
        for tensor in gradients:
            self._see_all(tensor, "gradients", rename=True)
        before, self._kind = self._kind, "communication"
        try:
            return run()
        finally:
            self._kind = before

    def moments(self) -> Iterator[tuple[tuple[str, int], int, dict[str, int]]]:
        """Phase and step, bytes, and bytes by kind after each event: one dictionary, which each changes."""
        kinds, total, mark = dict.fromkeys(KINDS, 0), 0, ("start", 0)
        for subject, number in self._events:
            if isinstance(subject, str):
                mark = subject, number
            else:
                kinds[subject.kind] += number
                total += number
            yield mark, total, kinds

    def account(self) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The peak of each phase over all steps, its start included; memory by kind at each phase's end."""
        peaks: dict[str, dict[str, Any]] = {}
        ends: list[dict[str, Any]] = []
        before = ("start", 0)
        for (phase, step), total, kinds in self.moments():
            if (phase, step) != before:
                ends.append({"step": before[1], "phase": before[0], "kinds": dict(kinds)})
                before = phase, step
            if phase not in peaks or total > peaks[phase]["bytes"]:
                peaks[phase] = {"bytes": total, "step": step, "phase": phase, "kinds": dict(kinds)}
        return peaks, ends

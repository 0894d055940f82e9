"""Memory of a rank by kind: from shapes before a run, from the objects that own it, and over a CPU's steps.

`resting_bytes` is arithmetic: the start line, the dry run, the planner and the explanation of an
out-of-memory error read it. `owned_storages` reads what model, FSDP groups and optimizer own now: a run that
is not profiled pays nothing, and one that runs out of memory can still be accounted. Activations have no
owner: StorageTracker sees every storage that operations create and release on a CPU, whose allocator has no
history; on CUDA torch's own snapshot has them. `LiveStorages` is the planner's too (fsdp/plan/trace.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fsdp.base.text import byte_size
from fsdp.base.torch_private import (
    WRAPPERS,
    Run,
    TorchDispatchMode,
    after_resizes,
    around_collectives,
    parameter_groups,
    tensors_by_kind,
)
from fsdp.config import OptimSection
from fsdp.config.sections import MOMENTS
from fsdp.distributed.boxes import local_tensor, tensors_in
from fsdp.optim.optimizer import is_custom

if TYPE_CHECKING:
    from fsdp.base.phases import Phases
    from fsdp.data.types import Samples
    from fsdp.distributed.mesh import BatchPlan
    from fsdp.models.registry import CustomLoss
    from fsdp.shard.shard import Sharded

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "communication", "other")
"""other: module buffers, temporaries of the optimizer, what a save stages."""


@dataclass(kw_only=True)
class OomContext:
    """The model and its step, filled in as they are built: what the page of an out-of-memory error reads."""

    sharded: Sharded
    batch: BatchPlan
    build: Callable[[], nn.Module]
    """Builds the trained model on the meta device."""
    samples: Samples
    loss: CustomLoss | None = None
    optimizer: torch.optim.Optimizer | None = None
    phases: Phases | None = None


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """Measured when the allocation failed, in bytes."""

    title: str
    error: str
    """The message of torch's error."""
    device: str
    phase: str
    kinds: Mapping[str, int]
    held: int
    requested: int
    around: Sequence[tuple[str, str]] = ()
    """The process, the device and the limits: name, size."""


# ---------------------------------------------------------------- from shapes


@dataclass(frozen=True, kw_only=True)
class RestingBytes:
    """What a whole model holds between steps. Shards divide it."""

    parameters: int
    gradients: int
    """As many bytes as the trained parameters."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def resting_bytes(
    section: OptimSection,
    model: nn.Module,
    master: torch.dtype,
    frozen: torch.dtype | None = None,
    *,
    only: Collection[nn.Parameter] | None = None,
) -> RestingBytes:
    """Of a model whose parameters are kept in `master`, and those that are not trained in `frozen`; `only`
    selects some of its parameters.
    """
    parameters = [p for p in model.parameters() if only is None or p in only]
    trained = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trained)
    fixed = sum(p.numel() for p in parameters) - count
    return RestingBytes(
        parameters=count * master.itemsize + fixed * (frozen or master).itemsize,
        gradients=count * master.itemsize,
        optimizer=_state_bytes(section, model, trained, master.itemsize),
    )


def _state_bytes(
    section: OptimSection, model: nn.Module, trained: Sequence[nn.Parameter], itemsize: int
) -> int:
    """Optimizer states of whole parameters, with the moving average of the weights."""
    count = sum(p.numel() for p in trained)
    average = itemsize * count if section.ema else 0
    if section.state != "master":
        from fsdp.optim.small_states import moment_bytes

        return average + sum(moment_bytes(p, section.state) for p in trained)
    # A user's optimizer counts as Adam: what it keeps is unknown before its first step.
    moments = 2 if is_custom(section) else len(MOMENTS[section.name])
    if section.name == "sgd" and not section.momentum:
        moments = 0
    lacking = 0
    if section.name == "muon":  # its matrices have one moment
        from fsdp.optim.muon import hidden_matrices

        matrices = set(hidden_matrices(model, section.muon_parameters))
        lacking = sum(p.numel() for p in trained if p in matrices)
    return average + itemsize * (moments * count - lacking)


# ---------------------------------------------------------------- what model and optimizer own


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory under a tensor: a DTensor's shard, a quantized tensor's parts. Memory-mapped files are
    excluded.
    """
    local = local_tensor(tensor)
    if local is not tensor:
        yield from storages_of(local)
    elif type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or storage.filename is None:
            yield storage


@torch.no_grad()  # without gradients to_local returns the shard itself
def owned_storages(
    root: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[int, tuple[str, torch.UntypedStorage]]:
    """(kind, storage) of everything that model and optimizer own, by the address of the storage object."""
    owned: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for kind, tensor in _owned_tensors(root, optimizer):
        if isinstance(tensor, Tensor):
            for storage in storages_of(tensor):
                owned.setdefault(id(storage), (kind, storage))
    return owned


def _owned_tensors(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    # Groups first: while one is gathered, its modules own the gathered parameters instead of the shards.
    for group in parameter_groups(root):
        yield from tensors_by_kind(group)
    for parameter in root.parameters():
        yield from (("parameters", parameter), ("gradients", parameter.grad))
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (("optimizer", value) for value in state.values())
    yield from (("other", buffer) for buffer in root.buffers())


def tally(root: nn.Module, optimizer: torch.optim.Optimizer | None, device: str) -> dict[str, int]:
    """Bytes by kind on one type of device ("cpu", "cuda"); offloaded shards of a CUDA run are on "cpu"."""
    totals = dict.fromkeys(KINDS, 0)
    for kind, storage in owned_storages(root, optimizer).values():
        if storage.device.type == device:
            totals[kind] += storage.nbytes()
    return totals


def largest_first(kinds: Mapping[str, int]) -> list[tuple[str, str]]:
    """Kind and size in words, without kinds of 0 bytes."""
    present = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    return [(kind, byte_size(size)) for size, kind in present]


def by_size(kinds: Mapping[str, int]) -> str:
    """`activations 1.2 GiB, parameters 300 MiB`."""
    return ", ".join(map(" ".join, largest_first(kinds))) or "nothing"


# ---------------------------------------------------------------- storages as they come and go

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

"""Records every storage, operation and collective of a step, FSDP's own too, in the host's order.

Tracker is a dispatch mode: it sees fake tensors and real ones alike, so a plan and a real run are counted by
the same code. It does for segments of a step what torch's own FSDPMemTracker does for modules, in a tenth of
the time, by rank and with the order of communication. Not here: what the numbers
mean (estimate.py, step_time.py), or the step (fake_step.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from fsdp.base.torch_private.core import FakeTensor, TorchDispatchMode, schema
from fsdp.base.torch_private.fsdp import (
    Run,
    accumulated_gradient,
    after_resizes,
    around_methods,
    copies_of_offloaded,
    gathered_gradient,
    gathers,
    reduces,
    sharded_gradient,
)
from fsdp.base.torch_private.names import COLLECTIVE_OPS, WRITE_ONLY_OPS
from fsdp.dist.shards import local_tensor, tensors_in
from fsdp.memory.account import LiveStorages
from fsdp.parallel import offload
from fsdp.plan.trace import CODE, COLUMN, COLUMNS, KINDS, POOLS, Place, Segment, SegmentName, Trace, Work

KIND = {name: at for at, name in enumerate(KINDS)}


@dataclass(slots=True, eq=False)
class _Held:
    """A storage: its bytes, the number of its kind, the number of its allocation, and its stream's pool."""

    size: int
    kind: int
    serial: int
    pool: int = 0
    sources: tuple[_Held, ...] | None = None
    """What a compiler computes it from again; None: from a product, or from outside."""
    of_product: bool = False
    """An operand or the result of a product or of attention."""
    exists: bool = True


class Tracker(TorchDispatchMode):
    """On "cuda" sizes are rounded to the caching allocator's 512 bytes. On "cpu" gloo's reduce-scatter
    works on a copy of its input: a real run shows it by itself, for a fake one it is added.
    """

    def __init__(self, device: str = "", *, fake: bool = False, host: Collection[str] = ()) -> None:
        """`host`: kinds in the host's memory, which are no event of the device's allocator."""
        super().__init__()
        self.kind, self.stream, self.group = KIND["activations"], 0, 0
        self.groups: Callable[[Any], int] = lambda _: 0
        """Maps an FSDP parameter group to its number; set by the step."""
        self._round = 512 if device == "cuda" else 1
        self.fake = fake
        self._copies = fake and device == "cpu"
        self._host = {KIND[name] for name in host}
        self.copies = KIND["parameters"] in self._host
        """Whether parameters are copied to the device before they are gathered."""
        self.pools: Iterator[int] = itertools.repeat(0)
        """The pool of each new storage: 0, or 1 + the place in POOLS."""
        self._alive = [0] * len(COLUMNS)
        self._live = LiveStorages(self._gone)
        self._serial = 0
        self._segments: list[Segment] = []
        self._name = SegmentName(0, "start", ("before", 0))
        self.events: list[tuple[int, int, int]] = []
        """(storage, bytes, pool) of each allocation on the device, with negative bytes for a free."""
        self._fused: dict[int, tuple[_Held, int]] = {}
        """Serial → the storage, and the bytes that the run of pointwise operations wrote there."""
        self._start_segment()

    # ------------------------------------------------------------ bytes

    def hold(self, tensor: Tensor, kind: str) -> None:
        """Counts a tensor from before the step, or changes the kind of a known one."""
        storage = _storage(tensor)
        if storage is None:
            return
        held, _ = self._see(storage, KIND[kind])
        if held.kind != KIND[kind]:
            leaves = KIND[kind] in self._host and held.kind not in self._host
            if leaves:
                self._in_allocator(held, -held.size)
            self._alive[held.kind] -= held.size
            held.kind = KIND[kind]
            self._alive[held.kind] += held.size

    def _see(self, storage: torch.UntypedStorage, kind: int) -> tuple[_Held, bool]:
        """What is held about a storage, and whether it is new."""
        held = self._live.get(storage)
        if held is not None:
            return held, False
        self._serial += 1
        held = _Held(self._rounded(storage.nbytes()), kind, self._serial, next(self.pools))
        self._live.add(storage, held)
        if held.size:
            self._grow(held, held.size)
        return held, True

    def _grow(self, held: _Held, size: int) -> None:
        self._alive[held.kind] += size
        self._in_allocator(held, size)
        if size > 0:
            self._points.append(tuple(self._alive))

    def _in_allocator(self, held: _Held, size: int) -> None:
        if held.kind in self._host:
            return
        self.events.append((held.serial, size, held.pool))
        if held.pool:
            self._alive[COLUMN[POOLS[held.pool - 1]]] += size

    def _gone(self, held: _Held) -> None:
        held.exists = False
        if held.size:
            self._alive[held.kind] -= held.size
            self._in_allocator(held, -held.size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._round) * self._round

    def resized(self, storage: torch.UntypedStorage) -> None:
        held, _ = self._see(storage, self.kind)
        size = self._rounded(storage.nbytes())
        if size != held.size:
            if not held.size:
                self._serial += 1
                held.kind, held.serial = self.kind, self._serial  # a gathered parameter is allocated again
            change, held.size = size - held.size, size
            self._grow(held, change)

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local operation is dispatched by itself
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim" or func.namespace == "profiler":
            return out
        outputs = list(tensors_in(out))
        new = 0
        for tensor in outputs:
            storage = _storage(tensor)
            if storage is not None and self._see(storage, self.kind)[1]:
                new += tensor.nbytes
        self._count(func, args, kwargs, out, outputs, new)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor], new: int) -> None:
        if func.namespace == "c10d":
            self._collective(func, args)
            return
        if schema(func).name.startswith("aten::empty") or (not new and not schema(func).is_mutable):
            return  # a view, or uninitialised memory
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        widest = max((t.element_size() for t in inputs or outputs), default=4)
        moved = sum(_extent(t) for t in inputs) + (new or _written(func, args))
        packet = func.overloadpacket
        if "scaled_dot_product" in schema(func).name or packet in flop_registry:
            for held in map(self._held, (*inputs, *outputs)):
                if held is not None:
                    held.of_product = True
        attention = "scaled_dot_product" in schema(func).name or "flash_attention" in schema(func).name
        if attention:
            heads = next(tensor.shape[-1] for tensor in inputs if tensor.dim() == 4)
            self._row("attention", _attention_flops(func, args, kwargs), moved, 0, heads)
        elif packet in flop_registry:
            self._row(
                "matmul",
                flop_registry[packet](*args, **kwargs, out_val=out),
                moved,
                0,
                inputs[0].element_size(),
            )
        else:
            self._row("pointwise", 0, moved, self._fusible(inputs, outputs, new), widest)

    def _fusible(self, inputs: list[Tensor], outputs: list[Tensor], new: int) -> int:
        """Bytes that a fused kernel still reads of this operation: inputs that the run of pointwise
        operations did not itself make.
        """
        moved, sources = 0, list[_Held]()
        for tensor in inputs:
            storage = _storage(tensor)
            held = None if storage is None else self._see(storage, self.kind)[0]
            if held is not None:
                sources.append(held)
                if held.serial not in self._fused:
                    self._fused[held.serial] = (held, 0)
                    moved += _extent(tensor)
        for tensor in outputs if new else ():
            if (storage := _storage(tensor)) is not None:
                held, _ = self._see(storage, self.kind)
                held.sources = tuple(sources)
                self._fused[held.serial] = (held, tensor.nbytes)
        return moved

    @contextlib.contextmanager
    def compiled(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Context of a compiled block. For backward it keeps its inputs, operands and results of products,
        and what no fused kernel computes again from those, as torch's partitioner does by default.
        """
        saved = list[list[Any]]()

        def pack(tensor: Tensor) -> list[Any]:
            saved.append([tensor])
            return saved[-1]

        def unpack(kept: list[Any]) -> Tensor:
            return kept[0] if isinstance(kept[0], Tensor) else torch.empty(kept[0], dtype=kept[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        available = {KIND[name] for name in ("parameters", "gathered", "buffers")}
        known = {held: True for x in inputs if (held := self._held(x)) is not None}

        def computed_again(held: _Held) -> bool:
            if held not in known:
                known[held] = held.kind in available or (
                    held.sources is not None and all(map(computed_again, held.sources))
                )
            return known[held]

        holders = [(kept, held) for kept in saved if (held := self._held(kept[0])) is not None]
        known |= {held: True for _, held in holders if held.of_product}
        for kept, held in holders:
            if known.get(held) and (held.of_product or held.sources is None):
                continue
            if held.sources is not None and computed_again(held):
                kept[:] = kept[0].shape, kept[0].dtype, inputs
            known[held] = True

    def _held(self, tensor: Tensor) -> _Held | None:
        storage = _storage(tensor)
        return None if storage is None else self._see(storage, self.kind)[0]

    def _end_fusion(self) -> int:
        """Bytes written to memory: storages still alive when the run of pointwise operations ends."""
        kept = ((serial, held, size) for serial, (held, size) in self._fused.items())
        written = sum(size for serial, held, size in kept if held.exists and held.serial == serial)
        self._fused = {}
        return written

    def _collective(self, func: Any, args: Any) -> None:
        name = COLLECTIVE_OPS.get(schema(func).name.partition("::")[2])
        if name is None:
            return
        tensors = list(tensors_in(args))
        size = max((_extent(t) for t in tensors), default=0)
        if name == "reduce_scatter" and self._copies:
            self._alive[self.kind] += size
            self._points.append(tuple(self._alive))
            self._alive[self.kind] -= size
        self._row(name, 0, size, 0, tensors[0].element_size() if tensors else 4, stream=1)

    def _row(
        self, name: str, flops: float, moved: float, fused: float, width: int, stream: int | None = None
    ) -> None:
        if name != "pointwise" and self._fused:
            written = self._end_fusion()
            if self._rows and self._rows[-1][0] == CODE["pointwise"]:
                self._rows[-1][5] += written
        at = self.stream if stream is None else stream
        self._rows.append([CODE[name], at, self.group, float(flops), float(moved), float(fused), width])

    def wait(self, name: str, group: int = 0) -> None:
        self._row(name, 0, 0, 0, 0)
        self._rows[-1][2] = group

    # ------------------------------------------------------------ segments

    def _start_segment(self) -> None:
        self._points: list[tuple[int, ...]] = []
        self._rows: list[list[float]] = []
        self._fused = {}

    def mark(self, micro: int, phase: str, place: Place = ("before", 0)) -> None:
        """Starts the segment of all that follows."""
        if self._fused and self._rows:
            self._rows[-1][5] += self._end_fusion()
        self._points.append(tuple(self._alive))
        if self._name.phase != "start":
            self._segments.append(
                Segment(self._name, np.array(self._points, dtype=np.int64), _work(self._rows))
            )
        self._name = SegmentName(micro, phase, place)
        self._start_segment()
        self._points.append(tuple(self._alive))

    def trace(self, blocks: int) -> Trace:
        self.mark(0, "start")
        return Trace(tuple(self._segments), blocks)


def _work(rows: list[list[float]]) -> Work:
    table = np.array(rows, dtype=float).reshape(len(rows), 7)
    whole = table[:, :3].astype(int)
    return Work(
        whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3], table[:, 4], table[:, 5], table[:, 6].astype(int)
    )


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    tensor = local_tensor(tensor)
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _extent(tensor: Tensor) -> int:
    """Bytes that are read or written: an expanded tensor is no larger than its storage."""
    storage = _storage(tensor)
    whole = tensor.nbytes
    return whole if storage is None else min(whole, max(storage.nbytes(), tensor.element_size()))


def _written(func: Any, args: Any) -> int:
    """Bytes that an operation writes where it has read; a tensor that is only written counts once, as an
    input.
    """
    name, overload = schema(func).name.partition("::")[2], schema(func).overload_name
    if not schema(func).is_mutable or name in WRITE_ONLY_OPS or overload.endswith("out"):
        return 0
    places = zip(schema(func).arguments, args, strict=False)
    # A fused update writes gradients only where it unscales them, which is done before it here.
    written = [
        value
        for place, value in places
        if place.alias_info and place.alias_info.is_write and place.name != "grads"
    ]
    return sum(_extent(t) for t in tensors_in(written))


def _attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Two products forward, five backward (scores are recomputed); a causal mask halves each."""
    backward = "backward" in schema(func).name
    tensors = [t for t in tensors_in(args) if t.dim() == 4]
    query, key = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
    scores = float(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]) * 2
    named = {a.name: v for a, v in zip(schema(func).arguments, args, strict=False)} | kwargs
    return scores * (5 if backward else 2) * (0.5 if named.get("is_causal") else 1.0)


@contextlib.contextmanager
def counted_as(
    tracker: Tracker, kind: str, stream: int, group: int, pools: Iterator[int] | None = None
) -> Iterator[None]:
    """Context in which new storages are of this kind, on this stream, for this group, in these pools."""
    was = tracker.kind, tracker.stream, tracker.group, tracker.pools
    tracker.kind, tracker.stream, tracker.group = KIND[kind], stream, group
    tracker.pools = pools or tracker.pools
    try:
        yield
    finally:
        tracker.kind, tracker.stream, tracker.group, tracker.pools = was


@contextlib.contextmanager
def kind(tracker: Tracker, name: str) -> Iterator[None]:
    with counted_as(tracker, name, tracker.stream, tracker.group):
        yield


# ---------------------------------------------------------------- FSDP's own events


@contextlib.contextmanager
def trace_fsdp_events(tracker: Tracker) -> Iterator[None]:
    """Context in which FSDP's methods, patched, mark gathers, waits, reductions and the owners of gradients,
    and the offload of activations its copies.
    """

    def unshard(group: Any, run: Run) -> Any:
        with counted_as(tracker, "communication", 1, tracker.groups(group), itertools.repeat(1)):
            return run()

    def wait_for_unshard(group: Any, run: Run) -> Any:
        if not gathers(group):
            return run()
        tracker.wait("wait_gather", tracker.groups(group))
        with counted_as(tracker, "gathered", 0, tracker.groups(group)):
            return run()

    def hold(tensor: Tensor | None, kind: str) -> None:
        if tensor is not None:
            tracker.hold(tensor, kind)

    def post_backward(group: Any, run: Run) -> Any:
        for parameter in group.fsdp_params:
            hold(gathered_gradient(parameter), "whole_gradients")
        if reduces(group):
            tracker.wait("wait_reduce")
        # the reduction's input is made on the stream of computation, its output on the reductions' own
        pools = itertools.chain((0,), itertools.repeat(2))
        with counted_as(tracker, "communication", 0, tracker.groups(group), pools):
            result = run()
        for parameter in group.fsdp_params:
            hold(accumulated_gradient(parameter), "whole_gradients")
            hold(sharded_gradient(parameter), "gradients")
        return result

    def finalize_backward(group: Any, run: Run) -> Any:
        tracker.wait("wait_all")
        return run()

    methods = [unshard, wait_for_unshard, post_backward, finalize_backward]
    copies: Any = offload._Kept
    leave, plain = vars(copies)["leave"], vars(offload)["Tensor"]

    def leaving(cls: Any, *args: Any) -> Any:
        made = leave.__func__(cls, *args)
        hold(None if made is None else made.host, "offloaded")
        return made

    around = around_methods([(method.__name__, method) for method in methods])
    with around, after_resizes(tracker.resized), copies_of_offloaded(tracker.copies):
        copies.leave = classmethod(leaving)
        if tracker.fake:
            offload.Tensor = FakeTensor  # type: ignore[misc, assignment]  # it asks for the very type
        try:
            with tracker:
                yield
        finally:
            copies.leave, offload.Tensor = leave, plain  # type: ignore[misc]

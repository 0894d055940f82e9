"""A step as numbers: a dispatch mode that records every storage, operation and collective, FSDP's own too.

It sees fake tensors and real ones alike: a plan and a real run are counted by the same code. It does for the
parts of a step what torch's own FSDPMemTracker does for modules, in a tenth of the time, by rank and with the
order of communication. Not here: what the numbers mean (estimate.py, step_time.py), or the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from fsdp.base.torch_private import (
    COLLECTIVE_OPS,
    WRITE_ONLY_OPS,
    FakeTensor,
    TorchDispatchMode,
    accumulated_gradient,
    after_resizes,
    around_methods,
    copies_of_offloaded,
    gathered_gradient,
    gathers,
    reduces,
    schema,
    sharded_gradient,
)
from fsdp.dist.collectives import local_tensor, tensors_in
from fsdp.memory.account import LiveStorages
from fsdp.parallel import offload
from fsdp.plan.cuda import packing

KINDS = (
    "parameters", "gathered", "gradients", "whole_gradients", "optimizer", "activations", "offloaded",
    "buffers", "communication",
)  # fmt: skip
"""gathered and whole_gradients are unsharded; offloaded: activations that --memory.activation_offload keeps
on the host; communication: what collectives read and write; activations: all else.
"""
HOST_KINDS = ("parameters", "gradients", "optimizer")
"""Kinds on the host with --memory.cpu_offload."""
POOLS = ("gather pool", "reduce pool")
"""Of the tensors on a CUDA device, those that FSDP allocates on its streams, in pools of their own."""
COLUMNS = (*KINDS, *POOLS)
COLUMN = {name: index for index, name in enumerate(COLUMNS)}

OPS = (
    "pointwise", "matmul", "attention", "all_gather", "reduce_scatter", "all_reduce", "wait_gather",
    "wait_reduce", "wait_all",
)  # fmt: skip
CODE = {name: index for index, name in enumerate(OPS)}
WORK = np.dtype(
    [("part", int), ("code", int), ("stream", int), ("group", int), ("flops", float), ("bytes", float),
     ("fused_bytes", float), ("width", int)]
)  # fmt: skip
"""Rows in the order that the host issued them; stream is 0 for compute, 1 for communication. Bytes of a
collective are those of the gathered whole; group tells units apart, width is the operands' bytes an element,
of attention the width of a head.
"""


class Stretch(NamedTuple):
    """A stretch of the step between two marks. Blocks count from 1; 0 is before them, AFTER what follows."""

    micro: int
    phase: str
    block: int


AFTER = -1


@dataclass(frozen=True)
class Trace:
    parts: tuple[Stretch, ...]
    curve: np.ndarray
    """Bytes alive by column, [points, columns]: at each allocation, and where a part begins and ends."""
    part_of: np.ndarray
    """The part of each point."""
    work: np.ndarray
    blocks: int
    packing: float
    """What CUDA's allocator reserves, over the sum of its pools' peaks: by a replay of the step."""

    def peaks(self) -> np.ndarray:
        """Peak bytes of tensors of each part."""
        starts = np.flatnonzero(np.diff(self.part_of, prepend=-1))
        return np.maximum.reduceat(self.curve[:, : len(KINDS)].sum(1), starts)


@dataclass(slots=True, eq=False)
class _Memory:
    """A storage: its bytes, the column of its kind, the number of its allocation, its stream's pool."""

    size: int
    kind: int
    serial: int
    pool: int
    sources: tuple[_Memory, ...] | None = None
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
        self.kind, self.stream, self.group = COLUMN["activations"], 0, 0
        self.groups: Callable[[Any], int] = lambda _: 0
        """Maps an FSDP parameter group to its number; set by the step."""
        self.pools: Iterator[int] = itertools.repeat(0)
        """The pool of each new storage: 0, or 1 + its index in POOLS."""
        self.fake = fake
        self.copies = "parameters" in host
        """Whether parameters are copied to the device before they are gathered."""
        self._grain = 512 if device == "cuda" else 1
        self._gloo_copies = fake and device == "cpu"
        self._host = {COLUMN[name] for name in host}
        self._alive = [0] * len(COLUMNS)
        self._live = LiveStorages(self._gone)
        self._serial = 0
        self._events: list[tuple[int, int, int]] = []
        """(storage, bytes, pool) of each allocation on the device, with negative bytes for a free."""
        self.restart()

    def restart(self) -> None:
        """Forgets the parts that were recorded, and records again from the next mark on."""
        self._parts: list[Stretch] = []
        self._points: list[tuple[int, ...]] = []
        self._rows: list[list[Any]] = []
        self._run: dict[int, tuple[_Memory, int]] = {}
        """Serial → the storage, and the bytes that the present run of pointwise operations wrote there."""

    def mark(self, micro: int, phase: str, block: int = 0) -> None:
        """Starts the part of all that follows."""
        self._end_run()
        self._point()
        self._parts.append(Stretch(micro, phase, block))
        self._point()

    def trace(self, blocks: int) -> Trace:
        self._end_run()
        self._point()
        points = np.array(self._points, dtype=np.int64)
        rows = np.array([tuple(row) for row in self._rows], dtype=WORK)
        return Trace(tuple(self._parts), points[:, 1:], points[:, 0], rows, blocks, packing(self._events))

    def _point(self) -> None:
        if self._parts:
            self._points.append((len(self._parts) - 1, *self._alive))

    # ------------------------------------------------------------ bytes

    def hold(self, tensor: Tensor, kind: str) -> None:
        """Counts a tensor from before the step, or changes the kind of a known one."""
        memory, column = self._see(tensor, COLUMN[kind]), COLUMN[kind]
        if memory is not None and memory.kind != column:
            if column in self._host and memory.kind not in self._host:
                self._in_allocator(memory, -memory.size)
            self._alive[memory.kind] -= memory.size
            self._alive[column] += memory.size
            memory.kind = column

    def _see(self, tensor: Tensor, kind: int | None = None) -> _Memory | None:
        tensor = local_tensor(tensor)
        return self._storage(tensor.untyped_storage(), kind) if tensor.layout is torch.strided else None

    def _storage(self, storage: torch.UntypedStorage, kind: int | None = None) -> _Memory:
        memory = self._live.get(storage)
        if memory is None:
            self._serial += 1
            memory = _Memory(0, self.kind if kind is None else kind, self._serial, next(self.pools))
            self._live.add(storage, memory)
            self._resize(memory, storage)
        return memory

    def _resize(self, memory: _Memory, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // self._grain) * self._grain
        change, memory.size = size - memory.size, size
        if change:
            self._alive[memory.kind] += change
            self._in_allocator(memory, change)
        if change > 0:
            self._point()

    def resized(self, storage: torch.UntypedStorage) -> None:
        memory = self._storage(storage)
        if not memory.size and storage.nbytes():  # a gathered parameter is allocated again
            self._serial += 1
            memory.kind, memory.serial = self.kind, self._serial
        self._resize(memory, storage)

    def _in_allocator(self, memory: _Memory, change: int) -> None:
        if memory.kind not in self._host:
            self._events.append((memory.serial, change, memory.pool))
            if memory.pool:
                self._alive[COLUMN[POOLS[memory.pool - 1]]] += change

    def _gone(self, memory: _Memory) -> None:
        memory.exists = False
        if memory.size:
            self._alive[memory.kind] -= memory.size
            self._in_allocator(memory, -memory.size)

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls: a fake tensor answers it in Python
            return args[0].fake_device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local operation is dispatched by itself
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("prim", "profiler"):
            return out
        outputs, new, known = list(tensors_in(out)), 0, self._serial
        for tensor in outputs:
            memory = self._see(tensor)
            if memory is not None and memory.serial > known:
                new, known = new + tensor.nbytes, memory.serial
        if func.namespace == "c10d":
            self._collective(func, args)
        elif not schema(func).name.startswith("aten::empty") and (new or schema(func).is_mutable):
            self._count(func, args, kwargs, out, outputs, new)  # no view, no uninitialised memory
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor], new: int) -> None:
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        moved = sum(map(_extent, inputs)) + (new or _written(func, args))
        attends = any(name in schema(func).name for name in ("scaled_dot_product", "flash_attention"))
        if attends or func.overloadpacket in flop_registry:
            for memory in map(self._see, (*inputs, *outputs)):
                if memory is not None:
                    memory.of_product = True
        if attends:
            heads = next(tensor.shape[-1] for tensor in inputs if tensor.dim() == 4)
            self._row("attention", heads, _attention_flops(func, args, kwargs), moved)
        elif func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            self._row("matmul", inputs[0].element_size(), flops, moved)
        else:
            widest = max((t.element_size() for t in inputs or outputs), default=4)
            self._row("pointwise", widest, 0, moved, self._fused_bytes(inputs, outputs if new else ()))

    def _fused_bytes(self, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> int:
        """Bytes that a fused kernel still reads of this operation: inputs that the run of pointwise
        operations did not itself make.
        """
        moved, sources = 0, list[_Memory]()
        for tensor in inputs:
            memory = self._see(tensor)
            if memory is not None:
                sources.append(memory)
                if memory.serial not in self._run:
                    self._run[memory.serial] = (memory, 0)
                    moved += _extent(tensor)
        for tensor in made:
            memory = self._see(tensor)
            if memory is not None:
                memory.sources = tuple(sources)
                self._run[memory.serial] = (memory, tensor.nbytes)
        return moved

    def _end_run(self) -> None:
        """Counts what it wrote to memory: storages still alive when the run of pointwise operations ends."""
        if self._rows and self._rows[-1][1] == CODE["pointwise"]:
            self._rows[-1][6] += sum(
                size
                for serial, (memory, size) in self._run.items()
                if memory.exists and memory.serial == serial
            )
        self._run = {}

    def _collective(self, func: Any, args: Any) -> None:
        name = COLLECTIVE_OPS.get(schema(func).name.partition("::")[2])
        if name is None:
            return
        tensors = list(tensors_in(args))
        size = max(map(_extent, tensors), default=0)
        if name == "reduce_scatter" and self._gloo_copies:
            self._alive[self.kind] += size
            self._point()
            self._alive[self.kind] -= size
        self._row(name, tensors[0].element_size() if tensors else 4, 0, size, stream=1)

    def _row(
        self, name: str, width: int, flops: float, moved: float, fused: float = 0, stream: int | None = None
    ) -> None:
        if name != "pointwise":
            self._end_run()
        if self._parts:
            stream = self.stream if stream is None else stream
            self._rows.append(
                [len(self._parts) - 1, CODE[name], stream, self.group, flops, moved, fused, width]
            )

    # ------------------------------------------------------------ compiled blocks

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
        available = {COLUMN[name] for name in ("parameters", "gathered", "buffers")}
        known = {memory: True for x in inputs if (memory := self._see(x)) is not None}

        def computed_again(memory: _Memory) -> bool:
            if memory not in known:
                known[memory] = memory.kind in available or (
                    memory.sources is not None and all(map(computed_again, memory.sources))
                )
            return known[memory]

        holders = [(kept, memory) for kept in saved if (memory := self._see(kept[0])) is not None]
        known |= {memory: True for _, memory in holders if memory.of_product}
        for kept, memory in holders:
            if known.get(memory) and (memory.of_product or memory.sources is None):
                continue
            if memory.sources is not None and computed_again(memory):
                kept[:] = kept[0].shape, kept[0].dtype, inputs
            known[memory] = True

    # ------------------------------------------------------------ FSDP's own events

    @contextlib.contextmanager
    def counted_as(
        self,
        kind: str,
        stream: int | None = None,
        group: int | None = None,
        pools: Iterator[int] | None = None,
    ) -> Iterator[None]:
        """Context in which new storages are of this kind, and work on this stream, for this group."""
        before = self.kind, self.stream, self.group, self.pools
        self.kind, self.pools = COLUMN[kind], pools or self.pools
        self.stream = self.stream if stream is None else stream
        self.group = self.group if group is None else group
        try:
            yield
        finally:
            self.kind, self.stream, self.group, self.pools = before

    def _wait(self, name: str, group: int = 0) -> None:
        with self.counted_as("communication", 0, group):
            self._row(name, 0, 0, 0)

    def _unshard(self, group: Any, run: Any) -> Any:
        with self.counted_as("communication", 1, self.groups(group), itertools.repeat(1)):
            return run()

    def _wait_for_unshard(self, group: Any, run: Any) -> Any:
        if not gathers(group):
            return run()
        self._wait("wait_gather", self.groups(group))
        with self.counted_as("gathered", 0, self.groups(group)):
            return run()

    def _post_backward(self, group: Any, run: Any) -> Any:
        self._hold_all(map(gathered_gradient, group.fsdp_params), "whole_gradients")
        if reduces(group):
            self._wait("wait_reduce")
        # the reduction's input is made on the stream of computation, its output on the reductions' own
        pools = itertools.chain((0,), itertools.repeat(2))
        with self.counted_as("communication", 0, self.groups(group), pools):
            result = run()
        self._hold_all(map(accumulated_gradient, group.fsdp_params), "whole_gradients")
        self._hold_all(map(sharded_gradient, group.fsdp_params), "gradients")
        return result

    def _finalize_backward(self, group: Any, run: Any) -> Any:
        self._wait("wait_all")
        return run()

    def _hold_all(self, tensors: Iterator[Tensor | None], kind: str) -> None:
        for tensor in filter(torch.is_tensor, tensors):
            self.hold(tensor, kind)

    @contextlib.contextmanager
    def of_fsdp(self) -> Iterator[None]:
        """Context of a step: FSDP's methods, patched, mark gathers, waits, reductions and the owners of
        gradients, and the offload of activations its copies.
        """
        methods = [self._unshard, self._wait_for_unshard, self._post_backward, self._finalize_backward]
        copies: Any = offload._Kept
        made, plain = copies.__init__, vars(offload)["Tensor"]

        def marked(copy: Any, *args: Any) -> None:
            made(copy, *args)
            self._hold_all(iter([copy.host]), "offloaded")

        around = around_methods({method.__name__.removeprefix("_"): method for method in methods})
        with around, after_resizes(self.resized), copies_of_offloaded(self.copies):
            copies.__init__ = marked
            if self.fake:
                offload.Tensor = FakeTensor  # type: ignore[misc, assignment]  # it asks for the very type
            try:
                with self:
                    yield
            finally:
                copies.__init__, offload.Tensor = made, plain  # type: ignore[misc]


def _extent(tensor: Tensor) -> int:
    """Bytes that are read or written: an expanded tensor is no larger than its storage."""
    tensor = local_tensor(tensor)
    if tensor.layout is not torch.strided:
        return tensor.nbytes
    return min(tensor.nbytes, max(tensor.untyped_storage().nbytes(), tensor.element_size()))


def _written(func: Any, args: Any) -> int:
    """Bytes that an operation writes where it has read; a tensor that is only written counts once, as an
    input.
    """
    name, overload = schema(func).name.partition("::")[2], schema(func).overload_name
    if not schema(func).is_mutable or name in WRITE_ONLY_OPS or overload.endswith("out"):
        return 0
    # A fused update writes gradients only where it unscales them, which is done before it here.
    written = [
        value
        for argument, value in zip(schema(func).arguments, args, strict=False)
        if argument.alias_info and argument.alias_info.is_write and argument.name != "grads"
    ]
    return sum(map(_extent, tensors_in(written)))


def _attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Two products forward, five backward (scores are recomputed); a causal mask halves each."""
    backward = "backward" in schema(func).name
    tensors = [t for t in tensors_in(args) if t.dim() == 4]
    query, key = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
    scores = float(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]) * 2
    named = {a.name: v for a, v in zip(schema(func).arguments, args, strict=False)} | kwargs
    return scores * (5 if backward else 2) * (0.5 if named.get("is_causal") else 1.0)

"""A step as numbers: a dispatch mode that records every storage, operation and collective, FSDP's own too.

It sees fake tensors and real ones alike: a plan and a real run are counted by the same code. It does for the
parts of a step what torch's own FSDPMemTracker does for modules, in a tenth of the time, by rank and with the
order of communication. Not here: what the numbers mean (estimate.py, step_time.py), or the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsdp.base.torch_private import (
    COLLECTIVE_OPS,
    WRAPPERS,
    WRITE_ONLY_OPS,
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
from fsdp.distributed.boxes import local_tensor, tensors_in
from fsdp.memory.storages import GRAIN, LiveStorages, packing

KINDS = ("parameters", "gathered", "gradients", "whole_gradients", "optimizer", "activations", "buffers",
         "communication")  # fmt: skip
"""gathered and whole_gradients are unsharded; communication: what collectives read and write; activations:
all else.
"""
HOST_KINDS = ("parameters", "gradients", "optimizer")
"""Kinds on the host with --memory.cpu_offload."""
POOLS = ("gather pool", "reduce pool")
"""Of the tensors on a CUDA device, those that FSDP allocates on its streams, in pools of their own."""
MAIN_POOL = itertools.repeat(0)
ATTENTION = ("scaled_dot_product", "flash_attention", "varlen_attn")
COLUMNS = (*KINDS, *POOLS)
COLUMN = {name: index for index, name in enumerate(COLUMNS)}

OPS = ("pointwise", "matmul", "attention", "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
       "wait_gather", "wait_reduce", "wait_all")  # fmt: skip
COLLECTIVES = OPS[3:7]
AXES = ("", "expert_shard", "tensor", "context", "expert")
"""Of a collective, beside the two that shard and replicate the weights, which its phase tells apart."""
CODE = {name: index for index, name in enumerate(OPS)}
WORK = np.dtype(
    [("part", int), ("code", int), ("stream", int), ("group", int), ("flops", float), ("bytes", float),
     ("fused_bytes", float), ("width", int), ("axis", int)]
)  # fmt: skip
"""Rows in the order that the host issued them; stream is 0 for compute, 1 for communication. Bytes of a
collective are those of the gathered whole; group tells units apart, width is the operands' bytes an element,
of attention the width of a head; axis is an index of AXES.
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
    cast: tuple[Any, ...] = ()
    """Of a copy in another dtype: its source, the part of it, and the dtype."""
    exists: bool = True


class Tracker(TorchDispatchMode):
    """On "cuda" sizes are rounded to the caching allocator's 512 bytes. On "cpu" gloo's reduce-scatter
    works on a copy of its input, which fake tensors do not show. "" is a real run.
    """

    def __init__(self, device: str = "", *, offloads: bool = False) -> None:
        """`offloads`: HOST_KINDS are in the host's memory, which the device's allocator does not have."""
        super().__init__()
        self.kind, self.stream, self.group = COLUMN["activations"], 0, 0
        self.groups: Callable[[Any], int] = lambda _: 0
        """Maps an FSDP parameter group to its number; set by the step."""
        self.axes: Mapping[str, int] = {}
        """Name of a process group → index of AXES; set by the step."""
        self.pools: Iterator[int] = MAIN_POOL
        """The pool of each new storage: 0, or 1 + its index in POOLS."""
        self._offloads = offloads
        self._grain = GRAIN if device == "cuda" else 1
        self._gloo_copies = device == "cpu"
        self._host = {COLUMN[name] for name in HOST_KINDS if offloads}
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

    def hold(self, tensor: Tensor | None, kind: str) -> None:
        """Counts a tensor from before the step, or changes the kind of a known one."""
        if tensor is None:
            return
        memory, column = self._see(tensor, COLUMN[kind]), COLUMN[kind]
        if memory.kind != column:
            if column in self._host and memory.kind not in self._host:
                self._in_allocator(memory, -memory.size)
            self._alive[memory.kind] -= memory.size
            self._alive[column] += memory.size
            memory.kind = column

    def _see(self, tensor: Tensor, kind: int | None = None) -> _Memory:
        return self._storage(local_tensor(tensor).untyped_storage(), kind)

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
        if any(issubclass(t, WRAPPERS) for t in types):
            return NotImplemented  # its local operation is dispatched by itself
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (
            func.namespace == "_c10d_functional" and "wait" in schema(func).name
        ):  # a fake tensor's result is another one
            return args[0]
        outputs, new, known = list(tensors_in(out)), 0, self._serial
        for tensor in outputs:
            memory = self._see(tensor)
            if memory.serial > known:
                new, known = new + tensor.nbytes, memory.serial
        if "c10d" in func.namespace:  # functional ones too, as DTensor's
            self._collective(func, args, outputs)
        elif not schema(func).name.startswith("aten::empty") and (new or schema(func).is_mutable):
            self._count(func, args, kwargs, out, outputs, new)  # no view, no uninitialised memory
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor], new: int) -> None:
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        moved = sum(map(_extent, inputs)) + (new or _written(func, args))
        attends = any(name in schema(func).name for name in ATTENTION)
        if attends or func.overloadpacket in flop_registry:
            for memory in map(self._see, (*inputs, *outputs)):
                memory.of_product = True
        if attends:
            heads = next(tensor.shape[-1] for tensor in inputs if tensor.dim() >= 3)
            self._row("attention", heads, _attention_flops(func, args, kwargs), moved)
        elif func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            self._row("matmul", inputs[0].element_size(), flops, moved)
        else:
            widest = max((t.element_size() for t in inputs or outputs), default=4)
            self._row("pointwise", widest, 0, moved, self._fused_bytes(inputs, outputs if new else ()))
            if new and schema(func).name == "aten::_to_copy":
                part = inputs[0].storage_offset(), outputs[0].shape, outputs[0].dtype
                self._see(outputs[0]).cast = (self._see(inputs[0]), *part)

    def _fused_bytes(self, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> int:
        """Bytes that a fused kernel still reads of this operation: inputs that the run of pointwise
        operations did not itself make.
        """
        moved, sources = 0, tuple(map(self._see, inputs))
        for tensor, memory in zip(inputs, sources, strict=True):
            if memory.serial not in self._run:
                self._run[memory.serial] = (memory, 0)
                moved += _extent(tensor)
        for tensor in made:
            memory = self._see(tensor)
            memory.sources = sources
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

    def _collective(self, func: Any, args: Any, outputs: list[Tensor]) -> None:
        operator, tensors = schema(func).name.partition("::")[2], [*tensors_in(args), *outputs]
        functional = (name for name in COLLECTIVES if operator.startswith(name))
        name = COLLECTIVE_OPS.get(operator) or next(functional, None)
        if name is None or not tensors:
            return
        size = max(map(_extent, tensors))
        if name == "reduce_scatter" and self._gloo_copies:
            self._alive[self.kind] += size
            self._point()
            self._alive[self.kind] -= size
        self._row(name, tensors[0].element_size(), 0, size, axis=self._axis(func, args))

    def _axis(self, func: Any, args: Any) -> int:
        if not self.axes:
            return 0
        named = {a.name: value for a, value in zip(schema(func).arguments, args, strict=False)}
        group = named.get("group_name") or dist.ProcessGroup.unbox(named["process_group"]).group_name
        axis = self.axes.get(group, 0)
        # the default group may be an axis's too: FSDP's own collectives are over its own
        return axis if axis < 2 or self.kind != COLUMN["communication"] else 0

    def _row(
        self, name: str, width: int, flops: float, moved: float, fused: float = 0, *, axis: int = 0
    ) -> None:
        if name != "pointwise":
            self._end_run()
        if self._parts:
            stream, part = 1 if name in COLLECTIVES else self.stream, len(self._parts) - 1
            self._rows.append([part, CODE[name], stream, self.group, flops, moved, fused, width, axis])

    # ------------------------------------------------------------ compiled blocks

    @contextlib.contextmanager
    def compiled(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Context of a compiled block. For backward it keeps its inputs, operands and results of products,
        and what no fused kernel computes again from those, as torch's partitioner does by default. Of equal
        casts, as autocast makes one for each product, it keeps one.
        """
        saved = list[list[Any]]()

        def pack(tensor: Tensor) -> list[Any]:
            saved.append([tensor])
            return saved[-1]

        def unpack(holder: list[Any]) -> Tensor:
            return holder[0] if isinstance(holder[0], Tensor) else torch.empty(holder[0], dtype=holder[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        available = {COLUMN[name] for name in ("parameters", "gathered", "buffers")}
        known = {self._see(tensor): True for tensor in inputs}

        def computed_again(memory: _Memory) -> bool:
            if memory not in known:
                known[memory] = memory.kind in available or (
                    memory.sources is not None and all(map(computed_again, memory.sources))
                )
            return known[memory]

        casts = dict[Any, Tensor]()
        for holder in saved:
            if cast := self._see(holder[0]).cast:
                holder[0] = casts.setdefault((*cast, holder[0].shape), holder[0])
        holders = [(holder, self._see(holder[0])) for holder in saved]
        known |= {memory: True for _, memory in holders if memory.of_product}
        for holder, memory in holders:
            if known.get(memory) and (memory.of_product or memory.sources is None):
                continue
            if memory.sources is not None:
                lacking = [source for source in memory.sources if not computed_again(source)]
                if (size := sum(source.size for source in lacking)) < memory.size:
                    kept = torch.empty(size, dtype=torch.uint8)  # the smaller results, in its place
                    holder[:] = holder[0].shape, holder[0].dtype, inputs, kept
                    known |= dict.fromkeys(lacking, True)
            known[memory] = True

    # ------------------------------------------------------------ FSDP's own events

    @contextlib.contextmanager
    def counted_as(
        self, kind: str, stream: int = 0, group: int = 0, pools: Iterator[int] = MAIN_POOL
    ) -> Iterator[None]:
        """Context in which new storages are of this kind, and work on this stream, for this group."""
        before = self.kind, self.stream, self.group, self.pools
        self.kind, self.stream, self.group, self.pools = COLUMN[kind], stream, group, pools
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
        for parameter in group.fsdp_params:
            self.hold(gathered_gradient(parameter), "whole_gradients")
        if reduces(group):
            self._wait("wait_reduce")
        # the reduction's input is made on the stream of computation, its output on the reductions' own
        pools = itertools.chain((0,), itertools.repeat(2))
        with self.counted_as("communication", 0, self.groups(group), pools):
            result = run()
        for parameter in group.fsdp_params:
            self.hold(accumulated_gradient(parameter), "whole_gradients")
            self.hold(sharded_gradient(parameter), "gradients")
        return result

    def _finalize_backward(self, group: Any, run: Any) -> Any:
        self._wait("wait_all")
        return run()

    @contextlib.contextmanager
    def of_fsdp(self) -> Iterator[None]:
        """Context of a step: FSDP's patched methods mark gathers, waits, reductions, owners of gradients."""
        methods = [self._unshard, self._wait_for_unshard, self._post_backward, self._finalize_backward]
        around = around_methods({method.__name__.removeprefix("_"): method for method in methods})
        # parameters on the host are copied to the device before they are gathered
        with around, after_resizes(self.resized), copies_of_offloaded(self._offloads), self:
            yield


def _extent(tensor: Tensor) -> int:
    """Bytes that are read or written: an expanded tensor is no larger than its storage."""
    tensor = local_tensor(tensor)
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
    """Two products forward, five backward (scores are recomputed); a causal mask halves each. Packed rows
    are [tokens, heads, width], of documents of equal length.
    """
    backward = "backward" in schema(func).name
    named = {a.name: v for a, v in zip(schema(func).arguments, args, strict=False)} | kwargs
    query, key, *_ = [t for t in tensors_in(args) if t.dim() >= 3][int(backward) :]
    keys = key.shape[2] if key.dim() == 4 else key.shape[0] / (len(named["cu_seq_q"]) - 1)
    return 2.0 * query.numel() * keys * (5 if backward else 2) * (0.5 if named.get("is_causal") else 1.0)

"""Memory of a step on a device: the peak, by kind and by phase, and what a caching allocator reserves for it.

The allocator's replay follows c10's CUDA caching allocator: 512-byte grains, 2 MiB segments up to 1 MiB, 20
MiB segments up to 10 MiB, multiples of 2 MiB beyond, best fit, blocks split if enough is left. It has one
stream, without the memory that FSDP's communication streams hold apart. Not here: how the bytes were counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fsdp.plan.fake_runs import TracedStep, peak_of
from fsdp.plan.trace import COLUMN, KINDS, Segment

MIB = 1 << 20
OFFLOADED = KINDS.index("offloaded")
_NOTHING_BACK = (("before", 0), ("end", 1))
"""Places of the head and of the last unit, which stayed on the device."""
HOST_KINDS = ("parameters", "gradients", "optimizer")
"""Kinds on the host with --memory.cpu_offload."""


@dataclass(frozen=True)
class Memory:
    peak: float
    """Bytes of tensors alive at once on the device, with the allocator's rounding."""
    reserved: float
    """Bytes that the allocator reserves for them, approximately."""
    kinds: Mapping[str, float]
    """The peak's parts."""
    phases: Mapping[str, float]
    """The peak of each phase."""
    where: str
    resting: float
    """Between steps."""
    host: float
    """Offloaded bytes in the host's memory."""
    state: float
    """Parameters and optimizer: what a checkpoint takes from this rank."""

    def with_more(self, size: float) -> Memory:
        """With `size` bytes of inputs that are always present."""
        return replace(
            self,
            peak=self.peak + size,
            reserved=self.reserved + size,
            resting=self.resting + size,
            kinds={**self.kinds, "buffers": self.kinds["buffers"] + size},
            phases={name: highest + size for name, highest in self.phases.items()},
        )


def memory_of(counted: TracedStep, *, apart: bool = False, offload: bool = False) -> Memory:
    """`apart`: host memory is not the device's; `offload`: states are on the host."""
    host = ("offloaded", *(HOST_KINDS if offload else ())) if apart else ()
    mask = np.array([name not in host for name in KINDS])
    unit = max(float(s.curve[:, OFFLOADED].max()) for s in counted.trace.segments) / max(
        1, counted.trace.blocks - 1
    )
    peaks = [(_peak(segment, mask, unit), segment) for segment in counted.trace.segments]
    at, segment = max(peaks, key=lambda pair: float(pair[0].sum()))
    phases: dict[str, float] = {}
    for kinds, one in peaks:
        phases[one.name.phase] = max(phases.get(one.name.phase, 0.0), float(kinds.sum()))
    last = counted.trace.segments[-1].curve[-1, : len(KINDS)]
    peak = float(at.sum())
    return Memory(
        peak=peak,
        reserved=peak + _cached(counted, peak),
        kinds=dict(zip(KINDS, at.tolist(), strict=True)),
        phases=phases,
        where=describe(segment, counted.trace.blocks),
        resting=float(last[mask].sum()),
        host=max(float(s.curve[:, : len(KINDS)][:, ~mask].sum(1).max()) for s in counted.trace.segments),
        state=float(last[[KINDS.index("parameters"), KINDS.index("optimizer")]].sum()),
    )


def _peak(segment: Segment, mask: np.ndarray, unit: float) -> np.ndarray:
    curve = segment.curve[:, : len(KINDS)] * mask
    if not mask[OFFLOADED] and segment.name.phase == "backward" and segment.name.place not in _NOTHING_BACK:
        # Two units' copies at most are back on the device: the one that is used, and the next.
        curve[:, KINDS.index("activations")] += np.minimum(segment.curve[:, OFFLOADED], 2 * unit).astype(
            curve.dtype
        )
    return np.asarray(curve[curve.sum(1).argmax()])


def describe(segment: Segment, blocks: int) -> str:
    kind, at = segment.name.place
    block = at if kind == "start" else blocks - at + 1
    place = {"before": "before the blocks", "after": "after them"}.get(kind, f"block {block} of {blocks}")
    if segment.name.phase == "backward" and kind == "before":
        place = "what follows the blocks"
    return (
        f"{segment.name.phase}, {place}"
        if segment.name.phase in ("forward", "backward")
        else segment.name.phase
    )


# ---------------------------------------------------------------- the allocator


def _cached(counted: TracedStep, peak: float) -> float:
    """Bytes that the allocator holds beyond the peak: replayed for the short runs, extrapolated to all
    blocks.
    """
    over = [
        (trace.blocks, reserved_for(trace.events) - peak_of(trace))
        for trace in counted.extras
        if trace.events
    ]
    if not over:
        return 0.0
    (blocks, first), (more, second) = over[0], over[-1]
    growth = (second - first) / (more - blocks) if more > blocks else 0.0
    return float(
        min(
            max(first, 0.0) + max(growth, 0.0) * (counted.shape.blocks - blocks if more > blocks else 0),
            0.1 * peak,
        )
    )


def reserved_for(events: Iterable[tuple[int, int]]) -> int:
    """Bytes of segments after all events; a storage's shrinking is a free."""
    pools = {True: Pool(small=True), False: Pool(small=False)}
    held: dict[int, tuple[Pool, int, int]] = {}
    for storage, size in events:
        if storage in held:
            pool, segment, start = held.pop(storage)
            pool.free(segment, start)
        if size > 0:
            pool = pools[size <= MIB]
            held[storage] = (pool, *pool.take(size))
    return sum(pool.reserved for pool in pools.values())


class Pool:
    """Segments cut into blocks: start → (size, free), and free blocks by size."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.reserved = 0
        self._segments: list[dict[int, list[int]]] = []
        self._free: list[tuple[int, int, int]] = []

    def take(self, size: int) -> tuple[int, int]:
        size = -(-size // 512) * 512
        at = bisect_left(self._free, (size, -1, -1))
        if at == len(self._free):
            self._new_segment(size)
            at = bisect_left(self._free, (size, -1, -1))
        whole, segment, start = self._free.pop(at)
        blocks = self._segments[segment]
        if whole - size >= (512 if self.small else MIB + 1):
            blocks[start] = [size, 0]
            blocks[start + size] = [whole - size, 1]
            insort(self._free, (whole - size, segment, start + size))
        else:
            blocks[start] = [whole, 0]
        return segment, start

    def free(self, segment: int, start: int) -> None:
        """Neighbours that are free become one block."""
        blocks = self._segments[segment]
        size = blocks[start][0]
        after = blocks.get(start + size)
        if after is not None and after[1]:
            self._drop(after[0], segment, start + size)
            del blocks[start + size]
            size += after[0]
        before = next((s for s, (n, is_free) in blocks.items() if is_free and s + n == start), None)
        if before is not None:
            del blocks[start]
            self._drop(blocks[before][0], segment, before)
            start, size = before, blocks[before][0] + size
        blocks[start] = [size, 1]
        insort(self._free, (size, segment, start))

    def _drop(self, size: int, segment: int, start: int) -> None:
        self._free.pop(bisect_left(self._free, (size, segment, start)))

    def _new_segment(self, size: int) -> None:
        whole = 2 * MIB if self.small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += whole
        self._segments.append({0: [whole, 1]})
        insort(self._free, (whole, len(self._segments) - 1, 0))


BESIDE_TENSORS = 5 * MIB
"""Bytes that Python and torch take for a model's own objects, its graph and its threads."""


def process_peak(counted: TracedStep) -> float:
    """On CPU: the process's peak above its idle size, as the kernel counts it."""
    curves = [segment.curve for segment in counted.trace.segments]
    # The heap is as large as it ever was: it counts at its own peak, the other tensors at theirs.
    mapped = max(float((_resident(curve) - curve[:, COLUMN["heap"]]).max()) for curve in curves)
    heap, kept = (max(float(curve[:, COLUMN[name]].max()) for curve in curves) for name in ("heap", "kept"))
    return mapped + heap + kept + BESIDE_TENSORS


def _resident(curve: np.ndarray) -> np.ndarray:
    """Tensors and workspace."""
    return np.asarray(curve[:, : COLUMN["workspace"] + 1].sum(1))

"""A traced step as numbers: segments of memory curves and work. They add up and scale like vectors.

A segment lies between two marks (before the blocks, one block, after them; forward and backward). The same
segment of runs with more blocks, more samples or other shards has the same events with other sizes, each an
affine function of those, so any run is a weighted sum of traced ones. Not here: which runs are traced
(fake_runs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
COLUMN = {name: at for at, name in enumerate(COLUMNS)}

Place = tuple[str, int]
"""("before", 0), ("start", j) the j-th block, ("end", j) the j-th from the end, ("after", 0); j from 1."""


@dataclass(frozen=True)
class SegmentName:
    micro: int
    phase: str
    place: Place


OPS = (
    "pointwise",
    "matmul",
    "attention",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "wait_gather",
    "wait_reduce",
    "wait_all",
)
CODE = {name: at for at, name in enumerate(OPS)}


@dataclass(frozen=True)
class Work:
    """Rows in the order that the host issued them: code, stream (0 compute, 1 communication), group, flops,
    bytes, width.

    Bytes of a collective are those of the gathered whole; group tells units apart, width is the operands'
    bytes an element, of attention the width of a head.
    """

    code: np.ndarray
    stream: np.ndarray
    group: np.ndarray
    flops: np.ndarray
    bytes: np.ndarray
    fused_bytes: np.ndarray
    width: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.code)


@dataclass(frozen=True)
class Segment:
    name: SegmentName
    curve: np.ndarray
    """Bytes alive by column, [points, columns]; a point at each allocation and at the end."""
    work: Work

    @property
    def peak(self) -> np.ndarray:
        """Bytes by kind at the segment's peak."""
        tensors = self.curve[:, : len(KINDS)]
        return tensors[tensors.sum(1).argmax()]


@dataclass(frozen=True)
class Trace:
    segments: tuple[Segment, ...]
    blocks: int
    base: int = 0
    """Blocks of the run whose rows of work are kept: its groups are numbered by them. 0 if all blocks are
    there.
    """
    packing: float = 1.0
    """What CUDA's allocator reserves, over the sum of its pools' peaks: by a replay of this run, or the most
    of the runs that it was blended from.
    """

    def names(self) -> list[SegmentName]:
        return [segment.name for segment in self.segments]


def blend(traces: Sequence[Trace], weights: Sequence[float], blocks: int) -> Trace:
    """The weighted sum, segment by segment, of traces with the same segments. Weights add up to one."""
    assert abs(sum(weights) - 1) < 1e-9
    rows = zip(*(trace.segments for trace in traces), strict=True)
    segments = tuple(_blend_segments(list(row), weights) for row in rows)
    return Trace(segments, blocks, traces[0].base, max(trace.packing for trace in traces))


def _blend_segments(segments: list[Segment], weights: Sequence[float]) -> Segment:
    assert len({segment.name for segment in segments}) == 1
    if len({segment.curve.shape for segment in segments}) > 1:
        # As many events as parameters (norms, an optimizer of many kernels): only the highest point is kept
        # of each.
        segments = [
            replace(segment, curve=segment.curve[[segment.curve[:, : len(KINDS)].sum(1).argmax()]])
            for segment in segments
        ]
    if len({tuple(segment.work.code) for segment in segments}) > 1:
        segments = [replace(segment, work=_collapsed(segment.work)) for segment in segments]
    curve = sum(w * s.curve for w, s in zip(weights, segments, strict=True))
    first = segments[0].work
    if len({s.work.rows for s in segments}) > 1:  # different codes in all: nothing to pair
        first = max((s.work for s in segments), key=lambda work: work.rows)
        return Segment(segments[0].name, np.asarray(curve), first)
    added = {
        name: np.maximum(0, sum(w * getattr(s.work, name) for w, s in zip(weights, segments, strict=True)))
        for name in ("flops", "bytes", "fused_bytes")
    }
    return Segment(segments[0].name, np.asarray(curve), replace(first, **added))


def _collapsed(work: Work) -> Work:
    """A row for each kind of operation present: sums, if single operations cannot be paired."""
    keys = sorted({(int(c), int(s)) for c, s in zip(work.code, work.stream, strict=True)})
    picks = [(work.code == c) & (work.stream == s) for c, s in keys]

    def total(values: np.ndarray) -> np.ndarray:
        return np.array([values[pick].sum() for pick in picks], dtype=float)

    return Work(
        code=np.array([c for c, _ in keys]),
        stream=np.array([s for _, s in keys]),
        group=np.zeros(len(keys), dtype=int),
        flops=total(work.flops),
        bytes=total(work.bytes),
        fused_bytes=total(work.fused_bytes),
        width=np.array([work.width[pick].max() for pick in picks]),
    )


# ---------------------------------------------------------------- blocks


def edges(trace: Trace, keep: int) -> Trace:
    """Blocks named from both ends, `keep` from each; the equal ones between are left out."""
    kept = []
    for segment in trace.segments:
        kind, at = segment.name.place
        if kind == "start":
            from_end = trace.blocks - at + 1
            if at > keep and from_end > keep:
                continue
            if at > keep:
                segment = replace(segment, name=replace(segment.name, place=("end", from_end)))
        kept.append(segment)
    return Trace(tuple(kept), trace.blocks, trace.blocks, trace.packing)


def unrolled(trace: Trace, period: int, keep: int) -> list[tuple[Segment, int]]:
    """All segments of a composed step in order, middle blocks repeated, each with the shift of its groups."""
    if not any(segment.name.place[0] == "end" for segment in trace.segments):
        return [(segment, 0) for segment in trace.segments]
    return [
        pair
        for phase in _phases(trace)
        for pair in _unrolled_phase(phase, trace.blocks, trace.base, period, keep)
    ]


def _phases(trace: Trace) -> list[list[Segment]]:
    phases: list[list[Segment]] = []
    last: tuple[int, str] | None = None
    for segment in trace.segments:
        key = (segment.name.micro, segment.name.phase)
        if key != last:
            phases.append([])
            last = key
        phases[-1].append(segment)
    return phases


def _unrolled_phase(
    phase: list[Segment], blocks: int, base: int, period: int, keep: int
) -> list[tuple[Segment, int]]:
    by_place = {segment.name.place: segment for segment in phase}
    if not any(place[0] == "start" for place in by_place):
        return [(segment, 0) for segment in phase]
    order = range(1, blocks + 1) if phase[0].name.phase == "forward" else range(blocks, 0, -1)
    middle = []
    for at in order:
        if at <= keep:
            middle.append((by_place["start", at], 0))
        elif at > blocks - keep:
            middle.append((by_place["end", blocks - at + 1], blocks - base))
        else:
            like = keep - (keep - at) % period
            middle.append((by_place["start", like], at - like))
    before = [(s, 0) for p, s in by_place.items() if p[0] == "before"]
    after = [(s, 0) for p, s in by_place.items() if p[0] == "after"]
    return [*before, *middle, *after]

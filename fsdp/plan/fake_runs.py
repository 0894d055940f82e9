"""The fake runs that a plan needs, and their composition.

A model of many equal blocks is traced with few (five and six, say) and composed; a model without them is
traced whole. A search needs many micro-batches and shard sizes: bytes of activations are affine in the first,
resting bytes go with the reciprocal of the second, so four small runs cover all of them, and the chosen ones
are then traced for themselves. Not here: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp.config import Config
from fsdp.plan.step_trace import FakeRun, TooFewBlocks, blocks_in, run_whole, trace_step
from fsdp.plan.trace import CODE, COLUMNS, Segment, Trace, blend, edges

TOLERANCE = 0.005
"""The relative difference of a user's model from its composition from which on it is traced whole."""

Runs = dict[FakeRun, Trace]


@dataclass(frozen=True)
class Shape:
    """The composition of a step of many blocks: `keep` are traced at each end, `period` of them repeat."""

    blocks: int
    keep: int
    period: int

    @property
    def short(self) -> tuple[int, int]:
        """Numbers of blocks to trace; (0, 0) if the whole model is as quick."""
        first = 2 * self.keep + (self.blocks - 2 * self.keep) % self.period
        second = first + self.period
        return (first, second) if self.blocks > second else (0, 0)


@dataclass(frozen=True)
class TracedStep:
    trace: Trace
    shape: Shape


def shape_of(config: Config) -> Shape:
    memory = config.memory
    period = memory.activation_checkpointing_every if memory.activation_checkpointing != "none" else 1
    ahead = max(1, config.speed.prefetch_forward, config.speed.prefetch_backward)
    return Shape(blocks_in(config), keep=period + ahead, period=period)


def run_all(asks: Iterable[FakeRun]) -> Runs:
    """Traces each distinct run once."""
    return {ask: trace_step(ask) for ask in dict.fromkeys(asks)}


# ---------------------------------------------------------------- one question


def count(ask: FakeRun, *, check: bool | None = None) -> TracedStep:
    """The step of all blocks. A user's model is checked with a third run: blocks may be alike and act
    differently.
    """
    shape = shape_of(ask.config)
    if shape.short == (0, 0):
        return TracedStep(trace_step(replace(ask, blocks=0)), shape)
    asks = [replace(ask, blocks=n) for n in shape.short]
    own = ":" in ask.config.model.name if check is None else check
    third = shape.short[1] + shape.period
    if own and third < shape.blocks:
        asks.append(replace(ask, blocks=third))
    try:
        runs = run_all(asks)
    except TooFewBlocks:
        run_whole(ask.config)
        return count(ask)
    first = [runs[one] for one in asks[:2]]
    if _composable(first, shape) and (
        len(asks) < 3 or not _differs(compose(replace(shape, blocks=third), first).trace, runs[asks[2]])
    ):
        return compose(shape, first)
    return TracedStep(trace_step(replace(ask, blocks=0)), shape)


def _composable(runs: Sequence[Trace], shape: Shape) -> bool:
    first, second = (edges(run, shape.keep).names() for run in runs)
    return first == second


def compose(shape: Shape, runs: Sequence[Trace]) -> TracedStep:
    """Composes all blocks from two runs that are one period apart."""
    first, second = (edges(run, shape.keep) for run in runs)
    steps = (shape.blocks - first.blocks) / (second.blocks - first.blocks)
    return TracedStep(blend([first, second], [1 - steps, steps], shape.blocks), shape)


def peak_of(trace: Trace) -> float:
    """Peak bytes of tensors."""
    return max(float(segment.peak.sum()) for segment in trace.segments)


def _differs(composed: Trace, whole: Trace) -> bool:
    return abs(peak_of(composed) - peak_of(whole)) > TOLERANCE * peak_of(whole)


# ---------------------------------------------------------------- many questions


@dataclass(frozen=True)
class Family:
    """Runs that differ only in samples and shards: two batches, blocks short and shorter, one mesh for all
    that are sharded.

    Activations are affine in the batch: exact. Resting shards go with the reciprocal of their number: exact
    where rows divide; buffers of one unit's shard are taken as large as in the traced mesh, the one with the
    largest shards.
    """

    base: FakeRun
    batches: tuple[int, int]

    def asks(self) -> list[FakeRun]:
        short = shape_of(self.base.config).short
        return [self._ask(n, batch) for n in (short if short != (0, 0) else (0,)) for batch in self.batches]

    def _ask(self, blocks: int, batch: int) -> FakeRun:
        return replace(self.base, blocks=blocks, micro_batch=batch)

    def at(self, runs: Runs, micro_batch: int, shard: int) -> TracedStep:
        shape = shape_of(self.base.config)
        low, high = self.batches
        part = (micro_batch - low) / (high - low)
        short = shape.short if shape.short != (0, 0) else (0,)
        pairs = [[runs[self._ask(n, batch)] for batch in self.batches] for n in short]
        made = [blend(pair, [1 - part, part], pair[0].blocks) for pair in pairs]
        made = [resharded(trace, self.base.sizes.shard / shard) for trace in made]
        return compose(shape, made) if len(made) == 2 else TracedStep(made[0], shape)


_SHARDED = np.array([name in ("parameters", "gradients", "optimizer", "reduce pool") for name in COLUMNS])


def resharded(trace: Trace, factor: float) -> Trace:
    """The trace with shards `factor` times as large."""
    if factor == 1:
        return trace
    scale = np.where(_SHARDED, factor, 1.0)
    return replace(trace, segments=tuple(_resharded(segment, scale, factor) for segment in trace.segments))


def _resharded(segment: Segment, scale: np.ndarray, factor: float) -> Segment:
    work = segment.work
    if segment.name.phase in ("reduce", "optimizer"):  # all of it is done on shards
        part = np.ones(work.rows, dtype=bool)
    else:  # what replicas reduce, and what is copied into a gather
        part = (work.code == CODE["all_reduce"]) | ((work.stream == 1) & (work.code == CODE["pointwise"]))
    by = np.where(part, factor, 1.0)
    work = replace(work, bytes=work.bytes * by, fused_bytes=work.fused_bytes * by)
    return replace(segment, curve=segment.curve * scale, work=work)

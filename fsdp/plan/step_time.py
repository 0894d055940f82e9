"""Seconds of a step: a roofline for each operation, links for each collective, in the order in which FSDP
issued them.

Three queues run side by side, as on a GPU: compute, the shard axis's collectives, the replicate axis's. A
gather waits for the copy-out before it, a block for its gather, a reduction for its block, the block after
next for that reduction: all read from the traced step. Not here: rates (rates.py), bytes alive (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdp.dist.mesh import MeshSizes
from fsdp.plan.fake_runs import TracedStep
from fsdp.plan.rates import FLOAT8, NARROW_HEADS, Rates
from fsdp.plan.trace import CODE, OPS, Segment, Work, unrolled

_COMPUTE = frozenset({CODE["pointwise"], CODE["matmul"], CODE["attention"]})
_START_S = 20e-6
"""Seconds that a collective takes to start."""
_HOP_S = 10e-6
"""Seconds of a ring, for each node that it passes."""


@dataclass(frozen=True)
class Links:
    """The place of a group's ranks: shards are side by side, first within a node; replicas are a shard
    apart.
    """

    sizes: MeshSizes
    rates: Rates

    def seconds(self, operation: str, size: float, *, replicas: bool) -> float:
        """`size` is the gathered whole, or the bytes that an all-reduce reduces."""
        ranks = self.sizes.replicate if replicas else self.sizes.shard
        if ranks == 1:
            return 0.0
        times = 2 if operation == "all_reduce" else 1
        return _START_S + _HOP_S * self._place(replicas)[1] + times * max(self._ways(size, replicas))

    def slower_between(self, *, replicas: bool) -> bool:
        """Whether links between nodes limit such a collective."""
        inside, across = self._ways(1.0, replicas)
        return across > inside

    def _ways(self, size: float, replicas: bool) -> tuple[float, float]:
        """Seconds within a node, and between nodes."""
        within, nodes, rate = self._place(replicas)
        across = size * (nodes - 1) / nodes / rate if nodes > 1 else 0.0
        return size * (within - 1) / within / self.rates.link, across

    def _place(self, replicas: bool) -> tuple[int, int, float]:
        """Ranks of the group within a node, nodes that it spans, and its share of a node's adapters."""
        a_node, shard = self.rates.gpus_a_node, self.sizes.shard
        if not replicas:
            within = min(shard, a_node)
            return within, -(-shard // a_node), self.rates.node_link
        within = min(self.sizes.replicate, max(1, a_node // shard))
        nodes = -(-self.sizes.replicate // within)
        # Each of a node's ranks is in a group of its own, and they share the adapters.
        return within, nodes, self.rates.node_link / min(shard, a_node)

    def crossing(self, operation: str, size: float, *, replicas: bool) -> tuple[float, float]:
        """Bytes that one rank sends within its node and that it sends between nodes."""
        if (self.sizes.replicate if replicas else self.sizes.shard) == 1:
            return 0.0, 0.0
        within, nodes, _ = self._place(replicas)
        times = 2 if operation == "all_reduce" else 1
        between = (
            times
            * size
            * (nodes - 1)
            / nodes
            / (min(self.sizes.shard, self.rates.gpus_a_node) if not replicas else 1)
        )
        return times * size * (within - 1) / within, between if nodes > 1 else 0.0


@dataclass
class Step:
    """The predicted step."""

    seconds: float = 0.0
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*OPS[:3], "communication", "optimizer", "host"), 0.0)
    )
    """Seconds of work by kind; communication whole, hidden or not."""
    exposed: float = 0.0
    within: float = 0.0
    between: float = 0.0
    """Bytes that a rank sends."""
    waits_between: float = 0.0
    """Seconds of collectives that links between nodes limit."""
    flops: float = 0.0
    model_flops: float = 0.0
    """Three times forward's: recomputation is no progress."""

    @property
    def bound_by(self) -> str:
        if self.parts["host"] >= 0.98 * self.seconds:
            return "host"
        links = (
            "links between nodes"
            if self.waits_between > self.parts["communication"] / 2
            else "links in a node"
        )
        named = {
            "matrix products": self.parts["matmul"], "attention": self.parts["attention"],
            "memory traffic": self.parts["pointwise"] + self.parts["optimizer"],
            links: self.exposed,
        }  # fmt: skip
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Setting:
    """What a step's time depends on beside its trace."""

    sizes: MeshSizes
    rates: Rates
    compiled: bool
    accumulation: int
    offload: bool = False
    float8: bool = False
    chunked_loss: bool = False
    """What follows the blocks in forward computes its gradients there."""


def time_step(counted: TracedStep, setting: Setting) -> Step:
    queue = _Queues(setting)
    for segment, shift in _all_micro_batches(counted, setting.accumulation):
        queue.run(segment, shift, counted.shape.blocks)
    return queue.done()


def _all_micro_batches(counted: TracedStep, accumulation: int) -> Iterable[tuple[Segment, int]]:
    """At most three micro-batches are traced: the first, one for all between, the last."""
    rows = unrolled(counted.trace, counted.shape.period, counted.shape.keep)
    traced = 1 + max(segment.name.micro for segment, _ in rows)
    middle = [row for row in rows if row[0].name.micro == 1 and row[0].name.phase in ("forward", "backward")]
    for at, row in enumerate(rows):
        if accumulation < traced and row[0].name.micro == 1 and row[0].name.phase in ("forward", "backward"):
            continue
        if accumulation > traced >= 3 and row[0].name.micro == 2 and rows[at - 1][0].name.micro == 1:
            for _ in range(accumulation - traced):
                yield from middle
        yield row


@dataclass(frozen=True)
class _Prepared:
    """A segment in seconds: (code, group, bytes, seconds) in order, with runs of computation added up; the
    sums by kind; what the host takes to issue it.
    """

    rows: list[tuple[int, int, float, float]]
    totals: Mapping[str, float]
    host_s: float


def _rows(work: Work, seconds: np.ndarray) -> list[tuple[int, int, float, float]]:
    rows: list[tuple[int, int, float, float]] = []
    for at in range(work.rows):
        code = int(work.code[at])
        if code in _COMPUTE and rows and rows[-1][0] in _COMPUTE:
            rows[-1] = (rows[-1][0], 0, 0.0, rows[-1][3] + float(seconds[at]))
        else:
            rows.append((code, int(work.group[at]), float(work.bytes[at]), float(seconds[at])))
    return rows


class _Queues:
    """The time at which each queue is free, as work is issued in the host's order."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.links = setting, Links(setting.sizes, setting.rates)
        self.compute = self.shard = self.replicate = 0.0
        self._gathered: dict[int, float] = {}
        self._copied_out = 0.0
        self._reduced: list[float] = []
        self.step = Step()
        self._known: dict[int, _Prepared] = {}
        self._busy = 0.0
        self._host = 0.0

    def run(self, segment: Segment, shift: int, blocks: int) -> None:
        ready = self._prepared(segment)
        self._host += ready.host_s
        for name, total in ready.totals.items():
            self.step.parts[name] += total
        for code, group, size, seconds in ready.rows:
            at = group + shift if 0 < group <= blocks else group
            if code in _COMPUTE:
                self.compute += seconds
                self._busy += seconds
            else:
                self._communicate(OPS[code], at, size, segment.name.phase)
        work = segment.work
        self.step.flops += float(work.flops.sum())
        if segment.name.phase == "forward":
            whole = self.setting.chunked_loss and segment.name.place[0] == "after"
            self.step.model_flops += (1 if whole else 3) * float(work.flops.sum())

    def _communicate(self, operation: str, group: int, size: float, phase: str) -> None:
        if operation == "wait_gather":
            self.compute = max(self.compute, self._gathered.pop(group, 0.0))
            self._copied_out = self.compute
        elif operation == "wait_reduce":
            if self._reduced:
                self.compute = max(self.compute, self._reduced.pop(0))
        elif operation == "wait_all":
            self.compute = max(self.compute, self.shard, self.replicate)
            self._reduced.clear()
        else:
            # Gradients are all-reduced over replicas, their norm over shards.
            self._collective(operation, group, size, replicas=operation == "all_reduce" and phase != "reduce")

    def _collective(self, operation: str, group: int, size: float, *, replicas: bool) -> None:
        seconds = self.links.seconds(operation, size, replicas=replicas) + self._over_host_link(
            operation, size
        )
        self.step.parts["communication"] += seconds
        within, between = self.links.crossing(operation, size, replicas=replicas)
        self.step.waits_between += seconds if self.links.slower_between(replicas=replicas) else 0.0
        self.step.within += within
        self.step.between += between
        if operation == "all_gather":
            self.shard = max(self.shard, self._copied_out) + seconds
            self._gathered[group] = self.shard
        elif operation == "reduce_scatter":
            self.shard = max(self.shard, self.compute) + seconds
            self._reduced.append(self.shard)
        else:
            self.replicate = (
                max(self.replicate, self.shard if self.setting.sizes.shard > 1 else 0.0, self.compute)
                + seconds
            )

    def _over_host_link(self, operation: str, size: float) -> float:
        if not self.setting.offload or operation == "all_reduce":
            return 0.0
        # kept in fp32, computed in bf16
        return 2 * size / max(1, self.setting.sizes.shard) / self.setting.rates.host_link

    # ------------------------------------------------------------ durations

    def _prepared(self, segment: Segment) -> _Prepared:
        """Cached, since blocks repeat."""
        if id(segment) not in self._known:
            self._known[id(segment)] = self._prepare(segment)
        return self._known[id(segment)]

    def _prepare(self, segment: Segment) -> _Prepared:
        work, fused = segment.work, self.setting.compiled and segment.name.place[0] in ("start", "end")
        seconds = self._seconds(segment, fused)
        totals = {name: float(seconds[work.code == CODE[name]].sum()) for name in OPS[:3]}
        if segment.name.phase == "optimizer":
            totals = {"optimizer": sum(totals.values())}
        issued = (
            int(np.isin(work.code, list(_COMPUTE)).sum())
            * self.setting.rates.issue_s
            * (0.3 if fused else 1.0)
        )
        return _Prepared(_rows(work, seconds), totals, issued)

    def _seconds(self, segment: Segment, fused: bool) -> np.ndarray:
        """Seconds of each operation that computes: its products, its memory traffic or its launch,
        whichever takes longest.
        """
        work, rates = segment.work, self.setting.rates
        moved = np.where(
            work.code == CODE["pointwise"], work.fused_bytes if fused else work.bytes, work.bytes
        )
        on_host = self.setting.offload and segment.name.phase == "optimizer"
        memory = moved / (rates.host_link if on_host else rates.bandwidth)
        speed = np.where(
            work.width >= 4,
            rates.matmul_fp32,
            rates.matmul * (FLOAT8 if self.setting.float8 and fused else 1.0),
        )
        attention = np.where(work.width > NARROW_HEADS, rates.attention, rates.attention_narrow)
        speed = np.where(work.code == CODE["attention"], attention, speed)
        least = rates.launch_s if not fused else np.where(work.code == CODE["pointwise"], 0.0, rates.launch_s)
        longest = np.maximum(np.maximum(work.flops / speed, memory), least)
        return np.where(np.isin(work.code, list(_COMPUTE)), longest, 0.0)

    def done(self) -> Step:
        step, rates = self.step, self.setting.rates
        elapsed = max(self.compute, self.shard, self.replicate)
        step.exposed = elapsed - self._busy
        hidden = max(0.0, step.parts["communication"] - step.exposed)
        elapsed += hidden * rates.contention
        step.parts["host"] = self._host
        step.seconds = max(elapsed, self._host)
        return step

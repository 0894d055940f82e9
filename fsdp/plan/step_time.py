"""Seconds of a step: a roofline for each operation, links for each collective, in the order in which FSDP
issued them.

Three queues run side by side, as on a GPU: compute, the shard axis's collectives, the replicate axis's. A
gather waits for the copy-out before it, a block for its gather, a reduction for its block, the block after
next for that reduction: all read from the traced step. Not here: rates (rates.py), bytes alive (estimate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fsdp.dist.mesh import MeshSizes
from fsdp.plan.fake_step import FakeRun
from fsdp.plan.rates import FLOAT8, NARROW_HEADS, Rates
from fsdp.plan.trace import AFTER, CODE, OPS, Trace

COMPUTE = tuple(CODE[name] for name in OPS[:3])
START_S = 20e-6
"""Seconds that a collective takes to start."""
HOP_S = 10e-6
"""Seconds of a ring, for each node that it passes."""


class Sent(NamedTuple):
    """A collective: its seconds, and the bytes that a rank sends within its node and between nodes."""

    seconds: float = 0.0
    within: float = 0.0
    between: float = 0.0
    limited_between: bool = False
    """Whether links between nodes limit it."""


def send(operation: str, size: float, sizes: MeshSizes, rates: Rates, *, replicas: bool) -> Sent:
    """`size` is the gathered whole, or the bytes that an all-reduce reduces. Shards are side by side, first
    within a node; replicas are a shard apart, each of a node's ranks in a group of its own that shares the
    node's adapters.
    """
    ranks = sizes.replicate if replicas else sizes.shard
    if ranks == 1:
        return Sent()
    a_node = min(sizes.shard, rates.gpus_a_node)
    local = min(ranks, max(1, rates.gpus_a_node // sizes.shard) if replicas else rates.gpus_a_node)
    nodes = -(-ranks // local)
    size *= 2 if operation == "all_reduce" else 1
    within, across = size * (local - 1) / local, size * (nodes - 1) / nodes
    inside_s = within / rates.link
    across_s = across / (rates.node_link / a_node if replicas else rates.node_link)
    seconds = START_S + HOP_S * nodes + max(inside_s, across_s)
    return Sent(seconds, within, across / (1 if replicas else a_node), across_s > inside_s)


@dataclass
class Step:
    """The predicted step."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of work by kind; communication whole, hidden or not."""
    exposed: float = 0.0
    within: float = 0.0
    between: float = 0.0
    """Bytes that a rank sends."""
    limited_between: float = 0.0
    """Seconds of collectives that links between nodes limit."""
    model_flops: float = 0.0
    """Three times forward's: recomputation is no progress."""

    @property
    def bound_by(self) -> str:
        if self.parts["host"] >= 0.98 * self.seconds:
            return "host"
        between = self.limited_between > self.parts["communication"] / 2
        named = {
            "matrix products": self.parts["matmul"],
            "attention": self.parts["attention"],
            "memory traffic": self.parts["pointwise"] + self.parts["optimizer"],
            "links between nodes" if between else "links in a node": self.exposed,
        }
        return max(named, key=lambda name: named[name])


def time_step(trace: Trace, ask: FakeRun, accumulation: int, rates: Rates) -> Step:
    work = _all_micro_batches(trace, accumulation)
    phases, blocks = (np.array([part[at] for part in trace.parts])[work["part"]] for at in (1, 2))
    offload = ask.config.memory.cpu_offload and rates.has_allocator
    fused = (blocks > 0) & ask.compiled
    seconds = _seconds(work, fused, phases == "optimizer", ask, rates)
    computes = np.isin(work["code"], COMPUTE)
    update, forward = phases == "optimizer", phases == "forward"
    step = Step(
        parts={name: float(seconds[(work["code"] == CODE[name]) & ~update].sum()) for name in OPS[:3]}
    )
    step.parts["optimizer"] = float(seconds[update].sum())
    step.parts["host"] = float((computes * np.where(fused, 0.3, 1.0)).sum() * rates.issue_s)
    # What follows the blocks of a chunked loss computes its gradients in forward.
    whole = (blocks == AFTER) & bool(ask.config.memory.loss_chunk)
    step.model_flops = float((work["flops"] * np.where(whole, 1, 3))[forward].sum())
    _run_queues(step, work, phases, np.cumsum(seconds), ask.sizes, rates, offload)
    step.seconds = max(step.seconds, step.parts["host"])
    return step


def _all_micro_batches(trace: Trace, accumulation: int) -> np.ndarray:
    """At most three micro-batches are traced: the first, one for all between, the last."""
    work, micros = trace.work, np.array([part.micro for part in trace.parts])[trace.work["part"]]
    if micros.max() < 2:
        return work
    middle = np.flatnonzero(micros == 1)
    first, last = work[: middle[0]], work[middle[-1] + 1 :]
    return np.concatenate([first, np.tile(work[middle], accumulation - 2), last])


def _seconds(
    work: np.ndarray, fused: np.ndarray, update: np.ndarray, ask: FakeRun, rates: Rates
) -> np.ndarray:
    """Seconds of each operation that computes: its products, its memory traffic or its launch, whichever
    takes longest.
    """
    config, code, width = ask.config, work["code"], work["width"]
    pointwise = code == CODE["pointwise"]
    moved = np.where(pointwise & fused, work["fused_bytes"], work["bytes"])
    on_host = update & (config.memory.cpu_offload and rates.has_allocator)
    memory = moved / np.where(on_host, rates.host_link, rates.bandwidth)
    faster = np.where(fused & (config.speed.float8 != "off"), FLOAT8, 1.0)
    products = np.where(width >= 4, rates.matmul_fp32, rates.matmul * faster)
    attention = np.where(width > NARROW_HEADS, rates.attention, rates.attention_narrow)
    speed = np.where(code == CODE["attention"], attention, products)
    least = np.where(pointwise & fused, 0.0, rates.launch_s)
    longest = np.maximum(np.maximum(work["flops"] / speed, memory), least)
    return np.where(np.isin(code, COMPUTE), longest, 0.0)


def _run_queues(
    step: Step,
    work: np.ndarray,
    phases: np.ndarray,
    busy: np.ndarray,
    sizes: MeshSizes,
    rates: Rates,
    offload: bool,
) -> None:
    """`busy`: seconds of computation up to each row, its own included."""
    compute = shard = replicate = copied_out = done = communication = 0.0
    gathered, reduced = dict[int, float](), list[float]()
    for row in np.flatnonzero(~np.isin(work["code"], COMPUTE)):
        compute, done = compute + float(busy[row]) - done, float(busy[row])
        operation, group, size = OPS[work["code"][row]], int(work["group"][row]), float(work["bytes"][row])
        if operation == "wait_gather":
            compute = copied_out = max(compute, gathered.pop(group, 0.0))
        elif operation == "wait_reduce":
            compute = max(compute, reduced.pop(0)) if reduced else compute
        elif operation == "wait_all":
            compute = max(compute, shard, replicate)
            reduced.clear()
        else:
            # Gradients are all-reduced over replicas, their norm over shards.
            replicas = operation == "all_reduce" and phases[row] != "reduce"
            sent = send(operation, size, sizes, rates, replicas=replicas)
            # shards on the host are kept in fp32, computed in bf16
            over_bus = (
                2 * size / sizes.shard / rates.host_link if offload and operation != "all_reduce" else 0.0
            )
            seconds = sent.seconds + over_bus
            communication += seconds
            step.within, step.between = step.within + sent.within, step.between + sent.between
            step.limited_between += seconds if sent.limited_between else 0.0
            if operation == "all_gather":
                shard = gathered[group] = max(shard, copied_out) + seconds
            elif operation == "reduce_scatter":
                shard = max(shard, compute) + seconds
                reduced.append(shard)
            else:
                replicate = max(replicate, shard if sizes.shard > 1 else 0.0, compute) + seconds
    whole = float(busy[-1])
    elapsed = max(compute + whole - done, shard, replicate)
    step.exposed = elapsed - whole
    step.parts["communication"] = communication
    # A collective beside a product takes some of its processors.
    step.seconds = elapsed + max(0.0, communication - step.exposed) * rates.contention

"""Seconds of a step: a roofline for each operation, links for each collective, in the order in which FSDP
issued them.

Three queues run side by side, as on a GPU: compute, the shard axis's collectives, the replicate axis's. A
gather waits for the copy-out before it, a block for its gather, a reduction for its block, the block after
next for that reduction: all read from the traced step. Exchanges of context, tensor and expert ranks are part
of compute, which needs their result at once. Not here: bytes alive (estimate.py).

Rates are those of published measurements of kernels and links, none of training runs:

matmul       the mean of the best shape that mamf-finder found (github.com/stas00/ml-engineering,
             compute/accelerator, "Maximum Achievable Matmul FLOPS"), times SUSTAINED: a model's shapes are
             not the best one, and minutes of it draw full power
attention    FlashAttention-2 with causal masks, forward and backward together: on A100 its paper (arXiv
             2307.08691, 50-73% of peak), on Hopper 35% of peak (arXiv 2407.08608, abstract); heads of 64 on
             Hopper by bench.gpu_attention on an H100, without the casts that it then timed too
memory       the data sheet's, times STREAMED, which large copies reach
links        NVLink one way (the same repository, network/README.md: 300, 450, 900 GB/s), times BUS: its
             nccl-tests and pairwise copies reach about 80%. Between nodes: all adapters of a node, at their
             nominal rate

cpu          an order of magnitude of one core with AVX-512, not a measurement: its seconds are not reliable

Not measured, at 80% of the data sheet as the others: matmul of PCIe, NVL, L4 and L40S, and all rates of
UNMEASURED, whose attention is 35% of it, as on Hopper. A flag of --plan overrides each figure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdp.base.devices import DEVICES, find, memory_of
from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.distributed.mesh import MeshSizes, mesh_views
from fsdp.plan.fake_step import FakeRun
from fsdp.plan.trace import AFTER, AXES, CODE, OPS, Trace

GIB = 2**30
NARROW_HEADS = 64
HOPPER_NARROW = 200e12
SUSTAINED, STREAMED, BUS = 0.9, 0.85, 0.8
UNMEASURED = ("gh200", "gb200", "b300", "mi300x", "mi250x")
CHANNELS = 16
"""Processors that a collective occupies: NCCL's channels on a node of eight."""

TABLED = ("memory", "matmul", "attention", "link", "node_link", "host_link")
UNITS = (GIB, 1e12 * SUSTAINED, 1e12, 1e9 * BUS, 1e9 * BUS, 1e9 * BUS)
TABLE = {
    # GiB that a process can have, matmul and attention in TFLOP/s, GB/s one way of a GPU's links in a node,
    # of all adapters of a node, of the bus to the host, and the device's processors
    "A100 40GB": (39.4, 271.2, 185, 300, 200, 25, 108),
    "A100 80GB": (79.1, 271.2, 185, 300, 200, 25, 108),
    "H100 SXM": (79.1, 794.5, 346, 450, 400, 50, 132),
    "H100 PCIe": (79.1, 607.0, 265, 50, 50, 50, 114),
    "H100 NVL": (93.0, 670.0, 292, 300, 200, 50, 132),
    "H200": (139.8, 794.5, 346, 450, 400, 50, 132),
    "B200": (178.3, 1745.0, 790, 900, 400, 50, 148),
    "GH200": (94.5, 791.5, 346, 450, 50, 450, 132),
    "GB200": (184.0, 2000.0, 875, 900, 400, 225, 148),
    "B300": (268.0, 1800.0, 787, 900, 800, 50, 160),
    "MI300X": (191.0, 1045.9, 457, 448, 400, 50, 304),
    "MI250X GCD": (63.5, 153.2, 67, 50, 100, 25, 110),
    "L4": (22.0, 97.0, 60, 25, 25, 25, 58),
    "L40S": (44.4, 290.0, 180, 25, 50, 25, 142),
}
assert {device.name for device in DEVICES} <= TABLE.keys()


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second; memory is the bytes that a rank can have. By default a CPU's."""

    name: str = "cpu"
    memory: float = memory_of(torch.device("cpu"))
    matmul: float = 200e9
    """In fp32 half of it."""
    attention: float = 50e9
    peak: float = 100e9
    """The data sheet's bf16 rate, the base of MFU."""
    bandwidth: float = 20e9
    link: float = 1e9
    """One GPU's, within a node, one way."""
    node_link: float = 1e9
    """All adapters of a node, one way."""
    gpus_a_node: int = os.cpu_count() or 1
    host_link: float = 20e9
    overhead: float = 0.0
    """Bytes that the driver's context and NCCL hold beside the allocator."""
    launch_s: float = 5e-6
    """Least time of a kernel."""
    issue_s: float = 0.0
    """Host time of an operation in eager mode."""
    contention: float = 0.0
    """The share of the device that a collective beside a product takes."""

    @property
    def has_allocator(self) -> bool:
        return self.name != "cpu"


def rates_for(config: Config) -> Rates:
    """The device that --plan.gpu names, with --plan's own figures over the table's. A CPU's ranks share the
    machine's memory.
    """
    plan, base = config.plan, Rates()
    if plan.gpu != "cpu":
        base = _from_table(plan.gpu)
    gpus_a_node = plan.gpus_per_node or base.gpus_a_node
    sharing = 1 if base.has_allocator else min(max(1, plan.gpus), gpus_a_node)
    return dataclasses.replace(
        base,
        gpus_a_node=gpus_a_node,
        memory=plan.memory_gib * GIB or base.memory / sharing,
        link=plan.link_gb_s * 1e9 * BUS or base.link,
        node_link=plan.node_link_gb_s * 1e9 * BUS or base.node_link,
        bandwidth=plan.memory_gb_s * 1e9 * STREAMED or base.bandwidth,
        matmul=plan.tflops * 1e12 * SUSTAINED or base.matmul,
    )


def _from_table(name: str) -> Rates:
    device = find(name, typed=True)
    if device is None:
        raise ConfigError(
            f"--plan.gpu {name} is not in the table: {', '.join(TABLE)}, cpu.", "--plan.gpu h100"
        )
    *figures, processors = TABLE[device.name]
    tabled: dict[str, Any] = {n: v * unit for n, v, unit in zip(TABLED, figures, UNITS, strict=True)}
    return Rates(
        name=device.name,
        peak=device.bf16_tflops * 1e12,
        bandwidth=device.memory_gb_s * 1e9 * STREAMED,
        gpus_a_node=8,
        overhead=1.5 * GIB,
        launch_s=3e-6,
        issue_s=7e-6,
        contention=CHANNELS / processors,
        **tabled,
    )


# ---------------------------------------------------------------- collectives

COMPUTE = tuple(CODE[name] for name in OPS[:3])
EXCHANGED = AXES[2:]
START_S = 20e-6
"""Seconds that a collective takes to start."""
HOP_S = 10e-6
"""Seconds of a ring, for each node that it passes."""


@functools.cache
def span(sizes: MeshSizes, axis: str) -> tuple[int, int]:
    """The ranks of a group of the axis, and how far apart they are."""
    for axes in mesh_views(sizes).values():
        if axis in axes:
            return axes[axis], math.prod(list(axes.values())[list(axes).index(axis) + 1 :])
    return 1, 1


def send(operation: str, size: float, sizes: MeshSizes, rates: Rates, axis: str) -> float:
    """Seconds of a collective. `size` is the gathered whole, or the bytes that an all-reduce reduces or an
    exchange divides among all. Groups whose ranks are apart share the adapters of a node.
    """
    ranks, apart = span(sizes, axis)
    if ranks == 1:
        return 0.0
    sharing = min(apart, rates.gpus_a_node)
    local = min(ranks, max(1, rates.gpus_a_node // apart))
    nodes = -(-ranks // local)
    size *= 2 if operation == "all_reduce" else 1
    within, across = size * (local - 1) / local, size * (nodes - 1) / nodes
    if operation == "all_to_all":  # no ring: each part goes its own way
        within, across = size * (local - 1) / ranks, local * size * (ranks - local) / ranks
    return START_S + HOP_S * nodes + max(within / rates.link, across * sharing / rates.node_link)


@dataclass
class Step:
    """The predicted step."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of work by kind; communication whole, hidden or not."""
    exposed: float = 0.0
    model_flops: float = 0.0
    """Three times forward's: recomputation is no progress."""

    @property
    def bound_by(self) -> str:
        if self.parts["host"] >= 0.98 * self.seconds:
            return "host"
        named = {
            "matrix products": self.parts["matmul"],
            "attention": self.parts["attention"],
            "memory traffic": self.parts["pointwise"] + self.parts["optimizer"],
            "communication": self.exposed,
        }
        return max(named, key=lambda name: named[name])


def time_step(trace: Trace, ask: FakeRun, accumulation: int, rates: Rates) -> Step:
    work = _all_micro_batches(trace, accumulation)
    phases, blocks = (np.array([part[field] for part in trace.parts])[work["part"]] for field in (1, 2))
    fused, update = (blocks > 0) & ask.compiled, phases == "optimizer"
    seconds = _seconds(work, fused, update, ask, rates)
    computes = np.isin(work["code"], COMPUTE)
    step = Step(
        parts={name: float(seconds[(work["code"] == CODE[name]) & ~update].sum()) for name in OPS[:3]}
    )
    step.parts["optimizer"] = float(seconds[update].sum())
    step.parts["host"] = float((computes * np.where(fused, 0.3, 1.0)).sum() * rates.issue_s)
    # What follows the blocks of a chunked loss computes its gradients in forward.
    both = (blocks == AFTER) & bool(ask.config.memory.loss_chunk)
    step.model_flops = float((work["flops"] * np.where(both, 1, 3))[phases == "forward"].sum())
    _run_queues(step, work, phases, np.cumsum(seconds), ask, rates)
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
    code, width = work["code"], work["width"]
    fused_pointwise = (code == CODE["pointwise"]) & fused
    moved = np.where(fused_pointwise, work["fused_bytes"], work["bytes"])
    memory = moved / np.where(update & ask.offloads, rates.host_link, rates.bandwidth)
    products = rates.matmul * np.where(width >= 4, 0.5, 1.0)
    narrow = min(rates.attention, HOPPER_NARROW) if rates.name[0] == "H" else rates.attention
    attention = np.where(width > NARROW_HEADS, rates.attention, narrow)
    speed = np.where(code == CODE["attention"], attention, products)
    least = np.where(fused_pointwise, 0.0, rates.launch_s)
    longest = np.maximum(np.maximum(work["flops"] / speed, memory), least)
    return np.where(np.isin(code, COMPUTE), longest, 0.0)


def _run_queues(
    step: Step, work: np.ndarray, phases: np.ndarray, busy: np.ndarray, ask: FakeRun, rates: Rates
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
            axis = AXES[work["axis"][row]] or ("dp_replicate" if replicas else "dp_shard")
            seconds = send(operation, size, ask.sizes, rates, axis)
            if ask.offloads and operation != "all_reduce":
                # shards on the host are kept in fp32, computed in bf16
                seconds += 2 * size / ask.sizes.shard / rates.host_link
            communication += seconds
            if axis in EXCHANGED:
                compute += seconds
            elif operation == "all_gather":
                shard = gathered[group] = max(shard, copied_out) + seconds
            elif operation == "reduce_scatter":
                shard = max(shard, compute) + seconds
                reduced.append(shard)
            else:
                replicate = max(replicate, shard if ask.sizes.weight_shards > 1 else 0.0, compute) + seconds
    total = float(busy[-1])
    elapsed = max(compute + total - done, shard, replicate)
    step.exposed = elapsed - total
    step.parts["communication"] = communication
    # A collective beside a product takes some of its processors.
    step.seconds = elapsed + max(0.0, communication - step.exposed) * rates.contention

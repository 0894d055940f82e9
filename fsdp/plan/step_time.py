"""Seconds of a step: a roofline for each operation, links for each collective, in the order in which FSDP
issued them.

Three queues run side by side, as on a GPU: compute, the shard axis's collectives, the replicate axis's. A
gather waits for the copy-out before it, a block for its gather, a reduction for its block, the block after
next for that reduction: all read from the traced step. Not here: bytes alive (estimate.py).

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
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fsdp.base.devices import DEVICES, find
from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.dist.mesh import MeshSizes
from fsdp.plan.fake_step import FakeRun
from fsdp.plan.trace import AFTER, CODE, OPS, Trace

GIB = 2**30
NARROW_HEADS = 64
HOPPER_NARROW = 200
SUSTAINED, STREAMED, BUS = 0.9, 0.85, 0.8
FLOAT8 = 1402.6 / 794.5
"""Over bf16, of the same table's H100."""
UNMEASURED = ("gh200", "gb200", "b300", "mi300x", "mi250x")
SHORT_NAMES = ("a100", "a100-40gb", "h100", "h100-pcie", "h200", "b200", "l4", "l40s", *UNMEASURED, "cpu")
CHANNELS = 16
"""Processors that a collective occupies: NCCL's channels on a node of eight."""

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
    """Bytes and operations a second; memory is the bytes that a process can have. By default a CPU's."""

    name: str = "cpu"
    memory: float = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    matmul: float = 200e9
    matmul_fp32: float = 100e9
    attention: float = 50e9
    attention_narrow: float = 50e9
    """With heads of NARROW_HEADS or less."""
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
    shared: bool = True
    """Whether `memory` is a machine's, of all its ranks together."""

    @property
    def has_allocator(self) -> bool:
        return self.name != "cpu"

    def of_each(self, ranks: int) -> Rates:
        """With the memory that each of so many ranks can have."""
        part = min(ranks, self.gpus_a_node) if self.shared else 1
        return dataclasses.replace(self, memory=self.memory / part, shared=False)


def rates_for(config: Config) -> Rates:
    """The device that --plan.gpu names, with --plan's own figures over the table's."""
    plan = config.plan
    figures: dict[str, Any] = {
        "memory": plan.memory_gib * GIB,
        "link": plan.link_gb_s * 1e9 * BUS,
        "node_link": plan.node_link_gb_s * 1e9 * BUS,
        "gpus_a_node": plan.gpus_per_node,
        "bandwidth": plan.memory_gb_s * 1e9 * STREAMED,
        "matmul": plan.tflops * 1e12 * SUSTAINED,
    }
    figures = {name: value for name, value in figures.items() if value}
    base = Rates() if plan.gpu == "cpu" else _from_table(plan.gpu)
    return dataclasses.replace(base, **figures, shared=base.shared and "memory" not in figures)


def _from_table(name: str) -> Rates:
    device = find(name, typed=True)
    if device is None:
        raise ConfigError(
            f"--plan.gpu {name} is not in the table: {', '.join(SHORT_NAMES)}.", "--plan.gpu h100"
        )
    gib, products, attends, link, node_link, host_link, processors = TABLE[device.name]
    return Rates(
        name=device.name,
        memory=gib * GIB,
        matmul=products * 1e12 * SUSTAINED,
        matmul_fp32=products * 1e12 * SUSTAINED / 2,
        attention=attends * 1e12,
        attention_narrow=min(attends, HOPPER_NARROW) * 1e12 if device.name[0] == "H" else attends * 1e12,
        peak=device.bf16_tflops * 1e12,
        bandwidth=device.memory_gb_s * 1e9 * STREAMED,
        link=link * 1e9 * BUS,
        node_link=node_link * 1e9 * BUS,
        gpus_a_node=8,
        host_link=host_link * 1e9 * BUS,
        overhead=1.5 * GIB,
        launch_s=3e-6,
        issue_s=7e-6,
        contention=CHANNELS / processors,
        shared=False,
    )


# ---------------------------------------------------------------- collectives

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

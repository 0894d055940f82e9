"""One configuration on one number of ranks: its memory, its step, and what they leave out. Used by the
search and the bench.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fsdp import config as configuration
from fsdp.base.devices import NAMES
from fsdp.config import Config, PlanSection
from fsdp.dist.mesh import MeshSizes, plan_batch, resolve
from fsdp.parallel.shard import resolve_dtypes
from fsdp.plan.fake_step import FakeRun, subject_of, trace_step
from fsdp.plan.step_time import UNMEASURED, Rates, Step, rates_for, time_step
from fsdp.plan.trace import AFTER, COLUMN, KINDS, POOLS, Stretch, Trace

SCRATCH_MARGIN = 0.15
"""Of models of convolutions and recurrent layers on CUDA: docs/plan.md, "What is not counted"."""


@dataclass(frozen=True)
class Memory:
    peak: float
    """Bytes of tensors alive at once on the device, with the allocator's rounding."""
    reserved: float
    """Bytes that the allocator reserves for them, approximately."""
    kinds: Mapping[str, float]
    """The peak's parts."""
    moment: str
    """The part of the step that has the peak."""
    resting: float
    """Between steps."""
    host: float
    """Offloaded bytes in the host's memory."""
    state: float
    """Parameters and optimizer: what a checkpoint takes from this rank."""


def memory_of(trace: Trace, ask: FakeRun, read_ahead: float = 0.0) -> Memory:
    """`read_ahead`: bytes of inputs that are always present."""
    curve, last = trace.curve[:, : len(KINDS)].astype(float), trace.curve[-1]
    on_host = np.array([name in ask.host_kinds for name in KINDS])
    if on_host.any():
        # Two units' copies at most are back on the device in backward: the one that is used, and the next.
        # The head's and the last unit's stayed there.
        copies = curve[:, COLUMN["offloaded"]]
        unit = copies.max() / max(1, trace.blocks - 1)
        back = np.array([p.phase == "backward" and p.block not in (0, trace.blocks) for p in trace.parts])
        curve[:, COLUMN["activations"]] += np.where(back[trace.part_of], np.minimum(copies, 2 * unit), 0)
    host = float(curve[:, on_host].sum(1).max())
    curve[:, on_host] = 0
    curve[:, COLUMN["buffers"]] += read_ahead
    total, pools = curve.sum(1), trace.curve[:, [COLUMN[name] for name in POOLS]]
    highest = int(total.argmax())
    peak = float(total[highest])
    pooled = float((total - pools.sum(1)).max() + pools.max(0).sum())
    return Memory(
        peak=peak,
        reserved=max(peak, pooled * trace.packing),
        kinds=dict(zip(KINDS, curve[highest].tolist(), strict=True)),
        moment=describe(trace.parts[trace.part_of[highest]], trace.blocks),
        resting=float(total[-1]),
        host=host,
        state=float(last[COLUMN["parameters"]] + last[COLUMN["optimizer"]]),
    )


def describe(part: Stretch, blocks: int) -> str:
    if part.phase not in ("forward", "backward"):
        return part.phase
    before = "before the blocks" if part.phase == "forward" else "what follows the blocks"
    places = {0: before, AFTER: "after the blocks"}
    return f"{part.phase}, {places.get(part.block, f'block {part.block} of {blocks}')}"


@dataclass(frozen=True)
class Plan:
    """A configuration with its mesh and micro-batch filled in, and its predicted memory and time."""

    config: Config
    sizes: MeshSizes
    micro_batch: int
    accumulation: int
    memory: Memory
    step: Step
    rates: Rates
    needed: float
    """Bytes of a device: the allocator's reservation and what stands beside it. On CPU, of tensors."""
    tokens_per_sample: int
    margin: float
    """Fraction of the memory that it must leave free."""
    staged: float
    """Bytes of host memory that a save's copy takes on this rank."""

    @property
    def fits(self) -> bool:
        return self.needed * (1 + self.margin) <= self.rates.memory

    @property
    def samples_s(self) -> float:
        """Without the rows that pad the shares of ranks and micro-batches."""
        return self.config.train.global_batch / self.step.seconds

    @property
    def tokens_s(self) -> float:
        """Tokens a second and GPU; samples if the data has no tokens."""
        return self.samples_s * (self.tokens_per_sample or 1) / self.sizes.ranks

    @property
    def mfu(self) -> float:
        """As a run's own: operations on padded rows are no progress."""
        rows = self.micro_batch * self.accumulation * self.sizes.ranks
        useful = self.step.model_flops * self.config.train.global_batch / rows
        return useful / self.step.seconds / self.rates.peak


def plan_one(config: Config) -> Plan:
    """Plans the configuration as it is, without a search."""
    ask, accumulation = ask_for(config)
    return plan_of(ask, trace_step(ask), accumulation, rates_for(config))


def ask_for(config: Config) -> tuple[FakeRun, int]:
    """The run of rank 0, and its micro-batches per step."""
    rates = rates_for(config)
    ranks = config.plan.gpus or max(1, config.mesh.replicate) * max(1, config.mesh.shard)
    sizes = resolve(config.mesh, ranks, -(-ranks // rates.gpus_a_node))
    batch = plan_batch(config.train, ranks)
    return fake_run(config, sizes, batch.micro_batch, batch.accumulation, rates), batch.accumulation


def fake_run(config: Config, sizes: MeshSizes, micro_batch: int, accumulation: int, rates: Rates) -> FakeRun:
    """Rank 0 on the planned device. Of many micro-batches three are traced."""
    device = "cuda" if rates.has_allocator else "cpu"
    return FakeRun(for_target(config), sizes, 0, micro_batch, min(accumulation, 3), device)


def for_target(config: Config) -> Config:
    """The value of `auto` on the planned device, which may differ from this machine's."""
    if config.plan.gpu == "cpu":
        return config
    dtypes = resolve_dtypes(config.precision, torch.device("cuda"))
    # Replaced without the checks: the user's own values were checked before.
    precision = dataclasses.replace(config.precision, param=NAMES[dtypes.param])  # type: ignore[arg-type]
    return dataclasses.replace(config, precision=precision)


def plan_of(ask: FakeRun, trace: Trace, accumulation: int, rates: Rates) -> Plan:
    config, subject = ask.config, subject_of(ask.config.model, ask.config.data)
    read_ahead = 0.0
    if rates.has_allocator and config.data.workers:
        a_sample = sum(math.prod(shape) * dtype.itemsize for shape, dtype in subject.sample.values())
        ahead = max(config.data.prefetch, config.data.workers)
        read_ahead = float(a_sample * ask.micro_batch * accumulation * ahead)
    memory = memory_of(trace, ask, read_ahead)
    # A save copies the rank's part of the state: into pinned memory of the host, which on CPU is the
    # process's own.
    saves = config.checkpoint.every_steps or config.checkpoint.every_minutes or config.checkpoint.every_epochs
    staged = memory.state * ask.sizes.shard / ask.sizes.ranks if saves else 0.0
    wider = has_scratch(config) and config.plan.margin == PlanSection().margin
    return Plan(
        config=config,
        sizes=ask.sizes,
        micro_batch=ask.micro_batch,
        accumulation=accumulation,
        memory=memory,
        step=time_step(trace, ask, accumulation, rates),
        rates=rates.of_each(ask.sizes.ranks),
        needed=memory.reserved + rates.overhead if rates.has_allocator else memory.peak + staged,
        tokens_per_sample=subject.tokens_per_sample,
        margin=SCRATCH_MARGIN if wider else config.plan.margin,
        staged=staged,
    )


def has_scratch(config: Config) -> bool:
    return config.plan.gpu != "cpu" and subject_of(config.model, config.data).has_scratch


# ---------------------------------------------------------------- what is left out

COUNTED = (
    "memory.activation_checkpointing memory.activation_checkpointing_every "
    "memory.loss_chunk memory.cpu_offload memory.nvme_dir speed.compile speed.prefetch_forward "
    "speed.prefetch_backward comm.divide_by"
)
REASONS = {
    "memory.activation_offload": "its copies over the bus are counted as hidden",
    "memory.optimizer_offload": "states are counted on the device, and no copies over the bus",
    "memory.nvme": "what rests in files is counted as if it rested in memory",
    "speed.float8": "time counts compiled products as faster; memory and bytes sent are bf16's",
}


def notes(config: Config) -> Iterator[str]:
    """What no number of the plan follows, each with its reason."""
    if note := subject_of(config.model, config.data).note:
        yield note
    if config.plan.gpu.lower() in UNMEASURED:
        yield f"{config.plan.gpu}: its rates are unmeasured, those of the vendor's data sheet"
    if has_scratch(config):
        yield f"convolutions or recurrent layers: memory of their kernels; a margin of {SCRATCH_MARGIN:.0%}"
    flat = configuration.flatten(config)
    for name, spec in configuration.FIELDS.items():
        section = name.partition(".")[0]
        if (
            section in ("memory", "speed", "comm")
            and name not in COUNTED.split()
            and flat[name] != spec.default
        ):
            yield f"--{name} {flat[name]}: {REASONS.get(name, 'planned as if it were not given')}"
    if config.plan.gpu == "cpu":
        yield "what the process and its libraries take beside tensors: some 0.3 GiB and more"
    if config.train.eval_batch > config.train.micro_batch > 0:
        yield f"--train.eval_batch {config.train.eval_batch}: an evaluation's own peak"

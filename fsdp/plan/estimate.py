"""One configuration on one number of ranks: its memory, its step, and what they leave out. Used by the
search and the bench.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fsdp import config as configuration
from fsdp.base.digest import NAMES
from fsdp.base.errors import ConfigError
from fsdp.config import Config, PlanSection
from fsdp.dist.mesh import MeshSizes, plan_batch, resolve
from fsdp.parallel.shard import resolve_dtypes
from fsdp.plan.fake_runs import TracedStep, count
from fsdp.plan.model_shapes import Subject, subject_of
from fsdp.plan.rates import GIB, Rates, rates_for
from fsdp.plan.step_time import Setting, Step, time_step
from fsdp.plan.step_trace import FakeRun
from fsdp.plan.trace import COLUMN, HOST_KINDS, KINDS, POOLS, Segment

SCRATCH_MARGIN = 0.15
"""Of models of convolutions and recurrent layers on CUDA: docs/plan.md, "What is not counted"."""


OFFLOADED = KINDS.index("offloaded")
_NOTHING_BACK = (("before", 0), ("end", 1))
"""Places of the head and of the last unit, which stayed on the device."""


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
    curves = [(_on_device(segment, mask, unit), segment) for segment in counted.trace.segments]
    peaks = [(curve[curve.sum(1).argmax()], segment) for curve, segment in curves]
    pools = [segment.curve[:, [COLUMN[name] for name in POOLS]] for _, segment in curves]
    computation = max(
        float((curve.sum(1) - pool.sum(1)).max()) for (curve, _), pool in zip(curves, pools, strict=True)
    )
    apart_pools = float(np.max([pool.max(0) for pool in pools], axis=0).sum())
    at, segment = max(peaks, key=lambda pair: float(pair[0].sum()))
    phases: dict[str, float] = {}
    for kinds, one in peaks:
        phases[one.name.phase] = max(phases.get(one.name.phase, 0.0), float(kinds.sum()))
    last = counted.trace.segments[-1].curve[-1, : len(KINDS)]
    peak = float(at.sum())
    return Memory(
        peak=peak,
        reserved=max(peak, (computation + apart_pools) * counted.trace.packing),
        kinds=dict(zip(KINDS, at.tolist(), strict=True)),
        phases=phases,
        where=describe(segment, counted.trace.blocks),
        resting=float(last[mask].sum()),
        host=max(float(s.curve[:, : len(KINDS)][:, ~mask].sum(1).max()) for s in counted.trace.segments),
        state=float(last[[KINDS.index("parameters"), KINDS.index("optimizer")]].sum()),
    )


def _on_device(segment: Segment, mask: np.ndarray, unit: float) -> np.ndarray:
    curve = segment.curve[:, : len(KINDS)] * mask
    if not mask[OFFLOADED] and segment.name.phase == "backward" and segment.name.place not in _NOTHING_BACK:
        # Two units' copies at most are back on the device: the one that is used, and the next.
        curve[:, KINDS.index("activations")] += np.minimum(segment.curve[:, OFFLOADED], 2 * unit).astype(
            curve.dtype
        )
    return np.asarray(curve)


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


# ---------------------------------------------------------------- a plan


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
    samples: int
    """Of the global batch, without the rows that pad the shares of its ranks and micro-batches."""
    tokens_per_sample: int
    margin: float
    """Fraction of the memory that it must leave free."""
    staged: float = 0.0
    """Bytes of host memory that a save's copy takes on this rank."""

    @property
    def fits(self) -> bool:
        return self.needed * (1 + self.margin) <= self.rates.memory

    @property
    def samples_s(self) -> float:
        return self.samples / self.step.seconds

    @property
    def tokens_s(self) -> float:
        """Tokens a second and GPU; samples if the data has no tokens."""
        return self.samples_s * (self.tokens_per_sample or 1) / self.sizes.ranks

    @property
    def mfu(self) -> float:
        """As a run's own: operations on padded rows are no progress."""
        rows = self.micro_batch * self.accumulation * self.sizes.ranks
        useful = self.step.model_flops * self.samples / rows
        return useful / self.step.seconds / self.rates.peak if self.step.seconds else 0.0


def for_target(config: Config) -> Config:
    """The value of `auto` on the planned device, which may differ from this machine's."""
    if config.plan.gpu == "cpu":
        return config
    dtypes = resolve_dtypes(config.precision, torch.device("cuda"))
    # Replaced without the checks: the user's own values were checked before.
    precision = dataclasses.replace(config.precision, param=NAMES[dtypes.param])  # type: ignore[arg-type]
    return dataclasses.replace(config, precision=precision)


def is_compiled(config: Config) -> bool:
    return config.speed.compile == "true" or (config.speed.compile == "auto" and config.plan.gpu != "cpu")


def ranks_of(config: Config) -> int:
    return config.plan.gpus or max(1, config.mesh.replicate) * max(1, config.mesh.shard)


def check_device(config: Config) -> None:
    """Refuses flags that the device does not support, with a run's own messages."""
    float8, gpu = config.speed.float8, config.plan.gpu
    if float8 != "off" and gpu in ("a100", "a100-40gb"):
        raise ConfigError(
            f"--speed.float8 {float8} needs compute capability 8.9, and --plan.gpu {gpu} has 8.0.",
            "--speed.float8 off",
        )
    if config.memory.nvme != "off" and gpu != "cpu" and not config.memory.cpu_offload:
        raise ConfigError(
            f"--memory.nvme {config.memory.nvme} keeps the optimizer on the host, and --plan.gpu {gpu} is "
            "none.",
            "--memory.cpu_offload true",
        )


def ask_for(config: Config, ranks: int) -> FakeRun:
    rates = rates_for(config)
    check_device(config)
    nodes = -(-ranks // rates.gpus_a_node)
    sizes, batch = resolve(config.mesh, ranks, nodes), plan_batch(config.train, ranks)
    return fake_run(config, sizes, 0, batch.micro_batch, batch.accumulation, rates)


def fake_run(
    config: Config, sizes: MeshSizes, rank: int, micro_batch: int, accumulation: int, rates: Rates
) -> FakeRun:
    """The run of all blocks on the planned device. Of many micro-batches three are traced."""
    device = "cuda" if rates.has_allocator else "cpu"
    return FakeRun(for_target(config), sizes, rank, micro_batch, min(accumulation, 3), 0, device)


def plan_one(config: Config) -> Plan:
    """Plans the configuration as it is, without a search."""
    ranks = ranks_of(config)
    ask = ask_for(config, ranks)
    subject = subject_of(config.model, config.data)
    accumulation = plan_batch(config.train, ranks).accumulation
    return plan_of(ask, count(ask), subject, accumulation, rates_for(config))


def plan_of(ask: FakeRun, counted: TracedStep, subject: Subject, accumulation: int, rates: Rates) -> Plan:
    config, offload = ask.config, ask.config.memory.cpu_offload and rates.has_allocator
    memory = memory_of(counted, apart=rates.has_allocator, offload=offload)
    setting = Setting(
        ask.sizes,
        rates,
        is_compiled(config),
        accumulation,
        offload=offload,
        float8=config.speed.float8 != "off",
        chunked_loss=bool(config.memory.loss_chunk),
    )
    if rates.has_allocator:
        memory = memory.with_more(_read_ahead(config, subject, ask.micro_batch * accumulation))
    # A save copies the rank's part of the state: into pinned memory of the host, which on CPU is the
    # process's own.
    staged = memory.state * ask.sizes.shard / ask.sizes.ranks if _saves(config) else 0.0
    needed = memory.reserved + rates.overhead if rates.has_allocator else memory.peak + staged
    return Plan(
        config=config,
        sizes=ask.sizes,
        micro_batch=ask.micro_batch,
        accumulation=accumulation,
        memory=memory,
        step=time_step(counted, setting),
        rates=rates.of_each(ask.sizes.ranks),
        needed=needed,
        samples=config.train.global_batch,
        tokens_per_sample=subject.tokens_per_sample,
        margin=margin_of(config, subject),
        staged=staged,
    )


def uncounted_scratch(config: Config, subject: Subject) -> str:
    """Modules whose kernels take memory that no plan counts."""
    return "" if config.plan.gpu == "cpu" else subject.scratch


def margin_of(config: Config, subject: Subject) -> float:
    """--plan.margin, if it is given; more by default where kernels take memory that is not counted."""
    given = config.plan.margin
    wider = uncounted_scratch(config, subject) and given == PlanSection().margin
    return max(given, SCRATCH_MARGIN) if wider else given


def _read_ahead(config: Config, subject: Subject, samples: int) -> float:
    """Bytes of the batches that the loader copies to the device ahead of the current step."""
    if not config.data.workers:
        return 0.0
    a_sample = sum(math.prod(shape) * dtype.itemsize for shape, dtype in subject.sample.values())
    return float(a_sample * samples * max(config.data.prefetch, config.data.workers))


def _saves(config: Config) -> bool:
    section = config.checkpoint
    return bool(section.every_steps or section.every_minutes or section.every_epochs)


# ---------------------------------------------------------------- what is left out

_UNDERSTOOD = {
    "memory.activation_checkpointing", "memory.activation_checkpointing_every", "memory.activation_budget",
    "memory.loss_chunk", "memory.cpu_offload", "memory.nvme_dir", "speed.compile",
    "speed.prefetch_forward", "speed.prefetch_backward", "comm.divide_by",
}  # fmt: skip
_OWN = "counted as FSDP's own; what it takes itself is not known here"
_SAYS_WHY = {
    "memory.activation_offload": "its copies over the bus are counted as hidden",
    "memory.optimizer_offload": "optimizer states are counted on the device, and no copies over the bus",
    "memory.nvme": "what rests in files is counted as if it rested in memory",
    "speed.float8": "time counts compiled products as faster; memory and bytes sent are bf16's",
    "speed.float8_emulate": "time is that of hardware which has float8",
    "comm.all_reduce_hook": _OWN, "comm.all_gather": _OWN, "comm.reduce_scatter": _OWN,
}  # fmt: skip


def not_modelled(config: Config) -> Iterator[str]:
    """Flags that are set and that no number here follows: each is named."""
    flat = configuration.flatten(config)
    for name, spec in configuration.FIELDS.items():
        section = name.partition(".")[0]
        if section in ("memory", "speed", "comm") and name not in _UNDERSTOOD and flat[name] != spec.default:
            yield f"--{name} {flat[name]}: {_SAYS_WHY.get(name, 'planned as if it were not given')}"
    budget = config.memory.activation_budget
    if is_compiled(config) and budget < 1:
        yield f"--memory.activation_budget {budget:g}: kept as without a compiler"
    if config.plan.gpu == "cpu":
        yield "what the process and its libraries take beside tensors: some 0.3 GiB and more"
    if config.train.eval_batch > config.train.micro_batch > 0:
        yield f"--train.eval_batch {config.train.eval_batch}: an evaluation's own peak"


def gib(size: float) -> float:
    return size / GIB

"""One configuration on one number of ranks: its memory, its step, and what they leave out; and the search
among meshes, micro-batches and memory knobs.

Flags that the user set stay; the product of the rest is tried. Ranked by predicted samples a second among
those that fit with the margin; ties by less memory, then by name, so that the result is deterministic.
Where none fits, further axes are added, then offload.
Candidates that differ in the mesh alone share a trace: the best is planned again for itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fsdp import config as configuration
from fsdp.base.devices import NAMES
from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.config.sections import shown_value
from fsdp.distributed.mesh import MeshSizes, fewest_ranks, plan_batch, resolve
from fsdp.memory.account import resting_bytes
from fsdp.plan.fake_step import FakeRun, subject_of, trace_step
from fsdp.plan.step_time import UNMEASURED, Rates, Step, rates_for, time_step
from fsdp.plan.trace import AFTER, CODE, COLUMN, COLUMNS, HOST_KINDS, KINDS, POOLS, Stretch, Trace
from fsdp.run.job import model_of
from fsdp.shard.shard import resolve_dtypes, sharding_of

FURTHER = ("context", "tensor", "expert")
LARGEST_MICRO_BATCH = 64
MOST_RANKS = 4096


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
    host: float
    """Offloaded bytes in the host's memory."""
    state: float
    """Parameters and optimizer: what a checkpoint takes from this rank."""


def memory_of(trace: Trace, ask: FakeRun) -> Memory:
    curve, last = trace.curve[:, : len(KINDS)].astype(float), trace.curve[-1]
    on_host = np.array([ask.offloads and name in HOST_KINDS for name in KINDS])
    host = float(curve[:, on_host].sum(1).max())
    curve[:, on_host] = 0
    total, pools = curve.sum(1), trace.curve[:, [COLUMN[name] for name in POOLS]]
    highest = int(total.argmax())
    peak = float(total[highest])
    pooled = float((total - pools.sum(1)).max() + pools.max(0).sum())
    return Memory(
        peak=peak,
        reserved=max(peak, pooled * trace.packing),
        kinds=dict(zip(KINDS, curve[highest].tolist(), strict=True)),
        moment=describe(trace.parts[trace.part_of[highest]], trace.blocks),
        host=host,
        state=float(last[COLUMN["parameters"]] + last[COLUMN["optimizer"]]),
    )


def describe(part: Stretch, blocks: int) -> str:
    if part.phase not in ("forward", "backward"):
        return part.phase
    before = "before the blocks" if part.phase == "forward" else "what follows the blocks"
    names = {0: before, AFTER: "after the blocks"}
    return f"{part.phase}, {names.get(part.block, f'block {part.block} of {blocks}')}"


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
    staged: float
    """Bytes of host memory that a save's copy takes on this rank."""

    @property
    def fits(self) -> bool:
        return self.needed * (1 + self.config.plan.margin) <= self.rates.memory

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
        rows = self.micro_batch * self.accumulation * self.sizes.data
        useful = self.step.model_flops * self.config.train.global_batch / rows
        return useful / self.step.seconds / self.rates.peak

    @property
    def axes(self) -> tuple[str, ...]:
        """The further axes that the mesh has."""
        return tuple(axis for axis in FURTHER if getattr(self.sizes, axis) > 1)

    @property
    def searched(self) -> dict[str, Any]:
        """The fields that a search sets."""
        return {
            "mesh.strategy": self.sizes.strategy,
            "mesh.replicate": self.sizes.replicate,
            "mesh.shard": 0 if self.sizes.strategy == "ddp" else self.sizes.shard,
            "mesh.reshard_after_forward": self.config.mesh.reshard_after_forward,
            "memory.activation_checkpointing": self.config.memory.activation_checkpointing,
            **{f"mesh.{axis}": getattr(self.sizes, axis) for axis in self.axes},
            "memory.cpu_offload": self.config.memory.cpu_offload,
            "train.global_batch": self.config.train.global_batch,
            "train.micro_batch": self.micro_batch,
        }


def plan_one(config: Config) -> Plan:
    """Plans the configuration as it is, without a search."""
    ask, accumulation = ask_for(config)
    return plan_of(ask, trace_step(ask), accumulation)


def ask_for(config: Config) -> tuple[FakeRun, int]:
    """The run of rank 0, and its micro-batches per step."""
    ranks = config.plan.gpus or fewest_ranks(config.mesh)
    config = replace(config, plan=replace(config.plan, gpus=ranks))
    sizes = resolve(config.mesh, ranks, -(-ranks // rates_for(config).gpus_a_node))
    batch = plan_batch(config.train, sizes.data)
    return fake_run(config, sizes, batch.micro_batch, batch.accumulation), batch.accumulation


def fake_run(config: Config, sizes: MeshSizes, micro_batch: int, accumulation: int) -> FakeRun:
    """Rank 0 on the planned device. Of many micro-batches three are traced."""
    device, config = "cpu" if config.plan.gpu == "cpu" else "cuda", for_target(config)
    model = model_of(config, subject_of(config.model, config.data).spec)
    reshard = sharding_of(config, sizes, None, rates_for(config).memory).resharding(model)
    mesh = replace(config.mesh, reshard_after_forward=shown_value(reshard))
    return FakeRun(replace(config, mesh=mesh), sizes, 0, micro_batch, min(accumulation, 3), device)


def for_target(config: Config) -> Config:
    """The value of `auto` on the planned device, which may differ from this machine's."""
    if config.plan.gpu == "cpu":
        return config
    dtypes = resolve_dtypes(config.precision, torch.device("cuda"))
    # Replaced without the checks: the user's own values were checked before.
    precision = dataclasses.replace(config.precision, param=NAMES[dtypes.param])  # type: ignore[arg-type]
    return dataclasses.replace(config, precision=precision)


def plan_of(ask: FakeRun, trace: Trace, accumulation: int) -> Plan:
    config, subject = ask.config, subject_of(ask.config.model, ask.config.data)
    rates, memory = rates_for(config), memory_of(trace, ask)
    # into pinned memory of the host, which on CPU is the process's own
    staged = memory.state / ask.sizes.replicate
    return Plan(
        config=config,
        sizes=ask.sizes,
        micro_batch=ask.micro_batch,
        accumulation=accumulation,
        memory=memory,
        step=time_step(trace, ask, accumulation, rates),
        rates=rates,
        needed=memory.reserved + rates.overhead if rates.has_allocator else memory.peak + staged,
        tokens_per_sample=subject.tokens_per_sample,
        staged=staged,
    )


NOT_COUNTED = r"comm\.[ar]\w+|memory\.(\w+[nr]_offload|activation_budget|nvme)|speed\.(float8|attention)"


def notes(config: Config) -> Iterator[str]:
    """What no number of the plan follows: docs/plan.md has the reasons."""
    if note := subject_of(config.model, config.data).note:
        yield note
    if config.plan.gpu.lower() in UNMEASURED:
        yield f"{config.plan.gpu}: its rates are unmeasured, those of the vendor's data sheet"
    flat = configuration.flatten(config)
    for name, spec in configuration.FIELDS.items():
        if re.fullmatch(NOT_COUNTED, name) and flat[name] != spec.default:
            yield f"--{name} {flat[name]} (docs/plan.md)"


# ---------------------------------------------------------------- the search


def search(config: Config, fixed: frozenset[str]) -> list[Plan]:
    """The best plan of each candidate, best first, on --plan.gpus or the fewest ranks that fit, by doubling.
    `fixed` are the fields set in flags or a recipe.
    """
    mesh, searcher = config.mesh, _Search(config, fixed)
    if ranks := config.plan.gpus or mesh.replicate * mesh.shard * mesh.context * mesh.tensor:
        return searcher.plans(ranks)
    ranks, refusal = fewest_ranks(mesh), None
    while ranks <= MOST_RANKS:
        try:
            if (plans := searcher.plans(ranks))[0].fits:
                return plans
        except ConfigError as error:  # a mesh or a flag may need more ranks
            refusal = refusal or error
        ranks *= 2
    raise refusal or ConfigError(
        f"no number of {searcher.rates.name} up to {MOST_RANKS} holds this model.",
        "a --plan.gpu with more memory, or a lower --data.seq_len",
    )


class _Search:
    def __init__(self, config: Config, fixed: frozenset[str]) -> None:
        self.config, self.fixed, self.rates = config, fixed, rates_for(config)
        model = model_of(config, subject_of(config.model, config.data).spec)
        dtypes = resolve_dtypes(for_target(config).precision, torch.device("cpu"))
        self.state = float(resting_bytes(config.optim, model, dtypes.master, dtypes.frozen).total)
        """Bytes of parameters, gradients and optimizer: what shards divide."""
        self._traces: dict[Any, tuple[MeshSizes, Trace]] = {}

    def plans(self, ranks: int) -> list[Plan]:
        plans = self.tried(self.config, ranks)
        if not any(plan.fits for plan in plans) and (further := self.with_axes(ranks)):
            plans += self.tried(further, ranks)
        fixed = "memory.cpu_offload" in self.fixed or not self.rates.has_allocator
        if not fixed and not any(plan.fits for plan in plans):
            memory = replace(self.config.memory, cpu_offload=True)
            plans += self.tried(replace(self.config, memory=memory), ranks)
        plans.sort(key=_order)
        exact = list[Plan]()
        while plans[0].fits and plans[0] not in exact:
            plans[0] = plan_one(plans[0].config)
            exact.append(plans[0])
            plans.sort(key=_order)
        return plans

    def with_axes(self, ranks: int) -> Config | None:
        """The configuration with the smallest further axes with which the leanest plan fits; None without.

        An axis is doubled if that lowers the need: context where all but the activations of the smallest
        micro-batch fits, or else expert, then tensor, which stays within a node.
        """
        config, plan = self.config, self.leanest(self.config, ranks)
        while plan is not None and not plan.fits:
            rest = replace(plan, needed=plan.needed - plan.memory.kinds["activations"])
            for axis in ("context", "tensor") if rest.fits else ("expert", "tensor"):
                size = 2 * getattr(config.mesh, axis)
                if f"mesh.{axis}" in self.fixed or (axis == "tensor" and size > self.rates.gpus_a_node):
                    continue
                larger = replace(config, mesh=replace(config.mesh, **{axis: size}))
                leaner = self.leanest(larger, ranks)
                if leaner is not None and leaner.needed < plan.needed:
                    config, plan = larger, leaner
                    break
            else:
                return None
        return config if plan is not None else None

    def leanest(self, config: Config, ranks: int) -> Plan | None:
        """None where the model cannot be divided so."""
        try:
            return self.tried(config, ranks, lean=True)[0]
        except ConfigError:
            return None

    def tried(self, config: Config, ranks: int, *, lean: bool = False) -> list[Plan]:
        """The best plan of each mesh and knob that train.py accepts with the user's flags; of the leanest
        alone.
        """
        mesh, memory, offload = config.mesh, config.memory, config.memory.cpu_offload
        reshards, kinds = ["auto", "false"], ["none", "ops", "full"]
        if "mesh.reshard_after_forward" in self.fixed:
            reshards = [mesh.reshard_after_forward]
        if "memory.activation_checkpointing" in self.fixed:
            kinds = [memory.activation_checkpointing]
        if lean:
            reshards, kinds = reshards[:1], kinds[-1:]
        accepted, refusal = list[tuple[Config, MeshSizes]](), None
        data = ranks // (mesh.context * mesh.tensor)
        alone = data == ranks and mesh.expert == 1
        for shard, reshard, kind in itertools.product(self.shards(config, ranks), reshards, kinds):
            strategy = "fsdp" if shard == data else "ddp" if shard == 1 and alone else "hsdp"
            if shard == 1 and alone and ((offload and ranks > 1) or reshard != reshards[0]):
                continue  # nothing is gathered, and DDP does not offload
            if (strategy == "ddp" and reshard not in ("auto", "true")) or mesh.strategy not in (
                "auto",
                strategy,
            ):
                continue
            try:
                chosen = configuration.replace(
                    config,
                    mesh__strategy=strategy,
                    mesh__replicate=data // shard,
                    mesh__shard=shard,
                    mesh__reshard_after_forward=reshard,
                    memory__activation_checkpointing=kind,
                )
                accepted.append((chosen, resolve(chosen.mesh, ranks)))
            except ConfigError as error:
                refusal = refusal or error
        if not accepted and offload == self.config.memory.cpu_offload:
            raise refusal or ConfigError(
                f"--mesh.strategy {mesh.strategy}, replicate {mesh.replicate or 'any'} × shard "
                f"{mesh.shard or 'any'}: no such mesh has {ranks} ranks.",
                "--mesh.strategy auto --mesh.replicate 0 --mesh.shard 0",
            )
        return [self.best_of(*candidate) for candidate in (accepted[-1:] if lean else accepted)]

    def shards(self, config: Config, ranks: int) -> list[int]:
        """On one node all divisors; on several, whole nodes; one rank a shard for DDP; all ranks."""
        mesh, a_node = config.mesh, self.rates.gpus_a_node
        inner = mesh.context * mesh.tensor
        data, within, node = ranks // inner, ranks // inner if ranks <= a_node else 1, max(1, a_node // inner)
        shards = [mesh.shard] if mesh.shard else [*range(1, within + 1), *range(node, data, node), data]
        shards = sorted({n for n in shards if n and data % n == 0 and mesh.replicate in (0, data // n)})
        if mesh.shard or mesh.replicate or self.config.memory.cpu_offload:
            return shards
        return [n for n in shards if self.state / (n * inner) < self.rates.memory or n == data]

    def micro_batches(self, ranks: int, gpus: int) -> list[int]:
        train, powers = self.config.train, [2**k for k in range(LARGEST_MICRO_BATCH.bit_length())]
        if "train.global_batch" not in self.fixed:
            return [train.micro_batch] if train.micro_batch else powers
        rows = ranks * max(1, train.micro_batch)
        if train.global_batch % rows:
            raise ConfigError(
                f"--train.global_batch {train.global_batch} is no multiple of {rows}, the ranks times the "
                "micro-batch: a search plans no padded batch.",
                f"--train.global_batch {max(1, round(train.global_batch / rows)) * rows}, or "
                f"--plan.gpus {gpus} --plan.fix true",
            )
        if train.micro_batch:
            return [train.micro_batch]
        share = train.global_batch // ranks
        return sorted({n for n in (*powers, share) if share % n == 0 and n <= LARGEST_MICRO_BATCH})

    def best_of(self, chosen: Config, sizes: MeshSizes) -> Plan:
        """The fastest micro-batch that fits, or the smallest if none does."""
        plans, ranks = list[Plan](), sizes.data
        for micro in self.micro_batches(ranks, sizes.ranks):
            accumulation = 1
            if "train.global_batch" in self.fixed:
                accumulation = self.config.train.global_batch // ranks // micro
            train = replace(chosen.train, global_batch=micro * accumulation * ranks, micro_batch=micro)
            planned = replace(chosen, train=train, plan=replace(chosen.plan, gpus=sizes.ranks))
            ask = fake_run(planned, sizes, micro, accumulation)
            plans.append(plan_of(ask, self.trace(ask), accumulation))
            if not plans[-1].fits:
                break
        fitting = [plan for plan in plans if plan.fits]
        return max(fitting, key=lambda plan: (plan.samples_s, -plan.micro_batch)) if fitting else plans[0]

    def trace(self, ask: FakeRun) -> Trace:
        """From that of the first mesh of its kind, with the size of its shards."""
        sizes, memory, reshard = ask.sizes, ask.config.memory, ask.config.mesh.reshard_after_forward
        numeric = reshard not in ("true", "false", "step")
        alone = sizes if sizes.weight_shards == 1 or numeric else sizes.ranks
        axes = sizes.context, sizes.tensor, sizes.expert
        kind = alone, axes, reshard, memory.activation_checkpointing, memory.cpu_offload
        key = *kind, ask.micro_batch, ask.accumulation
        if key not in self._traces:
            self._traces[key] = sizes, trace_step(ask)
        base, trace = self._traces[key]
        return resharded(trace, base.weight_shards / sizes.weight_shards)


def _order(plan: Plan) -> tuple[Any, ...]:
    mesh, memory = plan.config.mesh, plan.config.memory
    names = plan.sizes.shard, mesh.reshard_after_forward, memory.activation_checkpointing, memory.cpu_offload
    return (not plan.fits, -round(plan.samples_s, 6) if plan.fits else plan.needed, plan.needed, *names)


def resharded(trace: Trace, factor: float) -> Trace:
    """The trace with shards `factor` times as large: resting shards, what replicas reduce, and what is copied
    into a gather. Buffers of one unit's shard stay as large as in the traced mesh.
    """
    sharded = [name in ("parameters", "gradients", "optimizer", "reduce pool") for name in COLUMNS]
    work = trace.work.copy()
    on_shards = np.array([part.phase in ("reduce", "optimizer") for part in trace.parts])[work["part"]]
    copied_in = (work["stream"] == 1) & (work["code"] == CODE["pointwise"])
    scale = np.where(on_shards | copied_in | (work["code"] == CODE["all_reduce"]), factor, 1.0)
    work["bytes"] *= scale
    work["fused_bytes"] *= scale
    return replace(trace, curve=trace.curve * np.where(sharded, factor, 1.0), work=work)

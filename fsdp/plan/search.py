"""Searches meshes, micro-batches and memory knobs for a number of ranks, and the number of ranks.

Flags that the user set stay; the rest is tried. Ranked by predicted samples a second among those that fit
with the margin; ties by less memory, then by name, so that the result is deterministic. Not here: how a plan
is counted or timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, without_hint
from fsdp.config import Config
from fsdp.dist.mesh import MeshSizes, resolve
from fsdp.parallel.comm import check_divide
from fsdp.plan.estimate import Plan, check_device, fake_run, for_target, plan_of, plan_one
from fsdp.plan.fake_step import trace_step
from fsdp.plan.rates import rates_for
from fsdp.plan.subject import parameter_bytes
from fsdp.plan.trace import CODE, COLUMNS, Trace

LARGEST_MICRO_BATCH = 64
MOST_RANKS = 4096
RECOUNTED = 3


@dataclass(frozen=True)
class Choice:
    """All but the micro-batch."""

    sizes: MeshSizes
    reshard: str
    checkpointing: str
    offload: bool

    def config(self, config: Config) -> Config:
        sizes = self.sizes
        mesh = replace(
            config.mesh,
            strategy=sizes.strategy,
            replicate=sizes.replicate,
            shard=sizes.shard,
            reshard_after_forward=self.reshard,
        )
        changes: dict[str, Any] = {
            "activation_checkpointing": self.checkpointing,
            "cpu_offload": self.offload,
        }
        return replace(config, mesh=mesh, memory=replace(config.memory, **changes))


def search(config: Config, given: frozenset[str]) -> list[Plan]:
    """The best plan of each choice, best first, on --plan.gpus or the fewest ranks that fit. `given` are the
    fields set in flags or a recipe.
    """
    return _Search(config, given).run()


class _Search:
    def __init__(self, config: Config, given: frozenset[str]) -> None:
        self.config, self.given, self.rates = config, given, rates_for(config)
        check_device(config)
        self.state = parameter_bytes(for_target(config))
        self._traces: dict[tuple[Choice, int, bool], Trace] = {}

    def run(self) -> list[Plan]:
        mesh = self.config.mesh
        ranks = self.config.plan.gpus or mesh.replicate * mesh.shard
        plans = self.plans(self.accepted(ranks)) if ranks else self.on_fewest_ranks()
        # The first few are planned for themselves: extrapolated sizes are rounded otherwise.
        plans[:RECOUNTED] = [plan_one(plan.config) if plan.fits else plan for plan in plans[:RECOUNTED]]
        return sorted(plans, key=_order)

    def on_fewest_ranks(self) -> list[Plan]:
        """On the first number of ranks on which a choice fits, by doubling."""
        mesh, refusal, searched = self.config.mesh, None, False
        least = max(1, mesh.replicate) * max(1, mesh.shard)
        for ranks in (least * 2**k for k in range(MOST_RANKS.bit_length()) if least * 2**k <= MOST_RANKS):
            shards = 1 if mesh.strategy == "ddp" else mesh.shard or ranks // max(1, mesh.replicate)
            if self.state / shards >= self.rates.memory and not self.config.memory.cpu_offload:
                continue
            try:
                choices = self.accepted(ranks)
            except ConfigError as error:  # a mesh or a flag may need more ranks
                refusal = refusal or (ranks, error)
                continue
            searched, refusal = True, None
            if any(plan.fits for plan in self.plans(_least_memory(choices))):
                return self.plans(choices)
        if refusal is not None and not searched:
            raise refusal[1]
        reason, hint = "", "--plan.gpu with more memory, or --data.seq_len lower"
        if refusal is not None:
            reason = f" {refusal[0]} ranks and more are refused: {without_hint(refusal[1])}"
            hint = f"{refusal[1].hint}, or --plan.gpu with more memory"
        raise ConfigError(
            f"no number of {self.rates.name} up to {MOST_RANKS} holds this model.{reason}", hint
        )

    def plans(self, choices: Sequence[Choice]) -> list[Plan]:
        plans = [self.best_of(choice, choices) for choice in choices]
        if not any(plan.fits for plan in plans) and "memory.cpu_offload" not in self.given:
            sharded = [replace(choice, offload=True) for choice in choices if choice.sizes.strategy != "ddp"]
            offloaded = [choice for choice in sharded if self.refusal(choice) is None]
            if self.rates.has_allocator:
                plans += [self.best_of(choice, offloaded) for choice in offloaded]
        return sorted(plans, key=_order)

    # ------------------------------------------------------------ what is tried

    def accepted(self, ranks: int) -> list[Choice]:
        """What train.py accepts with the user's flags; if that is nothing, raises why."""
        self.check_batch(ranks)
        mesh, memory = self.config.mesh, self.config.memory
        reshards, kinds = [mesh.reshard_after_forward], [memory.activation_checkpointing]
        if "mesh.reshard_after_forward" not in self.given:
            reshards = ["true", "false"]
        if "memory.activation_checkpointing" not in self.given:
            kinds = ["none", "ops", "full"]
        choices = [
            Choice(sizes, "true" if sizes.strategy == "ddp" else reshard, kind, memory.cpu_offload)
            for sizes in self.meshes(ranks)
            for reshard in (reshards if sizes.shard > 1 else reshards[:1])
            for kind in kinds
        ]
        refusals = [self.refusal(choice) for choice in choices]
        if None not in refusals:
            raise next(refusal for refusal in refusals if refusal is not None)
        return [choice for choice, refusal in zip(choices, refusals, strict=True) if refusal is None]

    def refusal(self, choice: Choice) -> ConfigError | None:
        chosen = choice.config(self.config)
        try:
            configuration.check(chosen)
            resolve(chosen.mesh, choice.sizes.ranks)
            check_divide(chosen.comm, choice.sizes)
        except ConfigError as error:
            return error
        return None

    def check_batch(self, ranks: int) -> None:
        """Refuses what a run would pad in each step: the search offers whole batches only."""
        batch, micro = self.config.train.global_batch, max(1, self.config.train.micro_batch)
        if "train.global_batch" in self.given and batch % (ranks * micro):
            near = max(1, round(batch / ranks / micro)) * ranks * micro
            raise ConfigError(
                f"--train.global_batch {batch} is no multiple of {ranks} ranks × micro-batches of {micro}: a "
                "search plans no padded batch.",
                f"--train.global_batch {near}, or --plan.gpus {ranks} --plan.fix true",
            )

    def meshes(self, ranks: int) -> list[MeshSizes]:
        """One node's divisors; on several whole nodes, by doubling; one rank a shard for DDP; all ranks."""
        mesh, offload, a_node = self.config.mesh, self.config.memory.cpu_offload, self.rates.gpus_a_node
        shards = [mesh.shard] if mesh.shard else list(range(1, ranks + 1))
        if not mesh.shard and ranks > a_node:
            shards = sorted({1, ranks, *(a_node * 2**k for k in range(20) if a_node * 2**k <= ranks)})
        shards = [n for n in shards if ranks % n == 0 and mesh.replicate in (0, ranks // n)]
        if not (mesh.shard or mesh.replicate or offload):
            shards = [n for n in shards if self.state / n < self.rates.memory or n == ranks]
        # DDP neither offloads nor gathers.
        no_ddp = offload or (
            "mesh.reshard_after_forward" in self.given and mesh.reshard_after_forward != "true"
        )
        sizes = [
            MeshSizes("fsdp" if n == ranks else "ddp" if n == 1 else "hsdp", ranks // n, n) for n in shards
        ]
        sizes = [
            s for s in sizes if mesh.strategy in ("auto", s.strategy) and not (no_ddp and s.strategy == "ddp")
        ]
        if not sizes:
            raise ConfigError(
                f"--mesh.strategy {mesh.strategy}, replicate {mesh.replicate or 'any'} × shard "
                f"{mesh.shard or 'any'}: no such mesh has {ranks} ranks.",
                "--mesh.strategy auto --mesh.replicate 0 --mesh.shard 0",
            )
        return sizes

    def micro_batches(self, ranks: int) -> list[int]:
        if self.config.train.micro_batch:
            return [self.config.train.micro_batch]
        powers = [2**k for k in range(LARGEST_MICRO_BATCH.bit_length())]
        if "train.global_batch" not in self.given:
            return powers
        share = self.config.train.global_batch // ranks
        return sorted({n for n in (*powers, share) if share % n == 0 and n <= LARGEST_MICRO_BATCH})

    # ------------------------------------------------------------ trying it

    def best_of(self, choice: Choice, choices: Sequence[Choice]) -> Plan:
        """The fastest micro-batch that fits, or the smallest if none does. Of choices that differ in the mesh
        alone the one with the largest shards is traced.
        """
        is_ddp, ranks = choice.sizes.strategy == "ddp", choice.sizes.ranks
        alike = [
            c
            for c in choices
            if replace(c, sizes=choice.sizes) == choice and (c.sizes.strategy == "ddp") == is_ddp
        ]
        first = min(alike, key=lambda c: c.sizes.shard)
        if choice.reshard not in ("true", "false", "step") or first.sizes.shard == 1:
            first = choice
        plans = list[Plan]()
        for micro in self.micro_batches(ranks):
            accumulation = 1
            if "train.global_batch" in self.given:
                accumulation = self.config.train.global_batch // ranks // micro
            chosen = choice.config(self.config)
            train = replace(chosen.train, global_batch=micro * accumulation * ranks, micro_batch=micro)
            planned = replace(chosen, train=train, plan=replace(chosen.plan, gpus=ranks))
            trace = self.trace(first, micro, accumulation > 1)
            if first.sizes.shard != choice.sizes.shard:
                trace = resharded(trace, first.sizes.shard / choice.sizes.shard)
            ask = fake_run(planned, choice.sizes, micro, accumulation, self.rates)
            plans.append(plan_of(ask, trace, accumulation, self.rates))
            if not plans[-1].fits:
                break
        fitting = [plan for plan in plans if plan.fits]
        return max(fitting, key=lambda plan: (plan.samples_s, -plan.micro_batch)) if fitting else plans[0]

    def trace(self, choice: Choice, micro: int, many: bool) -> Trace:
        """Activations are affine in the micro-batch: two of them are traced."""
        low, *more = self.micro_batches(choice.sizes.ranks)
        if micro != low and micro != more[0]:
            share = (micro - low) / (more[0] - low)
            ends = self._traced(choice, low, many), self._traced(choice, more[0], many)
            if (trace := extrapolated(*ends, share)) is not None:
                return trace
        return self._traced(choice, micro, many)

    def _traced(self, choice: Choice, micro: int, many: bool) -> Trace:
        key = (choice, micro, many)
        if key not in self._traces:
            ask = fake_run(choice.config(self.config), choice.sizes, micro, 3 if many else 1, self.rates)
            self._traces[key] = trace_step(ask)
        return self._traces[key]


def _order(plan: Plan) -> tuple[Any, ...]:
    mesh, memory = plan.config.mesh, plan.config.memory
    names = (
        plan.sizes.shard,
        mesh.reshard_after_forward,
        memory.activation_checkpointing,
        memory.cpu_offload,
    )
    return (not plan.fits, -round(plan.samples_s, 6) if plan.fits else plan.needed, plan.needed, *names)


def _least_memory(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that free and recompute most."""
    kinds, reshards = ["full", "ops", "none"], ["true", "false", "step"]
    kind = min((c.checkpointing for c in choices), key=kinds.index)
    reshard = min((c.reshard for c in choices), key=lambda r: reshards.index(r) if r in reshards else 0)
    return [
        c for c in choices if c.checkpointing == kind and (c.reshard == reshard or c.sizes.strategy == "ddp")
    ]


def extrapolated(low: Trace, high: Trace, share: float) -> Trace | None:
    """Of traces that differ in sizes alone, each size at `share` of the way; None if they differ in more."""
    if low.curve.shape != high.curve.shape or not np.array_equal(low.work["code"], high.work["code"]):
        return None
    work = low.work.copy()
    for name in ("flops", "bytes", "fused_bytes"):
        work[name] = np.maximum(0, low.work[name] + share * (high.work[name] - low.work[name]))
    curve = low.curve + share * (high.curve - low.curve)
    return replace(low, curve=curve, work=work, packing=max(low.packing, high.packing))


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

"""Searches meshes, micro-batches and memory knobs for a number of ranks, and the number of ranks.

Flags that the user set stay; the product of the rest is tried. Ranked by predicted samples a second among
those that fit with the margin; ties by less memory, then by name, so that the result is deterministic.
Candidates that differ in the mesh alone share a trace, and all but two micro-batches are extrapolated: the
best is planned again for itself. Not here: how a plan is counted or timed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, without_hint
from fsdp.config import Config
from fsdp.dist.mesh import MeshSizes, resolve
from fsdp.memory.account import resting_bytes
from fsdp.parallel.comm import check_divide
from fsdp.parallel.shard import resolve_dtypes
from fsdp.plan.estimate import Plan, fake_run, for_target, plan_of, plan_one
from fsdp.plan.fake_step import subject_of, trace_step
from fsdp.plan.step_time import rates_for
from fsdp.plan.trace import CODE, COLUMNS, Trace
from fsdp.run.job import model_of

LARGEST_MICRO_BATCH = 64
MOST_RANKS = 4096


def search(config: Config, fixed: frozenset[str]) -> list[Plan]:
    """The best plan of each candidate, best first, on --plan.gpus or the fewest ranks that fit, by doubling.
    `fixed` are the fields set in flags or a recipe.
    """
    mesh, searcher = config.mesh, _Search(config, fixed)
    if ranks := config.plan.gpus or mesh.replicate * mesh.shard:
        return searcher.plans(ranks)
    ranks, refusal = max(1, mesh.replicate) * max(1, mesh.shard), None
    while ranks <= MOST_RANKS:
        try:
            if searcher.may_hold(ranks) and (plans := searcher.plans(ranks))[0].fits:
                return plans
        except ConfigError as error:  # a mesh or a flag may need more ranks
            refusal = refusal or error
        ranks *= 2
    reason = f": {without_hint(refusal)}" if refusal else "."
    hint = refusal.hint if refusal else "--plan.gpu with more memory, or --data.seq_len lower"
    raise ConfigError(f"no number of {searcher.rates.name} up to {MOST_RANKS} holds this model{reason}", hint)


class _Search:
    def __init__(self, config: Config, fixed: frozenset[str]) -> None:
        self.config, self.fixed, self.rates = config, fixed, rates_for(config)
        model = model_of(config, subject_of(config.model, config.data).spec)
        dtypes = resolve_dtypes(for_target(config).precision, torch.device("cpu"))
        self.state = float(resting_bytes(config.optim, model, dtypes.master, dtypes.frozen).total)
        """Bytes of parameters, gradients and optimizer: what shards divide."""
        self._traces: dict[Any, Trace] = {}
        self._bases: dict[Any, MeshSizes] = {}

    def may_hold(self, ranks: int) -> bool:
        mesh = self.config.mesh
        shards = 1 if mesh.strategy == "ddp" else mesh.shard or ranks // max(1, mesh.replicate)
        return self.state / shards < self.rates.memory or self.config.memory.cpu_offload

    def plans(self, ranks: int) -> list[Plan]:
        candidates, refusal = self.candidates(ranks, self.config.memory.cpu_offload)
        if refusal and not candidates:
            raise refusal
        plans = [self.best_of(*candidate) for candidate in candidates]
        if (
            self.rates.has_allocator
            and not any(p.fits for p in plans)
            and not self.sets("memory.cpu_offload")
        ):
            plans += [self.best_of(*candidate) for candidate in self.candidates(ranks, offload=True)[0]]
        plans.sort(key=_order)
        exact = list[Plan]()
        while plans[0].fits and plans[0] not in exact:
            plans[0] = plan_one(plans[0].config)
            exact.append(plans[0])
            plans.sort(key=_order)
        return plans

    def sets(self, name: str) -> bool:
        return name in self.fixed

    # ------------------------------------------------------------ what is tried

    def candidates(
        self, ranks: int, offload: bool
    ) -> tuple[list[tuple[Config, MeshSizes, bool]], ConfigError | None]:
        """What train.py accepts with the user's flags, whether some have replicas, and the first refusal."""
        self.check_batch(ranks)
        mesh, memory = self.config.mesh, self.config.memory
        given = mesh.reshard_after_forward
        reshards = [given] if self.sets("mesh.reshard_after_forward") else ["true", "false"]
        given = memory.activation_checkpointing
        kinds = [given] if self.sets("memory.activation_checkpointing") else ["none", "ops", "full"]
        accepted, refusal = list[tuple[Config, MeshSizes]](), None
        for shard, reshard, kind in itertools.product(self.shards(ranks), reshards, kinds):
            strategy = "fsdp" if shard == ranks else "ddp" if shard == 1 else "hsdp"
            if shard == 1 and ((offload and ranks > 1) or reshard != reshards[0]):
                continue  # nothing is gathered, and DDP does not offload
            if (strategy == "ddp" and reshard != "true") or mesh.strategy not in ("auto", strategy):
                continue
            try:
                chosen = configuration.replace(
                    self.config,
                    mesh__strategy=strategy,
                    mesh__replicate=ranks // shard,
                    mesh__shard=shard,
                    mesh__reshard_after_forward=reshard,
                    memory__activation_checkpointing=kind,
                    memory__cpu_offload=offload,
                )
                check_divide(chosen.comm, sizes := resolve(chosen.mesh, ranks))
                accepted.append((chosen, sizes))
            except ConfigError as error:
                refusal = refusal or error
        if not accepted and refusal is None:
            refusal = ConfigError(
                f"--mesh.strategy {mesh.strategy}, replicate {mesh.replicate or 'any'} × shard "
                f"{mesh.shard or 'any'}: no such mesh has {ranks} ranks.",
                "--mesh.strategy auto --mesh.replicate 0 --mesh.shard 0",
            )
        replicas = any(sizes.strategy == "hsdp" for _, sizes in accepted)
        return [(chosen, sizes, replicas) for chosen, sizes in accepted], refusal

    def check_batch(self, ranks: int) -> None:
        """Refuses what a run would pad in each step: the search offers whole batches only."""
        batch, micro = self.config.train.global_batch, max(1, self.config.train.micro_batch)
        if self.sets("train.global_batch") and batch % (ranks * micro):
            near = max(1, round(batch / ranks / micro)) * ranks * micro
            raise ConfigError(
                f"--train.global_batch {batch} is no multiple of {ranks} ranks × micro-batches of {micro}: a "
                "search plans no padded batch.",
                f"--train.global_batch {near}, or --plan.gpus {ranks} --plan.fix true",
            )

    def shards(self, ranks: int) -> list[int]:
        """One node's divisors; on several whole nodes, by doubling; one rank a shard for DDP; all ranks."""
        mesh, a_node = self.config.mesh, self.rates.gpus_a_node
        shards = [mesh.shard] if mesh.shard else list(range(1, ranks + 1))
        if not mesh.shard and ranks > a_node:
            shards = sorted({1, ranks, *(a_node * 2**k for k in range(20) if a_node * 2**k <= ranks)})
        shards = [n for n in shards if ranks % n == 0 and mesh.replicate in (0, ranks // n)]
        if mesh.shard or mesh.replicate or self.config.memory.cpu_offload:
            return shards
        return [n for n in shards if self.state / n < self.rates.memory or n == ranks]

    def micro_batches(self, ranks: int) -> list[int]:
        if self.config.train.micro_batch:
            return [self.config.train.micro_batch]
        powers = [2**k for k in range(LARGEST_MICRO_BATCH.bit_length())]
        if not self.sets("train.global_batch"):
            return powers
        share = self.config.train.global_batch // ranks
        return sorted({n for n in (*powers, share) if share % n == 0 and n <= LARGEST_MICRO_BATCH})

    # ------------------------------------------------------------ trying it

    def best_of(self, chosen: Config, sizes: MeshSizes, replicas: bool) -> Plan:
        """The fastest micro-batch that fits, or the smallest if none does."""
        plans, ranks = list[Plan](), sizes.ranks
        for micro in self.micro_batches(ranks):
            accumulation = 1
            if self.sets("train.global_batch"):
                accumulation = self.config.train.global_batch // ranks // micro
            train = replace(chosen.train, global_batch=micro * accumulation * ranks, micro_batch=micro)
            planned = replace(chosen, train=train, plan=replace(chosen.plan, gpus=ranks))
            trace = self.trace(planned, sizes, accumulation > 1, replicas)
            ask = fake_run(planned, sizes, micro, accumulation, self.rates)
            plans.append(plan_of(ask, trace, accumulation, self.rates))
            if not plans[-1].fits:
                break
        fitting = [plan for plan in plans if plan.fits]
        return max(fitting, key=lambda plan: (plan.samples_s, -plan.micro_batch)) if fitting else plans[0]

    def trace(self, planned: Config, sizes: MeshSizes, many: bool, replicas: bool) -> Trace:
        """From that of the first mesh of its kind. Activations are affine in the micro-batch: two of them are
        traced.
        """
        mesh, memory = planned.mesh, planned.memory
        reshard = mesh.reshard_after_forward
        alone = sizes if sizes.shard == 1 or reshard not in ("true", "false", "step") else None
        key = alone, replicas, reshard, memory.activation_checkpointing, memory.cpu_offload, many
        base = self._bases.setdefault(key, sizes)

        def traced(micro: int) -> Trace:
            if (key, micro) not in self._traces:
                ask = fake_run(planned, base, micro, 3 if many else 1, self.rates)
                self._traces[key, micro] = trace_step(ask)
            return self._traces[key, micro]

        micro, (low, *more) = planned.train.micro_batch, self.micro_batches(sizes.ranks)
        trace = None
        if micro != low and micro != more[0]:
            trace = extrapolated(traced(low), traced(more[0]), (micro - low) / (more[0] - low))
        return resharded(trace or traced(micro), base.shard / sizes.shard)


def _order(plan: Plan) -> tuple[Any, ...]:
    mesh, memory = plan.config.mesh, plan.config.memory
    names = plan.sizes.shard, mesh.reshard_after_forward, memory.activation_checkpointing, memory.cpu_offload
    return (not plan.fits, -round(plan.samples_s, 6) if plan.fits else plan.needed, plan.needed, *names)


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

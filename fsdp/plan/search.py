"""Searches meshes, micro-batches and memory knobs for a number of ranks, and the number of ranks.

Flags that the user set stay; the rest is tried. Ranked by predicted samples a second among those that fit
with the margin; ties by less memory, then by name, so that the result is deterministic. Not here: how a plan
is counted or timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, without_hint
from fsdp.config import Config
from fsdp.dist.mesh import MeshSizes, Strategy, resolve
from fsdp.parallel.comm import check_divide
from fsdp.plan.estimate import Plan, check_device, fake_run, for_target, plan_of, plan_one
from fsdp.plan.fake_runs import Family, Runs, run_all
from fsdp.plan.model_shapes import Subject, subject_of
from fsdp.plan.rates import Rates, rates_for
from fsdp.plan.step_trace import TooFewBlocks, parameter_bytes, run_whole

LARGEST_MICRO_BATCH = 64
MOST_RANKS = 4096
RECOUNTED = 3

Given = frozenset[str]
"""Names of the fields set in flags or a recipe."""


@dataclass(frozen=True)
class Choice:
    """All but the micro-batch."""

    sizes: MeshSizes
    reshard: str
    checkpointing: str
    offload: bool

    def config(self, config: Config) -> Config:
        mesh = dataclasses.replace(
            config.mesh,
            strategy=self.sizes.strategy,
            replicate=self.sizes.replicate,
            shard=self.sizes.shard,
            reshard_after_forward=self.reshard,
        )
        changes: dict[str, Any] = {
            "activation_checkpointing": self.checkpointing,
            "cpu_offload": self.offload,
        }
        memory = dataclasses.replace(config.memory, **changes)
        return dataclasses.replace(config, mesh=mesh, memory=memory)


@dataclass(frozen=True)
class SearchResult:
    """The best plan of each choice, best first; `fitting` of them fit."""

    plans: tuple[Plan, ...]
    ranks: int

    @property
    def fitting(self) -> tuple[Plan, ...]:
        return tuple(plan for plan in self.plans if plan.fits)


def search(config: Config, given: Given) -> SearchResult:
    """Searches for --plan.gpus, or for the fewest ranks that fit."""
    rates = rates_for(config)
    check_device(config)
    asked = config.plan.gpus or config.mesh.replicate * config.mesh.shard
    ranks = asked or _fewest_ranks(config, given, rates)
    return _search(config, given, _accepted(config, given, ranks, rates), rates)


def _fewest_ranks(config: Config, given: Given, rates: Rates) -> int:
    """The first number of ranks on which a choice fits, of those that the flags allow."""
    searched, refused = False, list[tuple[int, ConfigError]]()
    for ranks in _numbers_of_ranks(config, rates):
        try:
            choices = _accepted(config, given, ranks, rates)
        except ConfigError as error:  # a mesh or a flag may need more ranks
            refused.append((ranks, error))
            continue
        if _search(config, given, choices, rates, frugal=True).fitting:
            return ranks
        searched = True
        refused.clear()
    raise _none_holds(rates, searched, refused)


def _none_holds(rates: Rates, searched: bool, refused: Sequence[tuple[int, ConfigError]]) -> ConfigError:
    """`refused`: the numbers above those that were searched, each with its reason."""
    reason, hint = "", "--plan.gpu with more memory, or --data.seq_len lower"
    if refused:
        ranks, error = refused[0]
        if not searched:
            return error
        reason = f" {ranks} ranks and more are refused: {without_hint(error)}"
        hint = f"{error.hint}, or --plan.gpu with more memory"
    return ConfigError(f"no number of {rates.name} up to {MOST_RANKS} holds this model.{reason}", hint)


def _numbers_of_ranks(config: Config, rates: Rates) -> Iterator[int]:
    """Numbers of ranks by doubling, from the first whose shards fit; replicas of what does not fit need
    no less.
    """
    mesh = config.mesh
    least = max(1, mesh.replicate) * max(1, mesh.shard)
    for ranks in (least * 2**k for k in range(MOST_RANKS.bit_length())):
        shards = 1 if mesh.strategy == "ddp" else mesh.shard or ranks // max(1, mesh.replicate)
        held = parameter_bytes(for_target(config)) / shards < rates.memory or config.memory.cpu_offload
        if ranks <= MOST_RANKS and held:
            yield ranks


def _accepted(config: Config, given: Given, ranks: int, rates: Rates) -> list[Choice]:
    """What is tried on this many ranks; if that is nothing, raises why."""
    check_batch(config, given, ranks)
    return _allowed(config, _choices(config, given, ranks, rates))


def _search(
    config: Config, given: Given, choices: Sequence[Choice], rates: Rates, *, frugal: bool = False
) -> SearchResult:
    choices = _least_memory(choices) if frugal else choices
    plans = _best_of_each(config, given, choices, rates)
    if not any(plan.fits for plan in plans) and "memory.cpu_offload" not in given and rates.has_allocator:
        offloaded = [replace(choice, offload=True) for choice in choices if choice.sizes.strategy != "ddp"]
        plans += _best_of_each(config, given, [c for c in offloaded if _refusal(config, c) is None], rates)
    plans.sort(key=_order)
    if not frugal:
        # The first few are planned for themselves: a family's rounding may change their order.
        plans[:RECOUNTED] = [plan_one(plan.config) if plan.fits else plan for plan in plans[:RECOUNTED]]
    return SearchResult(tuple(sorted(plans, key=_order)), choices[0].sizes.ranks)


def _order(plan: Plan) -> tuple[Any, ...]:
    mesh, memory = plan.config.mesh, plan.config.memory
    names = (
        plan.sizes.shard,
        mesh.reshard_after_forward,
        memory.activation_checkpointing,
        memory.cpu_offload,
    )
    speed = round(plan.samples_s, 6)
    return (not plan.fits, -speed if plan.fits else plan.needed, plan.needed, *names)


def _least_memory(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that free and recompute most."""
    orders = ("full", "ops", "none"), ("true", "false", "step")
    kind = min((c.checkpointing for c in choices), key=orders[0].index)
    frees = min((c.reshard for c in choices), key=lambda how: orders[1].index(how) if how in orders[1] else 0)
    return [
        c for c in choices if c.checkpointing == kind and (c.reshard == frees or c.sizes.strategy == "ddp")
    ]


def check_batch(config: Config, given: Given, ranks: int) -> None:
    """Refuses what a run would pad in each step: the search offers whole batches only."""
    batch, micro = config.train.global_batch, config.train.micro_batch
    if "train.global_batch" not in given:
        return
    share, padded, fix = -(-batch // ranks), "", ""
    if micro <= share:  # a run accepts it
        padded = ", and a search plans no padded batch"
        fix = f", or --plan.gpus {ranks} --plan.fix true"
    if batch % ranks:
        whole = ranks * max(1, micro)
        near = max(1, round(batch / whole)) * whole
        raise ConfigError(
            f"--train.global_batch {batch} over {ranks} ranks is {batch / ranks:.4g} samples a rank: no "
            f"mesh divides it{padded}.",
            f"--train.global_batch {near}{fix}",
        )
    if micro and share % micro:
        raise ConfigError(
            f"--train.micro_batch {micro} does not divide a rank's share: --train.global_batch {batch} "
            f"over {ranks} ranks is {share}{padded}.",
            f"--train.micro_batch {max(n for n in range(1, micro + 1) if share % n == 0)}{fix}",
        )


# ---------------------------------------------------------------- what is tried


def _choices(config: Config, given: Given, ranks: int, rates: Rates) -> list[Choice]:
    reshards = (
        [config.mesh.reshard_after_forward] if "mesh.reshard_after_forward" in given else ["true", "false"]
    )
    kinds = ["none", "ops", "full"]
    if "memory.activation_checkpointing" in given:
        kinds = [config.memory.activation_checkpointing]
    return [
        Choice(sizes, "true" if sizes.strategy == "ddp" else reshard, kind, config.memory.cpu_offload)
        for sizes in _meshes(config, given, ranks, rates)
        for reshard in (reshards if sizes.shard > 1 and sizes.strategy != "ddp" else reshards[:1])
        for kind in kinds
    ]


def _allowed(config: Config, choices: Sequence[Choice]) -> list[Choice]:
    """The choices that train.py accepts with the user's flags; if there are none, raises why."""
    refusals = [_refusal(config, choice) for choice in choices]
    allowed = [choice for choice, refusal in zip(choices, refusals, strict=True) if refusal is None]
    if not allowed:
        raise next(refusal for refusal in refusals if refusal is not None)
    return allowed


def _refusal(config: Config, choice: Choice) -> ConfigError | None:
    chosen = choice.config(config)
    try:
        configuration.check(chosen)
        resolve(chosen.mesh, choice.sizes.ranks)
        check_divide(chosen.comm, choice.sizes)
    except ConfigError as error:
        return error
    return None


def _meshes(config: Config, given: Given, ranks: int, rates: Rates) -> list[MeshSizes]:
    mesh = config.mesh
    shards = [
        n for n in ([mesh.shard] if mesh.shard else _shards(ranks, rates.gpus_a_node)) if ranks % n == 0
    ]
    if mesh.replicate:
        shards = [n for n in shards if ranks // n == mesh.replicate]
    elif not mesh.shard and not config.memory.cpu_offload:
        resting = parameter_bytes(for_target(config))
        shards = [n for n in shards if resting / n < rates.memory or n == ranks]
    found = [MeshSizes(_strategy(ranks // n, n), ranks // n, n) for n in shards]
    found = [sizes for sizes in found if mesh.strategy in ("auto", sizes.strategy)]
    if _wants_shards(config, given):
        found = [sizes for sizes in found if sizes.strategy != "ddp"]
    if not found:
        raise ConfigError(
            f"--mesh.strategy {mesh.strategy}, replicate {mesh.replicate or 'any'} × shard "
            f"{mesh.shard or 'any'}: no such mesh has {ranks} ranks.",
            "--mesh.strategy auto --mesh.replicate 0 --mesh.shard 0",
        )
    return found


def _strategy(replicate: int, shard: int) -> Strategy:
    if replicate == 1:
        return "fsdp"
    return "ddp" if shard == 1 else "hsdp"


def _wants_shards(config: Config, given: Given) -> bool:
    """Whether a flag requires something that DDP cannot do."""
    return config.memory.cpu_offload or (
        "mesh.reshard_after_forward" in given and config.mesh.reshard_after_forward != "true"
    )


def _shards(ranks: int, a_node: int) -> list[int]:
    """Shard sizes: on one node its divisors; on several whole nodes, by doubling; one rank a shard for
    DDP; all ranks.
    """
    within = [n for n in range(1, ranks + 1) if ranks % n == 0] if ranks <= a_node else [1, a_node]
    within = [n for n in within if ranks % n == 0]
    across = [a_node * 2**k for k in range(1, 20) if a_node * 2**k <= ranks and ranks % (a_node * 2**k) == 0]
    return sorted({*within, *across, ranks})


def _micro_batches(config: Config, given: Given, ranks: int) -> list[int]:
    if config.train.micro_batch:
        return [config.train.micro_batch]
    share = config.train.global_batch // ranks
    if "train.global_batch" in given:
        return [
            n
            for n in range(1, min(share, LARGEST_MICRO_BATCH) + 1)
            if share % n == 0 and (n & (n - 1) == 0 or n == share)
        ]
    return [2**k for k in range(LARGEST_MICRO_BATCH.bit_length())]


def _accumulation(config: Config, given: Given, ranks: int, micro: int) -> int:
    return config.train.global_batch // ranks // micro if "train.global_batch" in given else 1


# ---------------------------------------------------------------- trying it


def _best_of_each(config: Config, given: Given, choices: Sequence[Choice], rates: Rates) -> list[Plan]:
    """One plan for each choice: the fastest micro-batch that fits, or the smallest if none does."""
    if not choices:
        return []
    ranks = choices[0].sizes.ranks
    batches = _micro_batches(config, given, ranks)
    times = {_accumulation(config, given, ranks, micro) > 1 for micro in batches}
    families = {
        (c, many): _family(config, c, choices, batches, many, rates) for c in choices for many in times
    }
    try:
        runs = _runs_of(families.values())
    except TooFewBlocks:
        run_whole(config)
        runs = _runs_of(families.values())
    plans = []
    for choice in choices:
        tried = list(_best_of(config, given, choice, batches, families, runs, rates))
        fitting = [plan for plan in tried if plan.fits]
        plans.append(
            max(fitting, key=lambda plan: (plan.samples_s, -plan.micro_batch)) if fitting else tried[0]
        )
    return plans


def _runs_of(families: Iterable[Family]) -> Runs:
    return run_all([ask for family in families for ask in family.asks()])


def _family(
    config: Config,
    choice: Choice,
    choices: Sequence[Choice],
    batches: Sequence[int],
    many: bool,
    rates: Rates,
) -> Family:
    """Runs that this choice shares with all that differ in the mesh alone; the one with the largest
    shards is traced.
    """
    is_ddp = choice.sizes.strategy == "ddp"
    alike = [
        c.sizes
        for c in choices
        if replace(c, sizes=choice.sizes) == choice and (c.sizes.strategy == "ddp") == is_ddp
    ]
    first = min(alike, key=lambda sizes: sizes.shard)
    if choice.reshard not in ("true", "false", "step") or first.shard == 1:
        first = choice.sizes
    chosen = replace(choice, sizes=first).config(config)
    base = fake_run(chosen, first, 0, batches[0], 3 if many else 1, rates)
    return Family(base, (batches[0], batches[1] if len(batches) > 1 else batches[0] + 1))


def _best_of(
    config: Config,
    given: Given,
    choice: Choice,
    batches: Sequence[int],
    families: dict[tuple[Choice, bool], Family],
    runs: Runs,
    rates: Rates,
) -> Iterator[Plan]:
    subject: Subject = subject_of(config.model, config.data)
    for micro in batches:
        accumulation = _accumulation(config, given, choice.sizes.ranks, micro)
        counted = families[choice, accumulation > 1].at(runs, micro, choice.sizes.shard)
        batch = micro * accumulation * choice.sizes.ranks
        chosen = choice.config(config)
        train = dataclasses.replace(chosen.train, global_batch=batch, micro_batch=micro)
        ranked = dataclasses.replace(chosen.plan, gpus=choice.sizes.ranks)
        planned = dataclasses.replace(chosen, train=train, plan=ranked)
        ask = fake_run(planned, choice.sizes, 0, micro, accumulation, rates)
        plan = plan_of(ask, counted, subject, accumulation, rates)
        yield plan
        if not plan.fits:
            return

"""The values that follow from a configuration and a number of ranks, before any process group exists: data,
model, mesh, batch, steps.

Errors in a configuration are found here, the same on every rank. `--dry-run` prints the result and stops; a
run prints it as its last start-up line.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp.base.errors import ConfigError, first_line
from fsdp.base.text import byte_size, columns
from fsdp.config import Config
from fsdp.data import Cursor, DataSet, MixCursor, build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.stream import StreamCursor
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import BatchPlan, MeshSizes, plan_batch, resolve
from fsdp.dist.shards import cut_of
from fsdp.memory.account import resting_bytes
from fsdp.models import ModelSpec
from fsdp.models import resolve as resolve_model
from fsdp.models.checks import (
    batch_norms,
    check_parameters,
    extra_states,
    kept_tensors,
    lacks_base,
    make_contiguous,
    stale_reference,
)
from fsdp.models.chunked_loss import output_layer
from fsdp.models.hf_settings import select_experts_kernel, turn_caches_off
from fsdp.models.init import seeded, to_empty
from fsdp.models.lora import adapted, apply_lora, freeze
from fsdp.models.loss import CustomLoss, load_loss
from fsdp.models.units import find_units
from fsdp.optim.custom_optimizer import is_custom, load_factory
from fsdp.optim.schedule import Schedule
from fsdp.optim.train_state import TrainState
from fsdp.parallel import traffic
from fsdp.parallel.attention import check_attention
from fsdp.parallel.comm_hooks import Hooks, check_divide, load_hooks
from fsdp.parallel.device_check import check_device
from fsdp.parallel.float8 import check_float8, check_float8_tokens, gathered_in_float8
from fsdp.parallel.shard import Dtypes, resolve_dtypes
from fsdp.parallel.whole_parameters import whole_parameters
from fsdp.run.epochs import check_epochs
from fsdp.run.evaluate import check_heldout
from fsdp.run.weights import saved_as
from fsdp.rundir import history

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything decided before the first collective."""

    data: DataSet
    spec: ModelSpec
    sizes: MeshSizes
    batch: BatchPlan
    cursor: Cursor | MixCursor | StreamCursor
    total_steps: int
    dtypes: Dtypes
    hooks: Hooks
    schedule: Schedule
    loss: CustomLoss | None

    @property
    def data_identity(self) -> dict[str, int | str]:
        """What must stay the same for a step to mean the same samples: their number, and the data set's own
        identity and classes if it has them.
        """
        if self.data.stream is not None:
            return {"shards": len(self.data.stream.shards)}
        info = self.data.info
        own = {"fingerprint": info.facts.get("fingerprint"), history.CLASSES: info.classes}
        return {"samples": len(self.data.train)} | {name: value for name, value in own.items() if value}

    @property
    def unit(self) -> str:
        """The unit of throughput: tokens if the data has them, else images or samples."""
        return (
            "tok"
            if self.data.info.tokens_per_sample
            else "img"
            if self.data.info.kind == "images"
            else "sample"
        )


def prepare(config: Config, *, world_size: int, num_nodes: int, device: torch.device | None) -> Job:
    """Raises ConfigError, on every rank the same.

    `device` is None in a process that is no rank: whether a device supports the flags is left to the ranks.
    """
    sizes = resolve(config.mesh, world_size, num_nodes)
    check_divide(config.comm, sizes)
    if device is not None:
        check_float8(config.speed, device)
        check_attention(config.speed, device)
        check_device(config.memory, device)
    batch = plan_batch(config.train, world_size)
    load_factory(config.optim)  # its errors come before the data is read
    data = _data_of_this_node(config)
    check_float8_tokens(config.speed, batch.micro_batch, data.info.tokens_per_sample)
    check_epochs(config, data)
    check_heldout(config.train, config.data.name, data)
    cursor = _cursor(config, data)
    total_steps = _total_steps(config, data, cursor)
    spec = resolve_model(config.model, data.info.facts)
    saved_as(config, spec)  # its errors come before the ranks meet
    return Job(
        data=data,
        spec=spec,
        sizes=sizes,
        batch=batch,
        cursor=cursor,
        total_steps=total_steps,
        dtypes=resolve_dtypes(config.precision, device or torch.device("cpu")),
        hooks=load_hooks(config.comm),
        schedule=Schedule(config.optim, total_steps),
        loss=load_loss(config.train.loss),
    )


def _data_of_this_node(config: Config) -> DataSet:
    try:
        return build_dataset(with_model_tokenizer(config.data, config.model))
    except ConfigError as error:
        error.scope = "node"  # files may be missing on this node alone
        raise


def _cursor(config: Config, data: DataSet) -> Cursor | MixCursor | StreamCursor:
    seed, batch = config.run.seed, config.train.global_batch
    if data.stream is not None:
        ahead = max(config.data.prefetch, config.data.workers) + config.data.workers + 3
        return StreamCursor(data.stream, global_batch=batch, ahead=ahead)
    if data.sources is None:
        return Cursor(seed=seed, samples=len(data.train), global_batch=batch)
    from fsdp.data.mixture import first_segment

    first = first_segment(config.data, data, global_batch=batch, epochs=config.train.epochs)
    return MixCursor(seed=seed, segments=[first])


def resumed(job: Job, config: Config, state: TrainState) -> Job:
    """The job of a run that resumes at a checkpoint's state."""
    if isinstance(job.cursor, Cursor):
        cursor: Cursor | MixCursor | StreamCursor = job.cursor.resumed(state.step, state.samples)
    else:
        cursor = job.cursor.resumed(state.data, state.step)
    total_steps = _total_steps(config, job.data, cursor)
    if total_steps != job.total_steps:
        job = replace(job, total_steps=total_steps, schedule=Schedule(config.optim, total_steps))
    return replace(job, cursor=cursor)


def _total_steps(config: Config, data: DataSet, cursor: Cursor | MixCursor | StreamCursor) -> int:
    if config.train.steps:
        return config.train.steps
    if data.stream is not None:
        given = f"--train.epochs {config.train.epochs}: " if config.train.epochs else ""
        raise ConfigError(
            f"{given}--data.name {config.data.name} is a stream, which has no length.", "--train.steps 1000"
        )
    if cursor.end is not None:
        return cursor.end
    if not config.train.epochs and data.info.default_steps:
        return data.info.default_steps
    epochs = config.train.epochs or data.info.default_epochs or DEFAULT_EPOCHS
    return cursor.steps_of(epochs) if isinstance(cursor, Cursor) else epochs * cursor.steps_per_epoch


def meta_model(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """The model on meta. A model that cannot be built there, or keeps tensors beside its buffers, is built
    whole first.

    With the streams of the run's `seed`: what the constructor draws beside parameters and buffers (an order
    of its layers, a tensor that is no buffer) is the same on every rank, after a resume and in prediction.
    """
    try:
        with seeded(seed), torch.device("meta"):
            model = spec.build()
        # Parameters in a list are the model's own, and the list may be for other ends than forward.
        stray = next((n for n, one in kept_tensors(model) if not isinstance(one, nn.Parameter)), None)
        base = lacks_base(model)
        if stray is None and base is None:
            return model
        why = f"{stray} is a tensor that no register_buffer made" if stray else f"{base} is not made there"
    except (NotImplementedError, RuntimeError) as error:
        why = first_line(error)
    log.warning("%s cannot be built on the meta device (%s): each rank builds it whole once", spec.name, why)
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    to_empty(model, "meta")
    for name, tensor in kept_tensors(model):
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise stale_reference(name)
    return model


def trained_model(config: Config, job: Job) -> nn.Module:
    model = model_of(config, job.spec, job.dtypes)
    warn_of_extra_states(model)
    if job.sizes.ranks > 1 and (norms := batch_norms(model)):
        log.warning(
            "%s%s: BatchNorm over the rows that a rank has, so the result depends on the number of ranks. "
            "HINT: --train.micro_batch sets how many rows these are",
            norms[0],
            f" (and {len(norms) - 1} more)" if len(norms) > 1 else "",
        )
    if job.sizes.strategy == "ddp":  # autocast leaves the operands of grouped products in the master's dtype
        select_experts_kernel(model, job.dtypes.master)
    return model


def warn_of_extra_states(model: nn.Module) -> None:
    if found := extra_states(model):
        log.warning(
            "%s%s: get_extra_state is in no checkpoint and no export: a resumed run starts with that of the "
            "constructor. HINT: register_buffer for what is to stay",
            found[0],
            f" (and {len(found) - 1} more)" if len(found) > 1 else "",
        )


def model_of(config: Config, spec: ModelSpec, dtypes: Dtypes | None = None) -> nn.Module:
    """The meta model with frozen parameters and adapters applied: the one that a run shards. `dtypes` are
    those of a CPU if None.
    """
    dtypes = dtypes or resolve_dtypes(config.precision, torch.device("cpu"))
    model = trainable_model(spec, config.run.seed, dtypes.param)
    if config.model.frozen:
        freeze(model, config.model.frozen)
    if config.lora.rank:
        apply_lora(model, config.lora)
    return model


def trainable_model(spec: ModelSpec, seed: int, computed: torch.dtype) -> nn.Module:
    """The meta model as sharding and training need it; experts have kernels for the dtype `computed`.

    One that comes in eval mode, as `from_pretrained` returns it, trains in train mode; a part of it alone
    keeps its mode.
    """
    model = meta_model(spec, seed)
    check_parameters(model, spec.name)
    if not model.training:
        model.train()
    turn_caches_off(model)
    select_experts_kernel(model, computed)
    make_contiguous(model)
    return model


def describe(config: Config, job: Job, model: nn.Module) -> Mapping[str, str]:
    """The derived facts by name, as --dry-run and the last start-up line show them."""
    sizes, batch, dtypes = job.sizes, job.batch, job.dtypes
    padded = batch.micro_batch * batch.accumulation * sizes.ranks != batch.global_batch
    numbers = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(numbers)
    tokens = job.data.info.tokens_per_sample * job.batch.global_batch
    facts = {
        "mesh": f"{sizes.strategy}, replicate {sizes.replicate} × shard {sizes.shard} = {sizes.ranks} ranks",
        "model": f"{job.spec.name} {config.model.preset}".strip() + f", {total:,} parameters"
        + ("" if trained == total else f", {trained:,} trained"),
        "data": _data_name(job, config)
        + (f", {len(job.data.heldout):,} held out" if job.data.heldout is not None else ""),
        "global batch": f"{batch.global_batch} samples = micro-batch {batch.micro_batch} × "
        f"{batch.accumulation} × {sizes.ranks} ranks" + (", padded" if padded else ""),
        "steps": steps_line(job),
        "precision": f"{_name(dtypes.param)} on {_name(dtypes.master)}, reduced in {_name(dtypes.reduce)}"
        + ("" if dtypes.frozen is None else f", frozen in {_name(dtypes.frozen)}"),
        "bytes a rank": _bytes_a_rank(config, job, model),
    }  # fmt: skip
    facts["units"] = units_line(model, config.mesh.wrap)
    if job.sizes.ranks > 1:
        facts["a step sends"] = traffic.traffic_line(
            model,
            sizes=job.sizes,
            section=config.mesh,
            accumulation=job.batch.accumulation,
            gathered=job.dtypes.param,
            reduced=job.dtypes.reduce,
            float8=gathered_in_float8(find_units(model, config.mesh.wrap), config.speed),
        )
    layers = sum(1 for _ in adapted(model))
    if chunk := config.memory.loss_chunk:
        facts["loss"] = f"in chunks of {chunk:,} tokens, from the inputs of {output_layer(model)[0]}"
    if layers:
        facts["adapters"] = f"rank {config.lora.rank} beside {layers} layers; checkpoints hold them alone"
    if tokens:
        facts["tokens a step"] = f"{tokens:,}"
    return facts


def steps_line(job: Job) -> str:
    if job.data.stream is not None:
        return f"{job.total_steps:,}"
    return f"{job.total_steps:,}, {job.cursor.steps_per_epoch:,} an epoch"


def _data_name(job: Job, config: Config) -> str:
    """The data set, or each source of a mixture with its share of the samples; and how many there are."""
    if job.data.stream is not None:
        return f"{config.data.name}, a stream of {len(job.data.stream.shards)} shards"
    samples = f", {len(job.data.train):,} samples"
    if not isinstance(job.cursor, MixCursor):
        return config.data.name + samples
    shares = job.cursor.now.shares
    parts = [
        f"{label} {share / sum(shares):.1%}"
        for label, share in zip(job.cursor.now.samples, shares, strict=True)
    ]
    return " + ".join(parts) + samples


def _units(model: nn.Module, wrap: str) -> list[tuple[str, list[nn.Parameter]]]:
    """Each communication unit as its modules' names and the parameters that it gathers; the root's own come
    last.
    """
    names = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    found = []
    for unit in find_units(model, wrap):
        own = list(dict.fromkeys(p for module in unit for p in module.parameters() if p not in taken))
        taken.update(own)
        found.append((", ".join(names[module] for module in unit), own))
    return [*found, ("the root", [p for p in model.parameters() if p not in taken])]


def units_line(model: nn.Module, wrap: str) -> str:
    """The units in one line, or the reason why there are none."""
    *units, (_, rest) = _units(model, wrap)
    own = sum(p.numel() for p in rest)
    if units:
        sizes = [sum(p.numel() for p in parameters) for _, parameters in units]
        most = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{max(sizes):,}"
        return f"{len(units)} of {most} parameters, {own:,} in the root's"
    if wrap.startswith("size:"):
        parts = {sum(p.numel() for p in module.parameters()) for module in model.modules()} - {0}
        near = next(
            (f"size:{n}" for n in sorted(parts, reverse=True) if find_units(model, f"size:{n}")), "auto"
        )
        return f"none: --mesh.wrap {wrap} matches no part of the model. HINT: --mesh.wrap {near}"
    return (
        f"none: --mesh.wrap {wrap} finds no part of the model, and the root's group holds {own:,} parameters"
    )


def unit_table(model: nn.Module, wrap: str, shards: int, whole: Collection[nn.Parameter] = ()) -> list[str]:
    """A line for each unit: its parameters, and how many of them each rank of a replica keeps."""
    rows = [("unit", "parameters", "a rank's shard")]
    for name, parameters in _units(model, wrap):
        kept = [
            sum(p.numel() if p in whole else _kept(p, rank, shards) for p in parameters)
            for rank in range(shards)
        ]
        rows.append((name, f"{sum(p.numel() for p in parameters):,}", _by_rank(kept)))
    return columns(rows, right=(1,))


def _kept(parameter: nn.Parameter, rank: int, shards: int) -> int:
    # FSDP shards no 0-dim parameter
    return cut_of(parameter.shape, rank, shards).numel if parameter.dim() else 1


def _by_rank(kept: list[int]) -> str:
    """Ranks with equal shards are one entry: the first ranks have the longer shards."""
    runs = [(numel, len(list(ranks))) for numel, ranks in itertools.groupby(kept)]
    if len(runs) == 1:
        return f"{kept[0]:,}"
    ends = itertools.accumulate(count for _, count in runs)
    return "; ".join(
        f"{numel:,} on {f'ranks {end - count} to {end - 1}' if count > 1 else f'rank {end - 1}'}"
        for (numel, count), end in zip(runs, ends, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_a_rank(config: Config, job: Job, model: nn.Module) -> str:
    """Parameters, gradients and optimizer states. A plan adds what a step takes."""
    dtypes, whole = job.dtypes, whole_parameters(model, config.mesh.unsharded)
    held = resting_bytes(config.optim, model, dtypes.master, dtypes.frozen).total
    kept = resting_bytes(config.optim, model, dtypes.master, dtypes.frozen, only=whole).total
    resting = kept + (held - kept) / job.sizes.shard
    counted = " (its states counted as Adam's)" if is_custom(config.optim) else ""
    return f"{byte_size(resting)} of parameters, gradients and optimizer{counted}"


def dry_run(config: Config, env: DistEnv) -> str:
    """For the ranks that were started; for one process, for as many as the mesh flags name."""
    named = max(1, config.mesh.replicate) * max(1, config.mesh.shard)
    ranks = named if env.world_size == 1 else env.world_size
    job = prepare(config, world_size=ranks, num_nodes=env.num_nodes, device=env.device)
    model = trained_model(config, job)
    whole = whole_parameters(model, config.mesh.unsharded)
    table = unit_table(model, config.mesh.wrap, job.sizes.shard, whole)
    return "\n".join([*columns(list(describe(config, job, model).items())), "", *table])

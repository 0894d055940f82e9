"""What follows from a configuration and a number of ranks, before any process group exists: data, model, mesh, batch, steps.

Everything that a person can get wrong is found here, on every rank alike. `--dry-run` prints it and stops; a run prints it as
its last start-up line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp import traffic
from fsdp.comm import Hooks, check_divide, load_hooks
from fsdp.config import Config
from fsdp.data import Cursor, DataSet, build_dataset
from fsdp.env import DistEnv
from fsdp.errors import ConfigError
from fsdp.float8 import check_float8, gathered_in_float8
from fsdp.memory.check import check_device
from fsdp.mesh import BatchPlan, MeshSizes, plan_batch, resolve
from fsdp.models import ModelSpec
from fsdp.models import resolve as resolve_model
from fsdp.models.blocks import find_units
from fsdp.models.caches import turn_caches_off
from fsdp.models.lora import adapted, apply_lora
from fsdp.models.parts import freeze
from fsdp.models.real import seeded
from fsdp.optim import state_bytes
from fsdp.shard import Dtypes, resolve_dtypes

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that is decided before the first collective."""

    data: DataSet
    spec: ModelSpec
    sizes: MeshSizes
    batch: BatchPlan
    cursor: Cursor
    total_steps: int
    dtypes: Dtypes
    hooks: Hooks

    @property
    def data_identity(self) -> dict[str, int | str]:
        """What must stay for a step to mean the same samples: their number, and what they are where the data say it."""
        own = self.data.info.facts.get("fingerprint")
        return {"samples": len(self.data.train)} | ({"fingerprint": own} if own else {})

    @property
    def unit(self) -> str:
        """What a person counts: tokens where there are some, else images or samples."""
        return "tok" if self.data.info.tokens_per_sample else "img" if self.data.info.kind == "images" else "sample"


def prepare(config: Config, *, world_size: int, num_nodes: int, device: torch.device) -> Job:
    """Raises ConfigError, on every rank the same."""
    sizes = resolve(config.mesh, world_size, num_nodes)
    check_divide(config.comm, sizes)
    check_float8(config.speed, device)
    check_device(config.memory, device)
    batch = plan_batch(config.train, world_size)
    data = _data_of_this_node(config)
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=config.train.global_batch)
    return Job(
        data=data,
        spec=resolve_model(config.model, data.info.facts),
        sizes=sizes,
        batch=batch,
        cursor=cursor,
        total_steps=_total_steps(config, data, cursor),
        dtypes=resolve_dtypes(config.precision, device),
        hooks=load_hooks(config.comm),
    )


def _data_of_this_node(config: Config) -> DataSet:
    try:
        return build_dataset(config.data)
    except ConfigError as error:
        error.scope = "node"  # files may be missing on this node alone
        raise


def _total_steps(config: Config, data: DataSet, cursor: Cursor) -> int:
    if config.train.steps:
        return config.train.steps
    if config.train.epochs:
        return config.train.epochs * cursor.steps_per_epoch
    return data.info.default_steps or (data.info.default_epochs or DEFAULT_EPOCHS) * cursor.steps_per_epoch


def meta_model(spec: ModelSpec) -> nn.Module:
    """The model without its numbers. One that cannot be built so, or keeps tensors beside its buffers, is built whole first."""
    try:
        with torch.device("meta"):
            model = spec.build()
        stray = next(stray_tensors(model), None)
        if stray is None:
            return model
        why = f"{stray} is a tensor that no register_buffer made"
    except (NotImplementedError, RuntimeError) as error:
        why = str(error).splitlines()[0]
    log.warning("%s cannot be built on the meta device (%s): each rank builds it whole once", spec.name, why)
    with seeded(0), torch.device("cpu"):
        return spec.build().to("meta")


def trained_model(config: Config, job: Job) -> nn.Module:
    return model_of(config, job.spec)


def model_of(config: Config, spec: ModelSpec) -> nn.Module:
    """The meta model, with what is frozen frozen and its adapters in place: what a run shards."""
    model = meta_model(spec)
    turn_caches_off(model)
    if config.model.frozen:
        freeze(model, config.model.frozen)
    if config.lora.rank:
        apply_lora(model, config.lora)
    return model


def stray_tensors(model: nn.Module) -> Iterator[str]:
    """Tensors kept as plain attributes: neither moved, nor saved, nor filled by anyone."""
    return (
        f"{name + '.' if name else ''}{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    )


def describe(config: Config, job: Job, model: nn.Module) -> Mapping[str, str]:
    """The derived facts by name, as --dry-run and the last start-up line show them."""
    numbers = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(numbers)
    tokens = job.data.info.tokens_per_sample * job.batch.global_batch
    facts = {
        "mesh": f"{job.sizes.strategy}, replicate {job.sizes.replicate} × shard {job.sizes.shard} = {job.sizes.ranks} ranks",
        "model": f"{job.spec.name} {config.model.preset}".strip() + f", {total:,} parameters"
        + ("" if trained == total else f", {trained:,} trained"),
        "data": f"{config.data.name}, {len(job.data.train):,} samples"
        + (f", {len(job.data.heldout):,} held out" if job.data.heldout is not None else ""),
        "global batch": f"{job.batch.global_batch} samples = micro-batch {job.batch.micro_batch} × "
        f"{job.batch.accumulation} × {job.sizes.ranks} ranks"
        + ("" if job.batch.micro_batch * job.batch.accumulation * job.sizes.ranks == job.batch.global_batch else ", padded"),
        "steps": f"{job.total_steps:,}, {job.cursor.steps_per_epoch:,} an epoch",
        "precision": f"{_name(job.dtypes.param)} on {_name(job.dtypes.master)}, reduced in {_name(job.dtypes.reduce)}",
        "bytes a rank": _bytes_a_rank(config, job, model),
    }  # fmt: skip
    if job.sizes.ranks > 1:
        facts["a step sends"] = traffic.said(
            model,
            sizes=job.sizes,
            section=config.mesh,
            accumulation=job.batch.accumulation,
            gathered=job.dtypes.param,
            reduced=job.dtypes.reduce,
            float8=gathered_in_float8(find_units(model, config.mesh.wrap), config.speed),
        )
    layers = sum(1 for _ in adapted(model))
    if layers:
        facts["adapters"] = f"rank {config.lora.rank} beside {layers} layers; checkpoints hold them alone"
    if tokens:
        facts["tokens a step"] = f"{tokens:,}"
    return facts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_a_rank(config: Config, job: Job, model: nn.Module) -> str:
    """What rests between steps: parameters, gradients, optimizer states. What a step adds is the planner's to say."""
    size = job.dtypes.master.itemsize
    kept = sum(p.numel() * size * (2 if p.requires_grad else 1) for p in model.parameters())
    resting = (kept + state_bytes(config.optim, model.parameters(), size)) / job.sizes.shard
    return f"{resting / 2**30:.3f} GiB of parameters, gradients and optimizer"


def dry_run(config: Config, env: DistEnv) -> str:
    """As many ranks as came; alone, as many as the mesh's flags ask for."""
    asked = max(1, config.mesh.replicate) * max(1, config.mesh.shard)
    ranks = asked if env.world_size == 1 else env.world_size
    job = prepare(config, world_size=ranks, num_nodes=env.num_nodes, device=env.device)
    facts = describe(config, job, trained_model(config, job))
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in facts.items())

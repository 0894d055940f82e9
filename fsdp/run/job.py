"""The values that follow from a configuration and a number of ranks, before any process group exists: data,
model, mesh, batch, steps, dtypes, compilation.

Errors in a configuration are found here, the same on every rank. Not here: how they are shown (summary.py).
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp.base import devices
from fsdp.base.errors import ConfigError, first_line
from fsdp.base.torch_private import fake_forward
from fsdp.config import Config
from fsdp.data import Cursor, DataSet, build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import matched
from fsdp.distributed.mesh import BatchPlan, MeshSizes, RankPlace, place_of, plan_batch, resolve
from fsdp.models import ModelSpec
from fsdp.models import resolve as resolve_model
from fsdp.models.init import seeded, to_empty
from fsdp.models.loss import LossFunction
from fsdp.models.registry import (
    PACKED,
    POSITIONS,
    PREFIX,
    CustomLoss,
    check_name,
    check_parameters,
    load_loss,
)
from fsdp.models.units import batch_norms, kept_tensors
from fsdp.optim.optimizer import Schedule, TrainState, load_factory
from fsdp.rundir import history
from fsdp.shard.checks import check_device, stale_reference
from fsdp.shard.compute import check_attention, check_float8, check_float8_tokens
from fsdp.shard.shard import Dtypes, Sharding, resolve_dtypes, sharding_of

if TYPE_CHECKING:
    from fsdp.data.mixture import MixCursor
    from fsdp.data.stream import StreamCursor
    from fsdp.models.hf import SourceFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything decided before the first collective."""

    data: DataSet
    spec: ModelSpec
    sharding: Sharding
    place: RankPlace
    batch: BatchPlan
    cursor: Cursor | MixCursor | StreamCursor
    total_steps: int
    schedule: Schedule
    loss: CustomLoss | None
    exported: SourceFolder | None
    """The format of transformers in which the run is exported; None for a state dict."""

    @property
    def sizes(self) -> MeshSizes:
        return self.sharding.sizes

    @property
    def dtypes(self) -> Dtypes:
        return self.sharding.dtypes

    def epoch_at(self, step: int) -> float | None:
        """Epochs complete after `step`, with their fraction; None for a stream."""
        epoch = self.cursor.epoch(step)
        return None if epoch is None else float(epoch)

    def epoch_ends(self, step: int, every: float) -> bool:
        """Whether `step` is the first at which a further multiple of `every` epochs is complete. In fractions
        of whole numbers: exact, and the same on any number of ranks and after a resume.
        """
        now, before = (self.cursor.epoch(step), self.cursor.epoch(step - 1)) if every else (None, None)
        if now is None or before is None:
            return False
        length = Fraction(str(every))  # 0.1 as it was written, a tenth
        return math.floor(now / length) > math.floor(before / length)

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


def prepare(
    config: Config, *, world_size: int, num_nodes: int, device: torch.device | None, rank: int = 0
) -> Job:
    """Raises ConfigError, on every rank the same.

    `device` is None in a process that is no rank: whether a device supports the flags is left to the ranks.
    """
    sizes = resolve(config.mesh, world_size, num_nodes)
    if device is not None:
        check_float8(config.speed, device)
        check_attention(config.speed, device)
        check_device(config.memory, device)
    batch = plan_batch(config.train, sizes.data)
    # These errors come before the data is read, and a corpus tokenized.
    load_factory(config.optim)
    check_name(config.model.name)
    if config.model.name.startswith(PREFIX):
        folder = resolve_model(config.model, {}).pretrained
        if device is not None and not config.model.weights:
            from fsdp.checkpoint.pretrained import open_stored

            open_stored(folder)
    data = _data_of_this_node(config)
    check_float8_tokens(config.speed, batch.micro_batch, -(-data.info.tokens_per_sample // sizes.context))
    _check_intervals(config, data)
    cursor = _cursor(config, data)
    total_steps = _total_steps(config, data, cursor)
    spec = resolve_model(config.model, data.info.facts)
    data = matched(data, spec, own_loss=bool(config.train.loss))
    sharding = sharding_of(config, sizes, device)
    return Job(
        data=data,
        spec=spec,
        sharding=sharding,
        place=place_of(sizes, rank),
        batch=batch,
        cursor=cursor,
        total_steps=total_steps,
        schedule=Schedule(config.optim, total_steps),
        loss=load_loss(config.train.loss),
        exported=exported_as(config, spec, data),
    )


def exported_as(config: Config, spec: ModelSpec, data: DataSet) -> SourceFolder | None:
    """With the tokenizer and the chat template of the data."""
    source: SourceFolder | None = spec.pretrained
    if source is None and config.checkpoint.export_format == "hf":
        if spec.name != "transformer":
            reason = f"--checkpoint.export_format hf: {spec.name} is no model of transformers."
            raise ConfigError(reason, "--checkpoint.export_format safetensors")
        from fsdp.models.transformer import from_sizes

        source = from_sizes(spec.sizes, spec.build)
    tokenizer, template = (str(data.info.preprocess.get(key, "")) for key in ("tokenizer", "chat_template"))
    return source and replace(source, tokenizer=tokenizer, chat_template=template)


def _check_intervals(config: Config, data: DataSet) -> None:
    """Refuses intervals in epochs for data without a length, and evaluations that have no data. That at the
    end of a run is made only where there is some.
    """
    epochs = ("checkpoint.every_epochs", "train.eval_every_epochs")
    evaluations = ("train.evaluate_only", "train.eval_every_steps", "train.eval_every_epochs")
    for flags, lacks, reason in (
        (epochs, data.stream is not None, "is a stream, which has no epochs"),
        (evaluations, data.heldout is None, "has no held-out data"),
    ):
        for flag in flags if lacks else ():
            section, _, field = flag.partition(".")
            if value := getattr(getattr(config, section), field):
                raise ConfigError(
                    f"--{flag} {value:g}, but --data.name {config.data.name} {reason}.",
                    f"--{flag} 0, or other data: docs/data.md",
                )


def _data_of_this_node(config: Config) -> DataSet:
    try:
        section = with_model_tokenizer(config.data, config.model)
        return build_dataset(section, evaluated=config.train.evaluate_only)
    except ConfigError as error:
        error.scope = "node"  # files may be missing on this node alone
        raise


def _cursor(config: Config, data: DataSet) -> Cursor | MixCursor | StreamCursor:
    seed, batch = config.run.seed, config.train.global_batch
    if data.stream is not None:
        from fsdp.data.stream import StreamCursor

        ahead = max(config.data.prefetch, config.data.workers) + config.data.workers + 3
        return StreamCursor(data.stream, global_batch=batch, ahead=ahead)
    if data.sources is None:
        return Cursor(seed=seed, samples=len(data.train), global_batch=batch)
    from fsdp.data.mixture import MixCursor, first_segment

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
        fault = f"--data.name {config.data.name} is a stream, which has no length in epochs."
        raise ConfigError(fault, "--train.steps 1000 --train.epochs 0")
    if cursor.end is not None:
        return cursor.end
    if not config.train.epochs and data.info.default_steps:
        return data.info.default_steps
    epochs = config.train.epochs or data.info.default_epochs or 1
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
        # torch leaves out the base of an orthogonal parametrization there.
        bases = {n: getattr(m, "base", m) for n, m in model.named_modules() if "parametrizations" in n}
        if stray is None and None not in bases.values():
            return model
        reason = f"{stray or 'an orthogonal base'} is a tensor that no register_buffer made"
    except (NotImplementedError, RuntimeError) as error:
        reason = first_line(error)
    log.warning(
        "%s cannot be built on the meta device (%s): each rank builds it whole once", spec.name, reason
    )
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    to_empty(model, "meta")
    for name, tensor in kept_tensors(model):
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            raise stale_reference(name)
    return model


def trained_model(config: Config, job: Job) -> nn.Module:
    model = model_of(config, job.spec, job.dtypes)
    if job.sizes.data > 1 and (norms := batch_norms(model)):
        log.warning(
            "%s (%d in all): BatchNorm over the rows that a rank has, so the result depends on the number of "
            "ranks. HINT: it has as many as --train.micro_batch",
            norms[0],
            len(norms),
        )
    # Their errors come before the first collective.
    if job.sizes.tensor > 1:
        from fsdp.shard.tensor import plan_of

        plan_of(model, job.sizes)
    if job.sizes.expert > 1:
        from fsdp.shard.expert import dispatch_of

        dispatch_of(model, job.sizes)
    if job.sizes.context > 1:
        from fsdp.shard.context import apply_context

        apply_context(model, job.spec.name, job.sizes, job.dtypes.param)
    elif job.data.info.facts.get(PACKED) and "transformers" in sys.modules:
        from fsdp.models.hf import attend_documents

        if fault := attend_documents(model, job.dtypes.param):
            log.info("packed rows: %s keeps transformers' attention and mask: %s", job.spec.name, fault)
    # autocast leaves the operands of grouped products in the master's dtype
    if job.sizes.strategy == "ddp" and "transformers" in sys.modules:
        from fsdp.models.hf import select_experts_kernel

        select_experts_kernel(model, job.dtypes.master)
    return model


def model_of(config: Config, spec: ModelSpec, dtypes: Dtypes | None = None) -> nn.Module:
    """The meta model with frozen parameters and adapters applied: the one that a run shards. `dtypes` are
    those of a CPU if None.
    """
    dtypes = dtypes or resolve_dtypes(config.precision, torch.device("cpu"))
    model = trainable_model(spec, config.run.seed, dtypes.param)
    if config.model.frozen:
        from fsdp.models.lora import freeze

        freeze(model, config.model.frozen)
    if config.lora.rank:
        from fsdp.models.lora import apply_lora

        apply_lora(model, config.lora)
    named = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        hint = f"--model.frozen {next(iter(named), '')}; requires_grad_(True) in a model of your own"
        reason = f"--model.frozen {config.model.frozen} of {spec.name} leaves no parameter to train."
        raise ConfigError(reason, hint)
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
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # as FSDP needs them; values and names stay the same
            parameter.data = parameter.data.contiguous()
    if "transformers" in sys.modules:
        from fsdp.models.hf import select_experts_kernel, turn_caches_off

        turn_caches_off(model)
        select_experts_kernel(model, computed)
    return model


# ---------------------------------------------------------------- operations of a sample


COUNTED = "3 × the products of a forward, those of attention of all pairs"
"""Of a decoder 6 a token and weight without the embedding, and 12 · layers · width · length a token."""


def flops_per_sample(model: nn.Module, data: DataSet, loss: CustomLoss | None = None) -> float:
    """Forward and backward of one sample by the model's own arithmetic, counted on fake tensors, of which
    models of transformers read no values; `model` is on meta. Recomputation is not counted: MFU is the share
    of the device that the model uses. Of a model that reads values 6 a parameter and token.
    """
    counter, flops, meta, why = FlopCounterMode(display=False), 0.0, model, ""
    try:
        sample = data.train.batch(np.zeros(1, np.int64))
        model = copy.deepcopy(model)
        if "transformers" in sys.modules:
            from fsdp.models.hf import group_experts

            group_experts(model)
        with fake_forward() as mode, torch.no_grad():
            to_empty(model, "cpu")
            # transformers reads the values of positions: a packed row counts as one document.
            first = {name: mode.from_tensor(value) for name, value in sample.items() if name != POSITIONS}
            # attention as its products: not every fused kernel is in the counter's table
            with counter, sdpa_kernel(SDPBackend.MATH):
                LossFunction(model, loss)(model, first, torch.ones(1, dtype=torch.bool), 1)
        flops = 3.0 * counter.get_total_flops()  # a product's backward is two products of its size
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError, KeyError) as error:
        why = f": products cannot be counted ({first_line(error, 80)})"
    formula = COUNTED if flops else f"6 × parameters × tokens{why}"
    flops = flops or 6.0 * sum(p.numel() for p in meta.parameters()) * max(1, data.info.tokens_per_sample)
    log.info("MFU of %.4g operations a sample, by %s", flops, formula)
    return flops


def peak_flops(device: torch.device, ranks: int) -> float:
    """The peak of all devices together; 0 if unknown."""
    known = devices.find(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known.bf16_tflops * 1e12 * ranks if known else 0.0

"""The trace of one step in a fake world, for a configuration, a mesh, a rank, a micro-batch and a number of
blocks.

The process group is fake: any number of ranks, any one of them traced, and no memory behind a tensor. The
mesh is made outside FakeTensorMode (its ranks are read as numbers), fsdp/parallel/shard.py shards the model
on the meta device, and only then its shards become fake tensors. Not here: which runs are traced
(fake_runs.py), or what a trace means.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError, ShardrunError, first_line
from fsdp.base.torch_private.core import READS_VALUES, fake_forward, init_fake_group
from fsdp.base.torch_private.fsdp import chunks_by
from fsdp.config import CommSection, Config, LoraSection
from fsdp.data.types import Batch
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.memory.account import RestingBytes, resting_bytes
from fsdp.models import ModelSpec, to_empty
from fsdp.models.chunked_loss import maybe_chunked
from fsdp.models.cross_entropy import summed_entropy
from fsdp.models.factory import blame
from fsdp.models.hf_settings import group_experts
from fsdp.models.loss import LossFunction, load_loss
from fsdp.models.units import blocks_of, find_units
from fsdp.optim.gradients import LossScaler
from fsdp.optim.optimizer import build_optimizer, is_custom, update_of
from fsdp.optim.small_states import dynamic_map
from fsdp.optim.state import TrainState, maybe_ema
from fsdp.parallel.shard import Sharded, resolve_dtypes, shard_model
from fsdp.plan.cuda import cuda_formulas, fused_entropy, packing
from fsdp.plan.model_shapes import Subject, subject_of
from fsdp.plan.step import Buckets, TracedSetup, fill_optimizer
from fsdp.plan.trace import HOST_KINDS, Trace
from fsdp.plan.tracker import Tracker
from fsdp.run.job import model_of
from fsdp.run.step import StepParts, gradients_of

CPU = torch.device("cpu")


# ---------------------------------------------------------------- the fake world


@contextlib.contextmanager
def fake_world(sizes: MeshSizes, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as seen from `rank`. Requires that no process group exists: a process is in one world."""
    assert not dist.is_initialized(), "a plan is made outside a run"
    init_fake_group(rank, sizes.ranks)
    try:
        with chunks_by(_Chunks):
            yield build_mesh(sizes, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class _Chunks:
    """torch.chunk's pieces, made on access: FSDP cuts a parameter into as many as there are ranks and
    keeps one.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._rows = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if index < 0 or index >= self._count:
            raise IndexError(index)
        size = self._tensor.size(self._dim)
        start = min(index * self._rows, size)
        return self._tensor.narrow(self._dim, start, min(self._rows, size - start))


# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class FakeRun:
    """One fake run. `blocks` 0 runs the whole model, `micro_batch` in samples."""

    config: Config
    sizes: MeshSizes
    rank: int
    micro_batch: int
    accumulation: int
    blocks: int
    device: str
    """cpu or cuda: the allocator and collectives that are counted."""

    def __hash__(self) -> int:
        # A configuration holds dictionaries and has no hash of its own.
        return hash(
            (str(self.config), self.sizes, self.rank, self.micro_batch, self.accumulation, self.blocks)
        )


class TooFewBlocks(ConfigError):
    """A model ran with some of its blocks, and failed: its forward may count on all of them."""


@dataclass(frozen=True)
class Stage:
    """A model sharded in a fake world, its optimizer's state present."""

    sharded: Sharded
    loss_function: LossFunction
    optimizer: torch.optim.Optimizer
    buckets: Buckets | None
    subject: Subject

    def parts(self, config: Config) -> StepParts:
        scaler = None
        if self.sharded.dtypes.needs_loss_scale:
            scaler = LossScaler(TrainState(self.sharded.root, self.optimizer, loss_scale=2.0))
        return StepParts(
            sharded=self.sharded,
            loss_function=self.loss_function,
            gradients=gradients_of(self.sharded),
            optimizer=self.optimizer,
            update=update_of(self.optimizer, None),
            scaler=scaler,
            clip_norm=config.train.clip_grad_norm,
        )


@contextlib.contextmanager
def stage(ask: FakeRun) -> Iterator[Stage]:
    subject = subject_of(ask.config.model, ask.config.data)
    config = ask.config
    model = model_of(config, subject.spec)
    group_experts(model)
    if ask.blocks:
        shorten(model, ask.blocks, config.mesh.wrap)
    z_loss = config.train.z_loss
    head = maybe_chunked(model, config.memory.loss_chunk, z_loss=z_loss)
    on_cuda = ask.device == "cuda"
    summed = fused_entropy if is_compiled(ask) else summed_entropy
    loss_function = LossFunction(model, load_loss(config.train.loss), head, summed=summed, z_loss=z_loss)
    # Compiled and float8 kernels cannot run on fake tensors; estimate.py names what that leaves out. Hooks of
    # one's own are not called.
    plain = dataclasses.replace(
        config,
        speed=dataclasses.replace(config.speed, compile="false", float8="off", float8_emulate=False),
        comm=CommSection(divide_by=config.comm.divide_by),
    )
    if config.optim.state == "8bit":  # cached for all that follow; on fake tensors there would be no values
        dynamic_map(True), dynamic_map(False)
    with fake_world(ask.sizes, ask.rank) as mesh, cuda_formulas() if on_cuda else contextlib.nullcontext():
        sharded = shard_model(model, plain, sizes=ask.sizes, mesh=mesh, device=CPU)
        with fake_forward():  # the model comes from meta
            to_empty(sharded.root, CPU)
            buckets = Buckets(sharded) if ask.sizes.strategy == "ddp" else None
            optimizer = build_optimizer(config.optim, sharded.root)
            if on_cuda:
                _group_kernels(optimizer)
            _fill(optimizer, config)
            maybe_ema(config.optim, sharded.root, optimizer)
            yield Stage(sharded, loss_function, optimizer, buckets, subject)


def _fill(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Creates the optimizer's state; a user's optimizer may do what fake tensors do not support."""
    try:
        fill_optimizer(optimizer)
    except Exception as error:
        if not is_custom(config.optim):
            raise
        raise ConfigError(
            f"--optim.name {config.optim.name} cannot step on fake tensors, which a plan needs "
            f"({type(error).__name__}: {first_line(error)}).",
            "--optim.name adamw plans with two moments a parameter",
        ) from error


def _group_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Sets foreach as torch does by itself on CUDA, and never on CPU, for plain tensors without a fused
    kernel.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") and not any(isinstance(p, DTensor) for p in group["params"]):
            group["foreach"] = True


def trace_step(ask: FakeRun) -> Trace:
    """Traces one step, in a fraction of a second."""
    try:
        return _watch(ask)
    except READS_VALUES as error:
        loss = f", or --train.loss {ask.config.train.loss}," if ask.config.train.loss else ""
        raise ConfigError(
            f"--model.name {ask.config.model.name} reads tensor values in its forward{loss} "
            f"({first_line(error)}): a plan has shapes alone.",
            "torch.where, or masks of a fixed size, in place of .item(), nonzero() and if on a tensor; "
            "nn.Transformer reads a mask unless tgt_is_causal is given",
        ) from error
    except ShardrunError:
        raise
    except Exception as error:
        if ":" not in ask.config.model.name and not ask.config.train.loss:
            raise
        with_loss = f" with --train.loss {ask.config.train.loss}" if ask.config.train.loss else ""
        raise (TooFewBlocks if ask.blocks else ConfigError)(
            f"--model.name {ask.config.model.name}{with_loss} cannot make a step on fake tensors of "
            f"{_shapes(ask)}: {blame(error)}.",
            "--data.name of the samples that it reads; torch.library.register_fake for its own operators",
        ) from error


def _shapes(ask: FakeRun) -> str:
    sample = subject_of(ask.config.model, ask.config.data).sample
    return ", ".join(f"{name} {[ask.micro_batch, *shape]}" for name, (shape, _) in sample.items())


def _watch(ask: FakeRun) -> Trace:
    with stage(ask) as made:
        tracker = Tracker(ask.device, fake=True, host=host_kinds(ask))
        setup = TracedSetup(made.parts(ask.config), tracker, made.buckets, is_compiled(ask))
        setup.hold_state()
        samples = batches(made.subject, ask.micro_batch)
        memory = ask.config.memory
        if memory.activation_budget == 1 and memory.activation_checkpointing != "ops":
            setup.step(samples, ask.accumulation)
            return _packed(tracker, tracker.trace(len(setup.blocks)))
        # In the first step each unit is run once more, to be measured: the second is like all that follow.
        setup.step(samples, ask.accumulation)
        setup.hold_state()
        first = len(tracker.trace(0).segments)
        setup.step(samples, ask.accumulation)
        trace = _packed(tracker, tracker.trace(len(setup.blocks)))
        return dataclasses.replace(trace, segments=trace.segments[first:])


def _packed(tracker: Tracker, trace: Trace) -> Trace:
    return dataclasses.replace(trace, packing=packing(tracker.events))


def is_compiled(ask: FakeRun) -> bool:
    return ask.device == "cuda" and ask.config.speed.compile != "false"


def host_kinds(ask: FakeRun) -> tuple[str, ...]:
    """Kinds in the host's memory, where the device has one of its own."""
    if ask.device == "cpu":
        return ()
    return ("offloaded", *(HOST_KINDS if ask.config.memory.cpu_offload else ()))


def batches(subject: Subject, rows: int) -> Iterator[Batch]:
    while True:
        data = {
            name: torch.empty((rows, *shape), dtype=dtype) for name, (shape, dtype) in subject.sample.items()
        }
        yield Batch(data, torch.ones(rows, dtype=torch.bool), rows)


# ---------------------------------------------------------------- fewer blocks


def repeated_blocks(model: nn.Module, wrap: str) -> tuple[nn.Module, list[nn.Module]] | None:
    """The one list of equal blocks, alike in their parameters; None if there is none, or if a unit holds
    several.
    """
    units = find_units(model, wrap)
    blocks = blocks_of(units)
    if len(blocks) < 2 or any(len(blocks_of([unit])) > 1 for unit in units):
        return None
    if any(_shape_of(block) != _shape_of(blocks[0]) for block in blocks):
        return None
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and list(module) == blocks:
            return module, blocks
    return None


def _shape_of(block: nn.Module) -> Any:
    return type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters())


def shorten(model: nn.Module, blocks: int, wrap: str) -> None:
    found = repeated_blocks(model, wrap)
    assert found is not None
    assert blocks <= len(found[1])
    holder: Any = found[0]
    del holder[blocks:]


_BLOCKS: dict[tuple[int, str, str, LoraSection], tuple[ModelSpec, int]] = {}


def blocks_in(config: Config) -> int:
    """The number of equal blocks of the model; 0 if it must be run whole."""
    if config.mesh.unsharded:
        return 0  # its patterns may name a single block
    spec = subject_of(config.model, config.data).spec
    key = _key_of_blocks(config, spec)
    if key not in _BLOCKS:
        found = repeated_blocks(model_of(config, spec), config.mesh.wrap)
        _BLOCKS[key] = (spec, len(found[1]) if found else 0)  # kept, so that no id is given twice
    return _BLOCKS[key][1]


def run_whole(config: Config) -> None:
    """From now on the model is run with all of its blocks."""
    spec = subject_of(config.model, config.data).spec
    _BLOCKS[_key_of_blocks(config, spec)] = (spec, 0)


def _key_of_blocks(config: Config, spec: ModelSpec) -> tuple[int, str, str, LoraSection]:
    return id(spec), config.mesh.wrap, config.model.frozen, config.lora


def parameter_bytes(config: Config) -> float:
    """Parameters, gradients and optimizer of the whole model: what shards divide."""
    return float(_resting(config).total)


def _resting(config: Config) -> RestingBytes:
    model = model_of(config, subject_of(config.model, config.data).spec)
    dtypes = resolve_dtypes(config.precision, CPU)
    return resting_bytes(config.optim, model, dtypes.master, dtypes.frozen)

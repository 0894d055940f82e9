"""The step of a run (fsdp/run/step.py), traced: on fake tensors for any mesh and rank, or on a run's own.

The process group of a plan is fake: any number of ranks, any one of them traced, and no memory behind a
tensor. The mesh is made outside FakeTensorMode (its ranks are read as numbers), fsdp/parallel/shard.py shards
the model on the meta device, and only then its shards become fake tensors. Loader, saves and console are no
part of the step. The data need not be present: if --data.name is at its default, or its files are elsewhere,
samples of the model's own kind are used, with a note. Not here: what a trace means.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.base.devices import without_owner
from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.torch_private import READS_VALUES, chunks_by, fake_forward, init_fake_group
from fsdp.config import CommSection, Config, DataSection, ModelSection
from fsdp.data import build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import Batch, DataSet
from fsdp.dist.collectives import tensors_in
from fsdp.dist.mesh import MeshSizes, build_mesh
from fsdp.models import ModelSpec, to_empty, transformer, vision
from fsdp.models import resolve as resolve_model
from fsdp.models.chunked_loss import maybe_chunked
from fsdp.models.hf import group_experts, resolve_folder
from fsdp.models.loss import LossFunction, load_loss, summed_entropy
from fsdp.models.registry import PREFIX, blame
from fsdp.models.units import blocks_of
from fsdp.optim.gradients import LossScaler
from fsdp.optim.optimizer import build_optimizer, is_custom, update_of
from fsdp.optim.small_states import SmallStateAdam, dynamic_map, new_state
from fsdp.optim.state import TrainState, maybe_ema
from fsdp.parallel.shard import Sharded, shard_model, sharding_of
from fsdp.plan.cuda import cuda_formulas, fused_entropy
from fsdp.plan.trace import AFTER, HOST_KINDS, Trace, Tracker
from fsdp.run.job import meta_model, model_of
from fsdp.run.step import StepParts, Totals, gradients_of, train_step
from fsdp.tokenize.rows import is_pattern

CPU = torch.device("cpu")
OTHER_UNITS = 1_000_000
"""Groups of units that are not blocks are numbered from here; 0 is the root's."""


# ---------------------------------------------------------------- a step with marks


class TracedSetup:
    """The state of a run before its first step, and the tracker that records its steps."""

    def __init__(
        self, parts: StepParts, tracker: Tracker, buckets: Buckets | None = None, *, compiled: bool = False
    ) -> None:
        """`buckets` in place of DDP's reducer, for fake tensors; `compiled`: blocks keep for backward what
        compiled code keeps.
        """
        self.tracker, self._buckets, self._compiled = tracker, buckets, compiled
        update = tracker.counted_as("optimizer")(parts.update)
        self.parts = replace(parts, update=update, enter=self._enter)
        self.blocks = blocks_of(parts.sharded.units)
        self._micro = 0
        numbers: dict[nn.Module, int] = {}
        for index, unit in enumerate(parts.sharded.units):
            is_block = unit[0] in self.blocks
            number = self.blocks.index(unit[0]) + 1 if is_block else OTHER_UNITS + index
            numbers.update(dict.fromkeys(unit, number))
        tracker.groups = lambda group: numbers.get(group.modules[0], 0)

    def hold_state(self) -> None:
        """Parameters, buffers and the optimizer's state, which were there before the step."""
        root = self.parts.sharded.root
        for parameter in root.parameters():
            self.tracker.hold(parameter.detach(), "parameters")
        for buffer in root.buffers():
            self.tracker.hold(buffer, "buffers")
        for state in self.parts.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.tracker.hold(value, "optimizer")
        for bucket in self._buckets.tensors if self._buckets else ():
            self.tracker.hold(bucket, "gradients")

    def step(self, batches: Iterator[Batch], count: int) -> None:
        """A traced step of `count` micro-batches, at the rate that the optimizer has."""
        lr = self.parts.optimizer.param_groups[0]["lr"]
        with self.tracker.of_fsdp(), self._marked():
            train_step(self.parts, self._held(batches, count), count, step=1, lr=lr, totals=Totals())

    def trace(self) -> Trace:
        return self.tracker.trace(len(self.blocks))

    def _held(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        for self._micro in range(count):
            self._hold_gradients()
            with self.tracker.counted_as("buffers"):
                batch = [next(batches)]
            yield batch.pop()  # the step alone holds it

    def _hold_gradients(self) -> None:
        for parameter in self.parts.sharded.root.parameters():
            if parameter.grad is not None:
                self.tracker.hold(parameter.grad, "gradients")

    def _enter(self, phase: str) -> None:
        if phase == "reduce":
            self._hold_gradients()
        self.tracker.mark(self._micro if phase in ("forward", "backward") else 0, phase)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Context with hooks that run before FSDP's own, so that a block's gather counts as the block's."""
        handles: list[Any] = []
        with contextlib.ExitStack() as self._inside:
            for number, block in enumerate(self.blocks, 1):
                handles.append(block.register_forward_pre_hook(self._before_block(number), prepend=True))
                handles.append(block.register_forward_hook(self._after_block(number), prepend=True))
            yield
        for handle in handles:
            handle.remove()

    def _before_block(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.tracker.mark(self._micro, "forward", number)
            if self._compiled:
                self._inside.enter_context(self.tracker.compiled(list(tensors_in(args))))

        return hook

    def _after_block(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.close()
            if number == len(self.blocks):
                self.tracker.mark(self._micro, "forward", AFTER)
            trained = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
            if trained is not None:
                trained.register_hook(lambda _: self.tracker.mark(self._micro, "backward", number))

        return hook


class Buckets:
    """DDP's reducer is C++ and takes no fake tensors: its buckets are kept here, and gradients are copied
    into them as they arrive. Without synchronisation gradients stay beside them until a synchronised
    micro-batch.
    """

    def __init__(self, sharded: Sharded) -> None:
        self._sharded, self._syncs = sharded, True
        self._plain = sharded.micro_batch
        sharded.micro_batch = self._micro_batch  # type: ignore[method-assign]
        self._group: Any = sharded.mesh.get_group("dp_replicate")
        trained = [p for p in sharded.root.parameters() if p.requires_grad]
        self.tensors: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in trained):
            same = [p for p in trained if p.dtype == dtype]
            self.tensors.append(torch.zeros(sum(p.numel() for p in same), dtype=dtype))
            views = self.tensors[-1].split([p.numel() for p in same])
            self._views.update((p, view.view_as(p)) for p, view in zip(same, views, strict=True))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(without_owner(self._arrived))

    @contextlib.contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        """Sharded.micro_batch of a model in DDP."""
        self._syncs = last or self._sharded.accumulate != "last"
        with self._plain(last), self._sharded._autocast():
            yield

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if not self._syncs:
            return
        view = self._views[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._group.size() > 1:
            dist.all_reduce(parameter.grad, group=self._group)


# ---------------------------------------------------------------- the fake world


@contextlib.contextmanager
def fake_world(sizes: MeshSizes, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as seen from `rank`. Requires that no process group exists: a process is in one world."""
    assert not dist.is_initialized(), "a plan is made outside a run"
    init_fake_group(rank, sizes.ranks)
    try:
        with chunks_by(_Chunks):
            yield build_mesh(sizes, CPU)
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


@dataclass(frozen=True)
class FakeRun:
    """One rank of a run; `micro_batch` in samples, `device` cpu or cuda: the allocator and the collectives
    that are counted.
    """

    config: Config
    sizes: MeshSizes
    rank: int
    micro_batch: int
    accumulation: int
    device: str

    @property
    def compiled(self) -> bool:
        return self.device == "cuda" and self.config.speed.compile != "false"

    @property
    def host_kinds(self) -> tuple[str, ...]:
        """Kinds in the host's memory, where the device has one of its own."""
        if self.device == "cpu":
            return ()
        return ("offloaded", *(HOST_KINDS if self.config.memory.cpu_offload else ()))


@contextlib.contextmanager
def stage(ask: FakeRun) -> Iterator[tuple[StepParts, Buckets | None, Subject]]:
    """Context with a model that is sharded in a fake world, its optimizer's state present."""
    config, subject = ask.config, subject_of(ask.config.model, ask.config.data)
    model = model_of(config, subject.spec)
    group_experts(model)
    z_loss = config.train.z_loss
    head = maybe_chunked(model, config.memory.loss_chunk, z_loss=z_loss)
    summed = fused_entropy if ask.compiled else summed_entropy
    loss_function = LossFunction(model, load_loss(config.train.loss), head, summed=summed, z_loss=z_loss)
    # Compiled and float8 kernels cannot run on fake tensors; estimate.py names what that leaves out. Hooks of
    # one's own are not called.
    speed = replace(config.speed, compile="false", float8="off", float8_emulate=False)
    plain = replace(config, speed=speed, comm=CommSection(divide_by=config.comm.divide_by))
    if config.optim.state == "8bit":  # cached for all that follow; on fake tensors there would be no values
        dynamic_map(True), dynamic_map(False)
    formulas = cuda_formulas() if ask.device == "cuda" else contextlib.nullcontext()
    with fake_world(ask.sizes, ask.rank) as mesh, formulas:
        sharded = shard_model(model, sharding_of(plain, ask.sizes, CPU), mesh)
        with fake_forward():  # the model comes from meta
            to_empty(sharded.root, CPU)
            buckets = Buckets(sharded) if ask.sizes.strategy == "ddp" else None
            optimizer = build_optimizer(config.optim, sharded.root)
            for group in optimizer.param_groups if ask.device == "cuda" else ():
                # as torch does by itself on CUDA, and never on a CPU
                if not group.get("fused") and not any(isinstance(p, DTensor) for p in group["params"]):
                    group["foreach"] = True
            _fill(optimizer, config)
            maybe_ema(config.optim, sharded.root, optimizer)
            scaler = None
            if sharded.dtypes.needs_loss_scale:
                scaler = LossScaler(TrainState(sharded.root, optimizer, loss_scale=2.0))
            parts = StepParts(
                sharded=sharded,
                loss_function=loss_function,
                gradients=gradients_of(sharded),
                optimizer=optimizer,
                update=update_of(optimizer, None),
                scaler=scaler,
                clip_norm=config.train.clip_grad_norm,
            )
            yield parts, buckets, subject


def _fill(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Creates the state that an optimizer makes at its first step, by one step."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, SmallStateAdam):  # the first step would read its counts from a tensor
            state = optimizer.state[parameter]
            state.update(state or new_state(parameter, optimizer.kind))
            optimizer._counts[parameter] = (state["step"], 0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trace_step(ask: FakeRun) -> Trace:
    """Traces one step: some 25 ms a block and micro-batch."""
    gc.disable()  # a tenth of the time: a trace makes many objects, and few cycles
    try:
        return _traced(ask)
    except ShardrunError:
        raise
    except Exception as error:
        model, loss = f"--model.name {ask.config.model.name}", ask.config.train.loss
        own = ":" in ask.config.model.name or loss or is_custom(ask.config.optim)
        if not own and not isinstance(error, READS_VALUES):
            raise
        sample = subject_of(ask.config.model, ask.config.data).sample
        shapes = ", ".join(f"{name} {[ask.micro_batch, *shape]}" for name, (shape, _) in sample.items())
        raise ConfigError(
            f"{model}{f' with --train.loss {loss}' if loss else ''} cannot make a step on fake tensors of "
            f"{shapes}, which have no values: {blame(error)}.",
            "--data.name of the samples that it reads; torch.where in place of .item(), nonzero() and if on "
            "a tensor; torch.library.register_fake for its own operators; --optim.name adamw",
        ) from error
    finally:
        gc.enable()


def _traced(ask: FakeRun) -> Trace:
    with stage(ask) as (parts, buckets, subject):
        tracker = Tracker(ask.device, fake=True, host=ask.host_kinds)
        setup = TracedSetup(parts, tracker, buckets, compiled=ask.compiled)
        setup.hold_state()
        setup.step(batches(subject, ask.micro_batch), ask.accumulation)
        return setup.trace()


def batches(subject: Subject, rows: int) -> Iterator[Batch]:
    while True:
        data = {
            name: torch.empty((rows, *shape), dtype=dtype) for name, (shape, dtype) in subject.sample.items()
        }
        yield Batch(data, torch.ones(rows, dtype=torch.bool), rows)


# ---------------------------------------------------------------- the model, and the shapes of one sample

SCRATCH_SHARE = 0.1
"""Part of the parameters from which on convolutions are more than a transformer's first layer."""


@dataclass(frozen=True)
class Subject:
    spec: ModelSpec
    sample: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tokens_per_sample: int
    note: str
    """Names a stand-in for the data; empty for the data set itself."""
    has_scratch: bool
    """Whether the model's kernels take memory on CUDA that no tensor shows: those of convolutions and of
    recurrent layers.
    """


_KNOWN: dict[str, Subject] = {}


def subject_of(model: ModelSection, data: DataSection) -> Subject:
    key = f"{model} {data}"  # sections hold dictionaries and have no hash of their own
    if key not in _KNOWN:
        dataset, note = _dataset(model, data)
        spec = resolve_model(model, dataset.info.facts)
        batch = dataset.train.batch(np.arange(1))
        sample = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
        scratch = _has_scratch(meta_model(spec))
        _KNOWN[key] = Subject(spec, sample, dataset.info.tokens_per_sample, note, scratch)
    return _KNOWN[key]


def _has_scratch(model: nn.Module) -> bool:
    convolutions = nn.Conv1d, nn.Conv2d, nn.Conv3d
    sizes: dict[Any, int] = {nn.Module: 0, nn.RNNBase: 0, convolutions: 0}
    for module in model.modules():
        numel = sum(p.numel() for p in module.parameters(recurse=False))
        sizes |= {kind: size + numel for kind, size in sizes.items() if isinstance(module, kind)}
    return sizes[nn.RNNBase] > 0 or sizes[convolutions] > SCRATCH_SHARE * sizes[nn.Module]


def _dataset(model: ModelSection, data: DataSection) -> tuple[DataSet, str]:
    stand_in = _stand_in(model, data)
    if not data.sources and data.name in ("", "digits", "fashion_mnist") and stand_in is not None:
        return build_dataset(stand_in), ""
    try:
        return build_dataset(with_model_tokenizer(data, model)), ""
    except ConfigError as error:
        # files may lie on the machine that is planned for
        name = data.name
        is_path = ":" not in name and (os.sep in name or is_pattern(name) or bool(Path(name).suffix))
        if stand_in is None or not (data.dir or data.sources or is_path or name.startswith(PREFIX)):
            raise
        words = stand_in.args.get("vocab_size")
        kind = f"a vocabulary of {words:,} (--model.args.vocab_size)" if words else "samples of its kind"
        return build_dataset(stand_in), f"{', '.join(data.names)} is not here ({error}); planned with {kind}"


def _stand_in(model: ModelSection, data: DataSection) -> DataSection | None:
    """Tokens for a causal model, images for a classifier of images; None for a model that reads others."""
    sizes: dict[str, Any] = {}
    if model.name == "transformer":
        preset = transformer.PRESETS.get(model.preset or next(iter(transformer.PRESETS)), {})
        sizes = {"vocab_size": 256, **preset, **model.args}
    elif model.name == "vit" and (model.preset or model.args):
        sizes = {**vision.PRESETS.get(model.preset or "small", {}), **model.args}
    elif model.name.startswith(PREFIX):
        folder = resolve_folder(model.name, model.args, {})
        config, kind = folder.config, folder.cls.__name__
        if kind.endswith(("ForCausalLM", "LMHeadModel")):
            sizes = {"vocab_size": config.get_text_config().vocab_size}
        elif kind.endswith("ForImageClassification") and isinstance(config.image_size, int):
            sizes = {"image_size": config.image_size, "channels": config.num_channels}
            sizes["num_classes"] = config.num_labels
        elif not data.name:
            raise ConfigError(
                f"--model.name {model.name}: a {kind} reads samples that need a --data.name.",
                "--data.name my_data:build for a Dataset with input_ids and labels",
            )
    if "vocab_size" in sizes:
        args = {"kind": "tokens", "vocab_size": sizes["vocab_size"]}
        return DataSection(name="synthetic", seq_len=data.seq_len, args=args)
    args = {name: sizes[name] for name in ("image_size", "channels", "num_classes") if name in sizes}
    return DataSection(name="synthetic", args={"kind": "images", **args}) if sizes else None

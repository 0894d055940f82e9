"""The step of a run (fsdp/run/step.py), traced: on fake tensors for any mesh and rank, or on a run's own.

The process group of a plan is fake: any number of ranks, any one of them traced, and no memory behind a
tensor. The mesh is made outside FakeTensorMode (its ranks are read as numbers), fsdp/shard/shard.py shards
the model on the meta device, and only then its shards become fake tensors. Loader, saves and console are no
part of the step. The data need not be present: if --data.name is at its default, or its files are elsewhere,
samples of the model's own kind are used, with a note.

A plan's fake tensors are a CPU's. For a CUDA device the operators that keep other tensors there have
stand-ins: a CPU's rms_norm decomposes and keeps two copies in fp32, its dropout keeps a mask in the input's
type, its attention with dropout keeps the probabilities, packed rows have a mask, and the eager cross entropy
keeps more than the compiled one. Not here: what a trace means.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.base.devices import without_owner
from fsdp.base.errors import ConfigError
from fsdp.base.torch_private import chunks_by, fake_forward, init_fake_group, without_propagation
from fsdp.config import CommSection, Config, DataSection, ModelSection
from fsdp.data import build_dataset
from fsdp.data.registry import with_model_tokenizer
from fsdp.data.types import Batch, DataSet, matched
from fsdp.distributed.boxes import tensors_in
from fsdp.distributed.mesh import MeshSizes, build_mesh, place_of
from fsdp.models import ModelSpec, attention, to_empty, transformer, vision
from fsdp.models import resolve as resolve_model
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.hf import group_experts, resolve_folder
from fsdp.models.loss import LossFunction, summed_entropy
from fsdp.models.registry import POSITIONS, PREFIX, blame, load_loss
from fsdp.models.units import blocks_of
from fsdp.optim.optimizer import build_optimizer, maybe_ema, update_of
from fsdp.optim.small_states import SmallStateAdam, dynamic_map, new_state
from fsdp.plan.trace import AFTER, AXES, Trace, Tracker
from fsdp.run.job import model_of
from fsdp.run.step import StepParts, Totals, gradients_of, train_step
from fsdp.shard.context import apply_context, cut_rows
from fsdp.shard.expert import even_exchange
from fsdp.shard.shard import Sharded, shard_model, sharding_of

CPU = torch.device("cpu")


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
        numbers = {module: n for n, unit in enumerate(parts.sharded.units, 1) for module in unit}
        tracker.groups = lambda group: numbers.get(group.modules[0], 0)
        tracker.axes = {
            mesh.get_group(axis).group_name: AXES.index(axis)
            for mesh in (parts.sharded.mesh, *parts.sharded.views.values())
            for axis in mesh.mesh_dim_names or ()
            if axis in AXES
        }

    def hold_state(self) -> None:
        """Parameters, buffers and the optimizer's state, which were there before the step."""
        root = self.parts.sharded.root
        for parameter in root.parameters():
            self.tracker.hold(parameter.detach(), "parameters")
        for buffer in root.buffers():
            self.tracker.hold(buffer, "buffers")
        for state in self.parts.optimizer.state.values():
            for value in tensors_in(state):
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
        self.tensors = [torch.zeros_like(parameter) for parameter in trained]
        self._bucket_of = dict(zip(trained, self.tensors, strict=True))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(without_owner(self._arrived))

    @contextlib.contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        """Sharded.micro_batch of a model in DDP."""
        self._syncs = last or self._sharded.accumulate != "last"
        with self._plain(last), self._sharded._autocast():
            yield

    def _arrived(self, parameter: Any) -> None:
        bucket = self._bucket_of[parameter]
        if self._syncs:
            if parameter.grad is not bucket:
                parameter.grad = bucket.copy_(parameter.grad)
            dist.all_reduce(parameter.grad, group=self._group)


# ---------------------------------------------------------------- what CUDA's kernels keep


class _Kernel(torch.autograd.Function):
    """`compute` returns the result and what the kernel keeps for backward, of which the first is multiplied
    with the gradient.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        result, *saved = compute(x, weight)
        ctx.save_for_backward(weight, *saved)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:  # type: ignore[override]
        weight, factor, *_ = ctx.saved_tensors
        if factor.is_floating_point():  # the loss's gradient is fp32
            gradient = gradient.to(factor.dtype)
        return None, gradient * factor, None if weight is None else torch.ones_like(weight)


def _fused_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Any:
    """The compiled summed_entropy: the logits as they are, and a number a row."""

    def compute(logits: Tensor, _: None) -> tuple[Tensor, ...]:
        rows = logits.amax(-1).float()
        return rows.sum(), logits, rows

    return _Kernel.apply(compute, logits, None)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None) -> Any:
    """_fused_rms_norm: the input, the weight, and a number a row."""

    def compute(x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        rows = x.new_empty(x.shape[: x.dim() - len(normalized_shape)], dtype=torch.float32)
        return x * (1 if weight is None else weight), x, rows

    return _Kernel.apply(compute, input, weight)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """native_dropout: a mask of a byte an element."""

    def compute(x: Tensor, _: None) -> tuple[Tensor, ...]:
        mask = torch.empty_like(x, dtype=torch.bool)
        return x * mask, mask

    return _Kernel.apply(compute, input, None) if training and 0 < p < 1 else input


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, *more: Any,
               **named: Any) -> Tensor:  # fmt: skip
    """The fused kernels keep a seed for dropout, where a CPU keeps [length, length] probabilities."""
    return _ON_A_CPU(query, key, value, attn_mask, 0.0, *more, **named)


_ON_A_CPU = F.scaled_dot_product_attention
STAND_INS = {"rms_norm": _rms_norm, "dropout": _dropout, "scaled_dot_product_attention": _attention}
"""Functions of torch.nn.functional, as modules and models call them."""


def _bounds(starts: Tensor) -> Tensor:
    """Those of one document a row: how many there are is a value. Attention's time is then the longest."""
    return torch.empty(len(starts) + 1, dtype=torch.int32)


PACKED = {
    "uses_varlen": lambda _, dtype, head_dim: attention.fits_varlen(dtype, head_dim),
    "document_bounds": _bounds,
}
"""Functions of fsdp.models.attention."""


# ---------------------------------------------------------------- the fake world


@contextlib.contextmanager
def fake_world(sizes: MeshSizes, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as seen from `rank`. Requires that no process group exists: a process is in one world."""
    assert not dist.is_initialized(), "a plan is made outside a run"
    init_fake_group(rank, sizes.ranks)
    try:
        with chunks_by(_Chunks), without_propagation():
            yield build_mesh(sizes, CPU)
    finally:
        dist.destroy_process_group()


class _Chunks:
    """torch.chunk's pieces, made on access: FSDP cuts a parameter into as many as there are ranks and
    keeps one.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim, self._rows = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> Tensor:
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
        return self.device == "cuda" and self.config.speed.compile != "false" and self.sizes.tensor == 1

    @property
    def offloads(self) -> bool:
        """Whether HOST_KINDS are in the host's memory, where the device has one of its own."""
        return self.device == "cuda" and self.config.memory.cpu_offload


@contextlib.contextmanager
def stage(ask: FakeRun) -> Iterator[tuple[StepParts, Buckets | None, Subject]]:
    """Context with a model that is sharded in a fake world, its optimizer's state present, and the samples of
    its rank.
    """
    config, subject = ask.config, subject_of(ask.config.model, ask.config.data)
    model = model_of(config, subject.spec)
    group_experts(model)
    z_loss = config.train.z_loss
    chunk = config.memory.loss_chunk
    head = ChunkedHead(model, chunk, z_loss=z_loss) if chunk else None
    summed = _fused_entropy if ask.compiled else summed_entropy
    loss_function = LossFunction(model, load_loss(config.train.loss), head, summed=summed, z_loss=z_loss)
    # Compiled and float8 kernels cannot run on fake tensors; estimate.py names what that leaves out. Hooks of
    # one's own are not called.
    plain = replace(
        config,
        run=replace(config.run, process_group_timeout_s=0),  # fake groups have none
        memory=replace(config.memory, activation_offload=False),
        speed=replace(config.speed, compile="false", float8="off", float8_emulate=False),
        comm=CommSection(),
    )
    if config.optim.state == "8bit":  # cached for all that follow; on fake tensors there would be no values
        dynamic_map(True), dynamic_map(False)
    stand_ins, of_rows = (STAND_INS, PACKED) if ask.device == "cuda" else ({}, {})
    in_place = mock.patch.dict(vars(F), stand_ins), mock.patch.dict(vars(attention), of_rows)
    job = sharding_of(plain, ask.sizes, CPU)
    if ask.sizes.context > 1:
        apply_context(model, subject.spec.name, ask.sizes, job.dtypes.param)
        subject = part_of(subject, ask.sizes, ask.rank, loss_function)
    mixture = ask.sizes.expert > 1 and "transformers" in sys.modules
    exchange = even_exchange() if mixture else contextlib.nullcontext()
    with fake_world(ask.sizes, ask.rank) as mesh, in_place[0], in_place[1], exchange:
        sharded = shard_model(model, job, mesh)
        loss_function.vocabulary = sharded.vocabulary
        if sharded.tensor is not None:
            sharded.tensor.checked = True
        with fake_forward():  # the model comes from meta
            to_empty(sharded.root, CPU)
            buckets = Buckets(sharded) if ask.sizes.strategy == "ddp" else None
            optimizer = build_optimizer(config.optim, sharded.root)
            for group in optimizer.param_groups if ask.device == "cuda" else ():
                # as torch does by itself on CUDA, and never on a CPU
                if not group.get("fused") and not any(isinstance(p, DTensor) for p in group["params"]):
                    group["foreach"] = True
            _fill(optimizer)
            maybe_ema(config.optim, sharded.root, optimizer)
            parts = StepParts(
                sharded=sharded,
                loss_function=loss_function,
                gradients=gradients_of(sharded),
                optimizer=optimizer,
                update=update_of(optimizer, None),
                clip_norm=config.train.clip_grad_norm,
            )
            yield parts, buckets, subject


def _fill(optimizer: torch.optim.Optimizer) -> None:
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
    try:
        return _traced(ask)
    except (RuntimeError, TypeError) as error:
        # of an operation without a form for fake tensors, or of a call
        name = ask.config.model.name
        raise ConfigError(
            f"--model.name {name} cannot make a step on fake tensors, which have no values: {blame(error)}.",
            "torch.where in place of .item(), nonzero() and if on a tensor; torch.library.register_fake for "
            "its own operators; --optim.name adamw",
        ) from error


def _traced(ask: FakeRun) -> Trace:
    with stage(ask) as (parts, buckets, subject):
        tracker = Tracker(ask.device, offloads=ask.offloads)
        setup = TracedSetup(parts, tracker, buckets, compiled=ask.compiled)
        setup.hold_state()
        samples = batches(subject, ask.micro_batch)
        if ask.config.optim.state == "8bit":  # the tables of its codes are made in the first step, and stay
            setup.step(samples, 1)
            tracker.restart()
        setup.step(samples, ask.accumulation)
        return setup.trace()


def batches(subject: Subject, rows: int) -> Iterator[Batch]:
    while True:
        data = {
            name: torch.empty((rows, *shape), dtype=dtype) for name, (shape, dtype) in subject.sample.items()
        }
        yield Batch(data, torch.ones(rows, dtype=torch.bool), rows)


# ---------------------------------------------------------------- the model, and the shapes of one sample


@dataclass(frozen=True)
class Subject:
    spec: ModelSpec
    sample: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    tokens_per_sample: int
    note: str
    """Names a stand-in for the data; empty for the data set itself."""


def part_of(subject: Subject, sizes: MeshSizes, rank: int, function: LossFunction) -> Subject:
    """With samples of the part of a row that a context rank has."""
    data = {name: torch.zeros((1, *shape), dtype=dtype) for name, (shape, dtype) in subject.sample.items()}
    place, shifts = place_of(sizes, rank).context, function.shifts(data)
    part = cut_rows(data, contexts=sizes.context, context=place, shifts=shifts)
    sample = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in part.items()}
    return replace(subject, sample=sample)


_KNOWN: dict[str, Subject] = {}


def subject_of(model: ModelSection, data: DataSection) -> Subject:
    key = f"{model} {data}"  # sections hold dictionaries and have no hash of their own
    if key not in _KNOWN:
        dataset, note = _dataset(model, data)
        spec = resolve_model(model, dataset.info.facts)
        batch = matched(dataset, spec, own_loss=False).train.batch(np.arange(1))
        sample = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in batch.items()}
        if note and model.name == "transformer" and data.args.get("rows") == "packed":
            sample[POSITIONS] = sample["inputs"]
        _KNOWN[key] = Subject(spec, sample, dataset.info.tokens_per_sample, note)
    return _KNOWN[key]


def _dataset(model: ModelSection, data: DataSection) -> tuple[DataSet, str]:
    """The data set; synthetic samples of the model's kind if it is not here."""
    args, note = _stand_in(model, data), ""
    if not args or data.sources or data.name not in ("", "digits", "fashion_mnist"):
        try:
            return build_dataset(with_model_tokenizer(data, model)), note
        except ConfigError as error:  # files may lie on the machine that is planned for
            if not args:
                raise
            words = ", ".join(f"{name} {value}" for name, value in args.items())
            note = f"{', '.join(data.names)} is not here ({error}); planned with {words}"
    return build_dataset(DataSection(name="synthetic", seq_len=data.seq_len, args=args)), note


def _stand_in(model: ModelSection, data: DataSection) -> dict[str, Any]:
    """Arguments of synthetic data, for causal models and vit; empty for a model that reads other samples."""
    if model.name == "transformer":
        preset = transformer.PRESETS.get(model.preset or next(iter(transformer.PRESETS)), {})
        return {"kind": "tokens", "vocab_size": model.args.get("vocab_size", preset.get("vocab_size", 256))}
    if model.name == "vit" and (model.preset or model.args):
        sizes = {**vision.PRESETS.get(model.preset or "small", {}), **model.args}
        names = sizes.keys() & {"image_size", "channels", "num_classes"}
        return {"kind": "images", **{name: sizes[name] for name in names}}
    if model.name.startswith(PREFIX):
        folder = resolve_folder(model.name, model.args, {})
        if folder.cls.__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return {"kind": "tokens", "vocab_size": folder.config.get_text_config().vocab_size}
        if not data.name:
            raise ConfigError(
                f"--model.name {model.name}: a {folder.cls.__name__} reads samples that need a --data.name.",
                "--data.name my_data:build for a Dataset with input_ids and labels",
            )
    return {}

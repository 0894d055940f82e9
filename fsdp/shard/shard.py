"""Shards a plain module, in the one order that works: tensor → expert → float8 → checkpointing → compile →
offload of activations → fully_shard. DDP, which comes when the weights are real, is in ddp.py.

The units are data from the model (fsdp/models/units.py); the groups are the mesh's. Weights are not touched:
the model may be on the meta device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp.base.devices import DTYPES, memory_of
from fsdp.base.errors import ConfigError
from fsdp.base.text import covering, listed
from fsdp.base.torch_private import (
    FSDPParamGroup,
    check_buckets_reduced,
    convert_tensors,
    gather_together,
    whole_groups,
)
from fsdp.config import Config, MemorySection, PrecisionSection, SpeedSection, reshard_policy
from fsdp.distributed.mesh import MeshSizes, build_mesh, mesh_views
from fsdp.models.units import blocks_of, find_units, has_separate_experts, norms_beside
from fsdp.shard.checks import explained
from fsdp.shard.compute import (
    Hooks,
    OneBuffer,
    apply_casts,
    apply_comm,
    apply_float8,
    compiles,
    load_hooks,
    reduce_gradients,
    set_kernel_folders,
    whole_parameters,
)

if TYPE_CHECKING:
    from fsdp.shard.expert import ExpertModules
    from fsdp.shard.tensor import DividedVocabulary, TensorGradients

MOST_KEPT = 0.1
"""Of a device's memory, gathered parameters that auto keeps after forward."""


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of stored parameters, computation, reduction and output; None leaves a dtype unchanged."""

    master: torch.dtype
    param: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None
    frozen: torch.dtype | None = None
    """Of stored parameters that are not trained; None is the master's."""

    def stored(self, parameter: nn.Parameter) -> torch.dtype:
        return self.master if self.frozen is None or parameter.requires_grad else self.frozen

    @property
    def needs_loss_scale(self) -> bool:
        return self.param == torch.float16


def resolve_dtypes(precision: PrecisionSection, device: torch.device) -> Dtypes:
    master = DTYPES[precision.master]
    reduced = torch.float32 if master == torch.bfloat16 else master
    fast = torch.bfloat16 if device.type == "cuda" and precision.master == "fp32" else master
    return Dtypes(
        master=master,
        param=fast if precision.param == "auto" else DTYPES[precision.param],
        reduce=reduced if precision.reduce == "auto" else DTYPES[precision.reduce],
        output=None if precision.output == "auto" else DTYPES[precision.output],
        frozen=None if precision.frozen == "auto" else DTYPES[precision.frozen],
    )


@dataclass
class Sharded:
    """root holds the parameters, runs is called (they differ under DDP); both have the same weights."""

    root: nn.Module
    sizes: MeshSizes
    mesh: DeviceMesh
    """The view "weights" of fsdp/distributed/mesh.py."""
    dtypes: Dtypes
    device: torch.device
    units: list[list[nn.Module]]
    accumulate: str
    reshard: bool | int | str
    """As `Sharding.resharding` has it."""
    averaged_over: int
    """Ranks over which a reduction averages the gradients, so that the loss is multiplied by it; 1 where it
    sums them.
    """
    views: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """The other views that the axes need, by name."""
    whole: frozenset[str] = frozenset()
    """Names of the parameters of --mesh.unsharded."""
    compiled: Sequence[nn.Module] = ()
    """The modules that are compiled."""
    tensor: TensorGradients | None = None
    """With --mesh.tensor."""
    vocabulary: DividedVocabulary | None = None
    """Where tensor ranks divide the logits."""
    experts: ExpertModules | None = None
    """With --mesh.expert."""
    reduced: bool = field(default=False, init=False)
    """Whether a last micro-batch has ended since the caller of the model set it to False."""
    runs: nn.Module = field(init=False)
    together: list[FSDPParamGroup] = field(default_factory=list, init=False)
    """Groups that are gathered at once, before the forward."""
    _last_set: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.runs = self.root

    @functools.cached_property
    def replicated(self) -> list[nn.Parameter]:
        """Trained parameters that FSDP does not shard, 0-dim ones and those of --mesh.unsharded: each rank
        keeps a copy, and their gradients are reduced here.
        """
        # Read when the weights are real: leaving meta replaces each parameter.
        named = self.root.named_parameters()
        return [p for name, p in named if p.requires_grad and (not p.dim() or name in self.whole)]

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context of one forward and its backward; communication that the last micro-batch makes
        unnecessary is skipped.
        """
        ddp = isinstance(self.runs, DistributedDataParallel)
        if not ddp and isinstance(self.root, FSDPModule) and last is not self._last_set:
            # Set once if each micro-batch is the last: the setters walk all modules.
            self._last_set = last
            self.root.set_is_last_backward(last)
            if self.accumulate == "last":
                self.root.set_requires_gradient_sync(last)
            elif self.accumulate == "shard":
                self.root.set_requires_all_reduce(last)
            if self.reshard == "step":
                self.root.set_reshard_after_backward(last)
        if self.together:
            gather_together(self.together)
        try:
            if isinstance(self.runs, DistributedDataParallel):
                quiet = self.accumulate == "last" and not last
                with self.runs.no_sync() if quiet else contextlib.nullcontext(), self._autocast():
                    yield
                if not quiet:
                    self._check_reduced(self.runs)
            else:
                yield
        except (IndexError, RuntimeError) as error:
            raise explained(error) from error.__cause__
        if last:
            if self.tensor is not None:
                self.tensor.reduce()
            if self.sizes.ranks > 1 and not ddp:
                reduce_gradients(self.replicated, self.averaged_over * self.sizes.tensor)
            self.reduced = True

    def _check_reduced(self, runs: DistributedDataParallel) -> None:
        """After a backward: a parameter without a gradient leaves its bucket unreduced on this rank, and
        other ranks wait.
        """
        try:
            check_buckets_reduced(runs)
        except RuntimeError as error:
            named = {name: p for name, p in self.root.named_parameters() if p.requires_grad}
            unused = [name for name, p in named.items() if p.grad is None]
            pattern = covering(unused, named)
            what = f"the loss does not depend on {listed(pattern.split(','))}"
            fault = f"{what}, and --mesh.strategy ddp reduces every gradient."
            hint = f"--mesh.strategy fsdp --mesh.unsharded '{pattern}', or --model.frozen '{pattern}'"
            raise ConfigError(fault, hint, scope="rank") from error

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """DDP keeps one copy of each parameter: autocast gives its computation the dtype that FSDP's policy
        would.
        """
        if self.dtypes.param == self.dtypes.master:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtypes.param)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation: eval mode without gradients. Afterwards each module has its mode again,
        and parameters that forward left gathered are sharded, or an optimizer would miss them.
        """
        modes = [(module, module.training) for module in self.root.modules()]
        self.root.eval()
        ddp = isinstance(self.runs, DistributedDataParallel)
        try:
            with torch.no_grad(), self._autocast() if ddp else contextlib.nullcontext():
                yield
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # its own group alone
        except (IndexError, RuntimeError) as error:
            raise explained(error) from error.__cause__
        finally:
            self.root.train(modes[0][1])  # a module's own train() may do more than set the mode
            for module, training in modes:
                module.training = training

    @property
    def called(self) -> nn.Module:
        """The module to call. DDP's wrapper would synchronise buffers in evaluation."""
        return self.runs if self.root.training else self.root


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What sharding reads: the configuration, and what follows from it."""

    config: Config
    sizes: MeshSizes
    device: torch.device
    dtypes: Dtypes
    compiled: bool
    """Whether units are compiled."""
    hooks: Hooks
    room: float
    """Bytes of the device's memory; of a CPU a rank's part."""
    averages: bool = False
    """Whether gradients are averaged over the ranks, for losses that are means of a rank's own rows; else a
    rank's loss is its part of the global one, and gradients are summed.
    """

    def resharding(self, model: nn.Module) -> bool | int | str:
        """The policy of --mesh.reshard_after_forward, without auto. One rank's shard is only cast and copied
        again for backward, and the copies are freed where they would be a large part of the memory, or where
        the run keeps tensors outside of it.
        """
        policy = reshard_policy(self.config.mesh.reshard_after_forward)
        if policy != "auto":
            return policy
        offloads = self.config.memory.cpu_offload or self.config.memory.nvme != "off"
        numel = sum(p.numel() for p in model.parameters()) / self.sizes.tensor
        gathered = self.dtypes.param.itemsize * numel
        return self.sizes.weight_shards > 1 or offloads or gathered > MOST_KEPT * self.room


def sharding_of(config: Config, sizes: MeshSizes, device: torch.device | None, room: float = 0.0) -> Sharding:
    """`device` is None in a process that is no rank; `room` is that of another device. ConfigError."""
    here = device or torch.device("cpu")
    return Sharding(
        config=config,
        sizes=sizes,
        device=here,
        dtypes=resolve_dtypes(config.precision, here),
        # layers that tensor ranks divide are not compiled
        compiled=device is not None and sizes.tensor == 1 and compiles(config.speed, device),
        hooks=load_hooks(config.comm),
        room=room or memory_of(here) / (sizes.ranks if here.type == "cpu" else 1),
    )


def shard_model(model: nn.Module, job: Sharding, mesh: DeviceMesh) -> Sharded:
    """Shards the model, whose weights may still be on meta. DDP comes once they are real (ddp.py)."""
    config, memory, speed = job.config, job.config.memory, job.config.speed
    sharded_by_fsdp = job.sizes.strategy != "ddp"
    # Replicas alone: DDP averages, and FSDP would divide one shard's gradients by 1 into a copy of them.
    averages = job.averages or job.sizes.replicate == job.sizes.ranks
    timeout = config.run.process_group_timeout_s
    views = {
        view: build_mesh(job.sizes, torch.device(mesh.device_type), timeout, view)
        for view in mesh_views(job.sizes)
        if view != "weights"
    }
    if "context" in views:
        from fsdp.shard.context import bind

        bind(model, views["context"].get_group("context"))
    _apply_dtypes(model, job.dtypes)
    tensor: TensorGradients | None = None
    vocabulary: DividedVocabulary | None = None
    if job.sizes.tensor > 1:
        from fsdp.shard.tensor import TensorGradients, apply_plan

        reads_logits = bool(config.train.loss)
        summed, vocabulary = apply_plan(model, mesh["tensor"], job.sizes, reads_logits=reads_logits)
        tensor = TensorGradients(model, mesh.get_group("tensor"), summed)
    experts: ExpertModules | None = None
    if job.sizes.expert > 1:
        from fsdp.shard.expert import apply_dispatch

        axis = mesh["tensor"] if job.sizes.tensor > 1 else None
        experts = apply_dispatch(model, job.sizes, views["experts"], axis)
    units = find_units(model, config.mesh.wrap)
    apply_float8(units, speed, sharded=sharded_by_fsdp)
    if memory.activation_checkpointing != "none" or memory.activation_budget < 1:
        from fsdp.shard.activations import apply_activation_checkpointing

        apply_activation_checkpointing(units, memory, compiled=job.compiled)
    compiled_modules: list[nn.Module] = []
    if job.compiled:
        set_kernel_folders()
        blocks = blocks_of(units)
        compiled_modules = [*blocks, *norms_beside(blocks, model)] if blocks else [model]
    for module in compiled_modules:
        # In place, so names stay; per unit: equal blocks are compiled once, and the graph has no gather.
        module.compile()
    if memory.activation_offload:
        from fsdp.shard.offload import apply_activation_offload

        apply_activation_offload(units, job.device, compiled=job.compiled)
    sharded = Sharded(
        root=model,
        sizes=job.sizes,
        mesh=mesh,
        dtypes=job.dtypes,
        device=job.device,
        units=units,
        accumulate=config.mesh.accumulate,
        reshard=job.resharding(model),
        averaged_over=job.sizes.ranks // job.sizes.tensor if averages else 1,
        views=views,
        whole=frozenset(whole_parameters(model, config.mesh.unsharded)),
        compiled=compiled_modules,
        tensor=tensor,
        vocabulary=vocabulary,
        experts=experts,
    )
    if sharded_by_fsdp:
        _apply_fully_shard(sharded, memory)
        # In a loop of one's own two models may train in turn, each without gradients of the other.
        _reduce_unused(model, own=":" in config.model.name.removeprefix("hf:") and not job.averages)
        _apply_prefetch(units, speed)
        hooks = job.hooks
        if job.sizes.weight_shards == 1 and hooks.reduce_scatter is None:
            hooks = dataclasses.replace(hooks, reduce_scatter=OneBuffer())
        apply_comm(model, hooks, sums=not averages)
    return sharded


def _apply_dtypes(model: nn.Module, dtypes: Dtypes) -> None:
    """Converts parameters and buffers to the dtypes in which they are stored."""
    if any(p.is_floating_point() and p.dtype != dtypes.master for p in model.parameters()):
        # Not model.to(dtype): it would take the imaginary part from complex buffers.
        convert_tensors(
            model,
            lambda tensor: tensor.to(_kept(tensor, dtypes.master)) if tensor.is_floating_point() else tensor,
        )
    if dtypes.frozen is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtypes.stored(parameter))


def _kept(tensor: torch.Tensor, master: torch.dtype) -> torch.dtype:
    """Buffers, such as rotary tables and running means, stay in fp32 beside bf16 masters."""
    buffer = not isinstance(tensor, nn.Parameter)
    return torch.float32 if buffer and master == torch.bfloat16 else master


def _apply_fully_shard(sharded: Sharded, memory: MemorySection) -> None:
    dtypes = sharded.dtypes
    # Beside bf16 masters, buffers and inputs are fp32: FSDP casts the inputs.
    plain = dtypes.param == dtypes.master != torch.bfloat16
    mixed = MixedPrecisionPolicy(
        # None where nothing is cast: a cast to the same dtype would still cost a copy in the gathered buffer.
        param_dtype=None if plain and dtypes.frozen is None else dtypes.param,
        reduce_dtype=None if plain and dtypes.reduce == dtypes.master else dtypes.reduce,
        output_dtype=dtypes.output,
    )
    offload: OffloadPolicy = (
        # Tensors in files cannot be pinned: that would hold them in memory.
        CPUOffloadPolicy(pin_memory=sharded.device.type == "cuda" and memory.nvme != "all")
        if memory.cpu_offload
        else OffloadPolicy()
    )
    reshard = sharded.reshard if isinstance(sharded.reshard, int) else False
    if (
        isinstance(reshard, int)
        and not isinstance(reshard, bool)
        and reshard in (1, sharded.sizes.weight_shards)
    ):
        reshard = reshard != 1  # FSDP's own reading of the two ends, without its warning
    named = sharded.root.named_parameters(remove_duplicate=False)
    ignored = {p for name, p in named if p.dim() == 0 or name in sharded.whole}
    if sharded.whole:
        apply_casts(sharded.root, ignored, dtypes.master, dtypes.param)
    axes = tuple(axis for axis in sharded.mesh.mesh_dim_names or () if axis != "tensor")
    wrap = functools.partial(  # a mesh of two axes selects HSDP
        fully_shard, mesh=sharded.mesh[axes], offload_policy=offload, ignored_params=ignored or None
    )
    # The model's output is the root's: a block's, cast too, would meet the root's parameters in bf16.
    within = dataclasses.replace(mixed, output_dtype=None)
    if (experts := sharded.experts) is not None:
        # A router's weights keep their dtype, as in a block that is one unit.
        policy = dataclasses.replace(within, cast_forward_inputs=False)
        for module in experts.modules:
            wrap(module, mesh=experts.mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Backward begins with the last unit and the root's own parameters: once freed, they would be gathered
    # again at once.
    for unit in sharded.units:
        if isinstance(unit[0], FSDPModule):  # experts
            continue
        modules = unit if len(unit) > 1 else unit[0]
        last = unit is sharded.units[-1]
        wrap(modules, mp_policy=within, reshard_after_forward=False if last else reshard)
    wrap(sharded.root, mp_policy=mixed, reshard_after_forward=False)
    if sharded.sizes.weight_shards == 1 and not reshard and memory.nvme != "all":
        sharded.together = whole_groups(sharded.root)


def _reduce_unused(root: nn.Module, *, own: bool) -> None:
    """Experts that a rank does not use, and in a model of one's `own` what is in no unit, take part in its
    reductions with zeros: without them each rank would reduce other parameters. One that no rank uses has a
    gradient of zeros then, which AdamW decays. Units that a rank does not call are not gathered there.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule) and ((own and module is root) or has_separate_experts(module)):
            reduce_unused = getattr(module, "set_reduce_scatter_unused_params", None)  # torch 2.11 has none
            if reduce_unused is not None:
                reduce_unused(True, recurse=False)


def _apply_prefetch(units: Sequence[list[nn.Module]], speed: SpeedSection) -> None:
    """FSDP gathers one unit ahead by itself; a deeper prefetch is set on each unit."""
    heads: list[FSDPModule] = [unit[0] for unit in units if isinstance(unit[0], FSDPModule)]
    for at, unit in enumerate(heads):
        if speed.prefetch_forward > 1:
            unit.set_modules_to_forward_prefetch(heads[at + 1 : at + 1 + speed.prefetch_forward])
        if speed.prefetch_backward > 1:
            unit.set_modules_to_backward_prefetch(heads[max(0, at - speed.prefetch_backward) : at][::-1])

"""Private names of torch, all that are used here: operators, modules, process groups, FSDP2's groups.

Each has a test in tests/base/test_torch_private.py, which fails first when torch changes. FSDP2 has public
switches, but no public way to the tensors that a group holds, to the order of its reductions, or to the
moments in which it communicates. Without FakeTensorMode there is no plan and no estimate after an
out-of-memory error; without TorchDispatchMode no account of memory on CPU, no plan, no activation budget.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fsdp.base.errors import ConfigError

log = logging.getLogger(__name__)

__all__ = ["FSDPParamGroup", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves"]
"""tree_leaves, all leaves of nested containers: torch.utils has no public module for it."""

WRAPPER_NAMES = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""What activation checkpointing and torch.compile put into parameter names. Other names would stay in
checkpoints, which then have other keys with and without these wrappers.
"""
COLLECTIVE_OPS = {
    **dict.fromkeys(("_allgather_base_", "allgather_"), "all_gather"),
    **dict.fromkeys(("allreduce_", "broadcast_"), "all_reduce"),
    **{"_reduce_scatter_base_": "reduce_scatter", "alltoall_base_": "all_to_all"},
}
"""Operators of the c10d namespace → collective. One under another name is missing from a plan's
communication.
"""
WRITE_ONLY_OPS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
"""In-place operators that do not read what they write. One under another name is planned as a read and a
write.
"""
EXTRA_STATE = "_extra_state"
"""The last part of the key under which a state dict has what a module's get_extra_state returns.

Without it, a file of a model with such a module is refused as no state dict.
"""
WRAPPERS = (DTensor, _functional_collectives.AsyncCollectiveTensor)
"""Tensors whose operations are dispatched again, on the tensors within; their own storages have no memory."""
OPTIMIZER_IMPORT = "torch._dynamo"
"""A package that each optimizer of torch imports in its first step: 20 MiB and more."""
SNAPSHOT_VIEWER = "python -m torch.cuda._memory_viz trace_plot"
"""The command that draws a snapshot of CUDA's allocator, named in a profile's log and docs."""
DCP_PLACE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
"""Module and name that `.metadata` has for the place of an item in a file. Files on disk hold it: a torch
that renames it breaks its own old checkpoints too.
"""
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
DCP_OLD_PROPERTIES, DCP_OLD_UNREAD = (_OLD, "TensorProperties"), (_OLD, "MEM_FORMAT_ENCODING")
"""Names in older versions' `.metadata`: the same class with the same state, and a field's function."""
_METADATA = "torch.distributed.checkpoint.metadata"
DCP_UNREAD = ((_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"))
"""Functions that `.metadata` calls for fields of a tensor that no reader here uses."""

# ---------------------------------------------------------------- tensors, modules, optimizers


def product_operators() -> frozenset[Any]:
    """The operators that scaled_dot_product_attention becomes on CPU and CUDA, varlen_attn's where torch has
    it, and that of a float8 matrix product. `--memory.activation_checkpointing ops` computes one that is
    missing here again.
    """
    aten: Any = torch.ops.aten
    with contextlib.suppress(ImportError):  # the import registers the operator
        importlib.import_module("torch.nn.attention.varlen")
    varlen = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    names = "flash_attention", "efficient_attention", "flash_attention_for_cpu", "cudnn_attention"
    fused = (getattr(aten, f"_scaled_dot_product_{name}") for name in names)
    operators = *fused, aten._scaled_mm, varlen
    return frozenset(operator.default for operator in operators if operator is not None)


def writes(tensor: Tensor) -> int:
    """How often the tensor was written in place. Without it, a forward that changes its own state is
    recomputed without an error.
    """
    return tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of. Without it, views of parameters are offloaded as activations."""
    return tensor._base


def schema(operator: Any) -> Any:
    """An operator's schema: name, overload, arguments with aliases. Without it, a plan cannot tell views and
    in-place writes from operations that allocate.
    """
    return operator._schema


def foreach_norm(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The 2-norm of each tensor, in few kernels; of bf16 in fp32. torch.nn.utils.get_total_norm returns only
    their norm.
    """
    low = bool(tensors) and tensors[0].dtype == torch.bfloat16
    return torch._foreach_norm(tensors, 2, torch.float32 if low else None)  # type: ignore[no-any-return]


def foreach_multiply_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Scales each tensor in place, in few kernels. clip_grads_with_norm_ takes parameters, not tensors."""
    torch._foreach_mul_(tensors, factor)  # type: ignore[call-overload]


def convert_tensors(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter, gradient and buffer by `convert` of it, in place, as Module.to does.

    Module.to drops the imaginary part of complex buffers; Module.to_empty separates tied parameters, and both
    separate a buffer that several modules share.
    """
    # The key keeps the tensor: its id stays its own.
    converted: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in converted:
            converted[id(tensor)] = (tensor, convert(tensor))
        return converted[id(tensor)][1]

    model._apply(once)


def gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called on it. Without it, a model whose
    gradients such hooks change trains without the change.
    """
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def module_hooks(module: nn.Module) -> bool:
    """Whether a forward or backward hook was registered on it, which nothing but its call runs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class ConvertedModule(nn.Module):
    """A module with a hook after Module.to, .half, .cuda and the like, for which torch has none.

    Without it, `model.to(torch.bfloat16)` rounds buffers that must stay fp32.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.after_conversion()
        return self

    def after_conversion(self) -> None:
        """Called when all tensors are converted."""


class LocalShardAdam(torch.optim.Adam):
    """Adam and AdamW whose kernels receive each DTensor's local shard. torch has no hook between the choice
    of a group's tensors and the kernels. Without it, the update pays DTensor's dispatch for each tensor.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            for index, tensor in enumerate(tensors):
                if isinstance(tensor, DTensor):
                    tensors[index] = tensor.to_local()
        return has_complex


def like_shard(shard: Tensor, local: Tensor, shape: torch.Size | None = None) -> Tensor:
    """`local` with the placement of `shard`, on the device where it is: `DTensor.from_local` would move it to
    the mesh's. FSDP2 makes its parameters in host memory so. If `shard` is no DTensor, `local` itself.

    `shape`: of the whole tensor, if it is not that of `shard`.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if not isinstance(shard, DTensor):
        return local
    stride = shard.stride() if shape is None else torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shard.shape if shape is None else shape, stride, local.dtype)
    spec = DTensorSpec(shard.device_mesh, shard.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What Module.compile puts before forward; None if the module is not compiled."""
    return module._compiled_call_impl  # type: ignore[no-any-return]


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replaces what Module.compile puts before forward: a hook inside compiled code would break its graph.

    Without it, activation offload does not work with compiled units.
    """
    module._compiled_call_impl = call  # type: ignore[assignment]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile(module) returned; any other module as it is.

    Without it, a model that its factory has compiled is called without its targets.
    """
    return getattr(module, "_orig_mod", module)  # type: ignore[no-any-return]


def set_compiler_activation_budget(budget: float) -> None:
    """The part of activations that compiled code keeps for backward. torch.compile has no option for it.

    Without it, `--memory.activation_budget` has no effect on compiled units.
    """
    functorch: Any = torch._functorch.config
    functorch.activation_memory_budget = budget


def forget_meshes() -> None:
    """Empties DTensor's caches of what was computed for a mesh: torch has no public function for it.

    They keep every mesh that was used, with its process groups and the groups' threads. And meshes of one
    shape are equal to them: the next run in this process would be given the last one's dead groups. torch
    2.11 keeps some meshes all the same, in C++.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            owners = (module, *(owner for owner in classes if owner.__module__ == name))
            for value in [value for owner in owners for value in vars(owner).values()]:
                cached = getattr(value, "__func__", value)
                if hasattr(cached, "cache_clear") and not isinstance(cached, type):
                    cached.cache_clear()


# ---------------------------------------------------------------- fake tensors


@contextlib.contextmanager
def fake_forward() -> Iterator[FakeTensorMode]:
    """Fake tensors, with StandIns."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, StandIns():
        yield mode


class StandIns(TorchFunctionMode):
    """What mixtures of experts and layers dropped at random do on tensors without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, more = getattr(func, "__name__", ""), kwargs or {}
        if "grouped_mm" in name:
            # Each row times the matrix of its group are as many operations, and a result and gradients as
            # large, as all rows times the first. torch's own has a fake kernel for bfloat16 alone, no count.
            return args[0].to(args[1].dtype) @ args[1][0]
        if name == "rand" and not any(args) and not more.get("size"):
            return 1.0  # no layer is dropped: a fake tensor has no value to compare
        if name == "backward":
            run, ends = Variable._execution_engine.run_backward, (args[0],)
            with self:  # units are computed again there; a mode is off while it handles a call
                return run(ends, (torch.ones_like(args[0]),), False, False, (), True, True)
        return func(*args, **more)


# ---------------------------------------------------------------- process groups, DDP, the autograd engine


def abort_all_groups() -> None:
    """Aborts all process groups, in the order that NCCL needs. ProcessGroup.abort is public, but the list of
    all groups is private. Without it, a rank that leaves after an error waits for the NCCL watchdog.
    """
    distributed_c10d._abort_process_group()


def all_groups() -> list[dist.ProcessGroup]:
    """The default group and all others of this process. The list of all groups is private.

    Whoever destroys groups holds them until their modules are freed. DDP's reducer frees its group while it
    holds Python's lock, and gloo's destructor then waits for a thread that needs the lock to free the tensor
    of its last collective: the process hangs. A group that Python frees last releases the lock first.
    """
    return list(distributed_c10d._world.pg_map)


def functional_collectives() -> ModuleType:
    """torch's module of collectives without side effects, which DTensor and the axes' exchanges call. Its
    `wait_tensor` waits for each of them, in forward and in backward. Without it a rank that waits in one is
    taken for a rank that waits elsewhere.
    """
    return importlib.import_module("torch.distributed._functional_collectives")


def init_fake_group(rank: int, ranks: int) -> None:
    """A default process group whose collectives do nothing: the planner's. torch has it for its own tests
    alone.

    DTensor caches layouts with the mesh of an earlier default group, which equals a new one's and has groups
    that are gone: the cache is cleared.

    Without it, fsdp/plan cannot shard a model for another number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", int)()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def flight_recorder_entries() -> list[dict[str, Any]]:
    """The collectives in PyTorch's flight recorder, oldest first; empty if this torch has none.

    The generic recorder and, in torch 2.11 and 2.15, NCCL's own. NCCL's lists the ranks of each group: they
    are `group_ranks` of its entries. Without the recorder, a hang of NCCL has no verdict.
    """
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            recorded = json.loads(dump(True, False))
            groups = recorded.get("pg_config", {})
            for entry in recorded.get("entries", []):
                ranks = groups.get(str(entry["process_group"][0]), {}).get("ranks", "")
                entries.append({**entry, "group_ranks": ranks})
    return entries


def check_buckets_reduced(model: DistributedDataParallel) -> None:
    """RuntimeError if a bucket of DDP was not reduced in the last backward. Private since it is experimental.

    Without it, a parameter that the loss does not depend on makes the other ranks wait for the time-out.
    """
    model._check_reducer_finalized()


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Called during a backward: queues `act` for when all gradients are computed.

    FSDP2 and DDP end their reductions in such callbacks; those of one backward run in the order of their
    queueing. Without it, the sum of the loss cannot overlap the end of a backward.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(act)


# ---------------------------------------------------------------- the allocator, checkpoints, torchvision


def start_allocator_history(most_events: int) -> None:
    """Records each allocation and release with its Python stack, at most `most_events` of them."""
    torch.cuda.memory._record_memory_history(max_entries=most_events, stacks="python")


def stop_allocator_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def write_allocator_snapshot(path: Path) -> None:
    """The file that https://pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(str(path))


def storage_info(path: str, offset: int, length: int) -> Any:
    """The place of an item in a file, as `.metadata` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def import_torchvision() -> ModuleType:
    """The torchvision package, imported at the first call."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed.", f"pip install {error.name}") from None


# ---------------------------------------------------------------- what a group of FSDP2 holds


def parameter_groups(root: nn.Module) -> Iterator[FSDPParamGroup]:
    """The parameter groups of all modules. torch 2.11 has at most one a module, 2.13 and 2.15 a list.

    Without them: no account of memory by kind, no check that ranks run the same branches, no parameters in
    files.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from (group for group in (groups or [state._fsdp_param_group]) if group is not None)


def tensors_by_kind(group: FSDPParamGroup) -> Iterator[tuple[str, Tensor | None]]:
    """(parameters, gathered or gradients; tensor) of all that a group holds.

    Several exist only after the first gather or reduction. One under another name is counted as activations.
    """
    for parameter in group.fsdp_params:
        yield from (("parameters", parameter.sharded_param), ("parameters", parameter._sharded_param_data))
        yield from (("gathered", tensor) for tensor in parameter.all_gather_outputs)
        yield "gathered", getattr(parameter, "_unsharded_param", None)
        yield "gathered", getattr(parameter, "_sharded_post_forward_param_data", None)
        for gradient in (gathered_gradient, accumulated_gradient, sharded_gradient):
            yield "gradients", gradient(parameter)
    yield "gradients", getattr(group, "_partial_reduce_output", None)


def gathered_gradient(parameter: FSDPParam) -> Tensor | None:
    """The gradient of the gathered parameter, before FSDP takes it for a reduction."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return None if gathered is None else gathered.grad


def accumulated_gradient(parameter: FSDPParam) -> Tensor | None:
    """The unreduced gradient of several micro-batches in the reduction's dtype. torch 2.15 keeps it in the
    gathered parameter's .grad and returns that here.
    """
    return getattr(parameter, "unsharded_accumulated_grad", None)


def sharded_gradient(parameter: FSDPParam) -> Tensor | None:
    """The reduced gradient of this rank's shard."""
    return parameter.sharded_param.grad if parameter.sharded_param is not None else None


def move_padded_shard(parameter: FSDPParam, make: Callable[[Tensor], Tensor]) -> None:
    """Replaces the padded data under a sharded parameter by `make(data)`; the parameter becomes a view of it.

    FSDP allocates the padding itself, in memory. Without this, parameters that rest in files stay in memory
    too.
    """
    room = make(parameter._sharded_param_data)
    sharded: Any = parameter.sharded_param
    rows = sharded._local_tensor.shape
    parameter._sharded_param_data = room
    sharded._local_tensor = room[: rows.numel()].view(rows)


def padded_shard(parameter: FSDPParam) -> Tensor:
    """This rank's shard, flat, with the padding that makes all ranks' shards equally long."""
    return parameter._sharded_param_data


def is_written(parameter: FSDPParam) -> bool:
    """Whether a forward has written into the gathered parameter, or put other memory under it; to be called
    before FSDP frees it. False for a weight that is gathered in another form (float8).

    Without it, a model whose forward updates its own parameters trains without these updates.
    """
    whole, rooms = getattr(parameter, "_unsharded_param", None), parameter.all_gather_outputs
    if whole is None or len(rooms) != 1 or hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
        return False
    part: Tensor = getattr(whole, "_local_tensor", whole)  # of a weight that tensor ranks divide
    if part.untyped_storage().data_ptr() != rooms[0].untyped_storage().data_ptr():
        return True
    shard = padded_shard(parameter)
    mesh: Any = parameter.mesh_info
    gathered = rooms[0].narrow(0, mesh.shard_mesh_rank * shard.numel(), shard.numel())
    # Bytes, so that a NaN is equal to itself.
    as_gathered = shard.to(gathered.device, gathered.dtype)
    return not torch.equal(as_gathered.view(torch.uint8), gathered.view(torch.uint8))


def replaced_parameter(group: FSDPParamGroup) -> Tensor | None:
    """The first tensor that a module has in the place of its parameter, as torch.func.functional_call puts it
    there; to be called before the group's forward.

    Without it, FSDP gathers the parameter into the module, and the other tensor is ignored in silence.
    """
    for parameter in group.fsdp_params:
        info = parameter._module_info
        held = info.module._parameters.get(info.param_name)
        known = (None, parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
        is_shard = isinstance(held, DTensor) and isinstance(held, nn.Parameter)  # loaded anew
        if not is_shard and not any(held is tensor for tensor in known):
            return held
    return None


def frees_after_forward(group: FSDPParamGroup) -> bool:
    """Whether the gathered parameters are freed after forward, and gathered again for backward."""
    return group.post_forward_mesh_info is not None


def seen_tensors(output: Any) -> Sequence[Tensor]:
    """The tensors of a forward's output that need a gradient and at which FSDP starts the module's backward.
    torch 2.11 does not find those in a dataclass.

    Without it, a unit whose output hides its tensors ends the process in backward, by a signal.
    """
    if (find := getattr(_common_utils, "collect_grad_tensors", None)) is not None:
        return find(output)  # type: ignore[no-any-return]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


# ---------------------------------------------------------------- what a group of FSDP2 does


def forward_order(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """The groups of all modules in the order of their forwards; emptied when the root's backward ends."""
    return group.comm_ctx.post_forward_order


UNUSED = "reduce_scatter_unused_params"
"""Of a group that reduces zeros for parameters without a gradient; torch 2.11 has none."""


def unreduced_groups(groups: Sequence[FSDPParamGroup]) -> list[tuple[int, list[bool]]]:
    """(index of a group whose backward has not ended, which of its parameters hold a gradient).

    Without it, a rank that leaves out a branch of the root's own group is not found.
    """
    return [
        (index, [getattr(group, UNUSED, False) or _has_unreduced(p) for p in group.fsdp_params])
        for index, group in enumerate(groups)
        if group._training_state is not TrainingState.POST_BACKWARD
    ]


def _has_unreduced(parameter: FSDPParam) -> bool:
    return accumulated_gradient(parameter) is not None or gathered_gradient(parameter) is not None


def group_name(group: FSDPParamGroup) -> str:
    """Its module's name in the root; empty for the root. FSDP sets it in the first forward."""
    return group._module_fqn or ""


def parameter_name(parameter: FSDPParam) -> str:
    """Its name in the root. FSDP sets it in the first forward."""
    return parameter._param_fqn or ""


def gathers(group: FSDPParamGroup) -> bool:
    """Whether an all-gather of this group is started and not yet waited for."""
    return group._all_gather_result is not None


def reduces(group: FSDPParamGroup) -> bool:
    """Whether an earlier group's reduce-scatter is under way: a state in torch 2.11, a list of them since
    2.13.
    """
    context, name = group.comm_ctx, "reduce_scatter_state"
    return bool(getattr(context, name, None) or getattr(context, f"{name}s", None))


def whole_groups(root: nn.Module) -> list[FSDPParamGroup]:
    """All groups, for `gather_together`; empty where torch's names have moved."""
    if hasattr(FSDPParam, "alloc_all_gather_outputs") and hasattr(FSDPParamGroup, "_to_unsharded"):
        return list(parameter_groups(root))
    log.info("torch %s gathers each parameter by itself: a kernel and a copy more", torch.__version__)
    return []


def gather_together(groups: Sequence[FSDPParamGroup]) -> None:
    """Casts all shards, which are whole, into the gathered parameters in one kernel. FSDP makes these at its
    first gather. float8 weights and those on the host are left to it.

    Without it, each parameter has a temporary tensor and two kernels.
    """
    gathered, shards = list[Tensor](), list[Tensor]()
    for group in groups:
        for one in group.fsdp_params:
            own = one.offload_to_cpu or hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather")
            if own or not one.all_gather_outputs or not group.is_sharded:
                return
            one.alloc_all_gather_outputs()
            gathered += one.all_gather_outputs
            shards.append(one._sharded_param_data)
    with torch.autograd._unsafe_preserve_version_counter(tuple(gathered)):
        torch._foreach_copy_(gathered, shards)
    for group in groups:
        group._to_unsharded()


# ---------------------------------------------------------------- patches of FSDP2, undone at their end

COLLECTIVE_FUNCTIONS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
"""Functions of FSDP in which a new tensor is a buffer of a collective."""

Run = Callable[[], Any]
Patch = contextlib.AbstractContextManager[None]
AroundMethod = Callable[[Any, Run], Any]
"""Receives a parameter group and its method as a call without arguments; returns the call's result."""


@contextlib.contextmanager
def _wrapped(owner: Any, names: Iterable[str], wrapper: Callable[..., Any]) -> Iterator[None]:
    """`wrapper` is called for each of these functions that this torch has: with the function's name, the
    function, and its arguments.
    """

    def call_of(name: str) -> Callable[..., Any]:
        function = getattr(owner, name)
        return lambda *args, **kwargs: wrapper(name, function, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        for name in filter(functools.partial(hasattr, owner), names):
            patches.enter_context(mock.patch.object(owner, name, call_of(name)))
        yield


def without_propagation() -> Patch:
    """Trackers do not see how DTensor finds the shapes of results: by operations on fake tensors of the whole
    size. Without it, a plan of tensor ranks has the whole activations of one layer too much.
    """
    propagator, method = type(DTensor._op_dispatcher.sharding_propagator), "_propagate_tensor_meta_non_cached"
    return _wrapped(propagator, [method], lambda _, run, *args: _disable_current_modes()(run)(*args))


def around_collectives(around: Callable[[Run, Sequence[Tensor]], Any]) -> Patch:
    """`around` runs FSDP's functions of COLLECTIVE_FUNCTIONS: it calls its first argument once and returns
    the result. The second holds the unsharded gradients that a reduction receives, and is empty for an
    all-gather.

    FSDP looks them up in its module at each call. Without it, buffers of collectives are counted as
    activations.
    """

    def wrapper(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Its list, not a copy: FSDP empties it to free the gradients.
        gradients = args[1] if name == "foreach_reduce" else ()
        return around(lambda: function(*args, **kwargs), gradients)

    return _wrapped(_fsdp_param_group, COLLECTIVE_FUNCTIONS, wrapper)


def before_reductions(note: Callable[[list[FSDPParam]], None]) -> Patch:
    """Calls `note` with the parameters of each reduction before it starts.

    Without it, ranks that reduce the gradient of one parameter into another are not found.
    """

    def wrapper(_: str, function: Callable[..., Any], parameters: Any, *rest: Any, **named: Any) -> Any:
        note(parameters)
        return function(parameters, *rest, **named)

    return _wrapped(_fsdp_param_group, COLLECTIVE_FUNCTIONS[-1:], wrapper)


def around_methods(methods: Mapping[str, AroundMethod], owner: Any = FSDPParamGroup) -> Patch:
    """Each function runs the method of FSDPParamGroup of that name: unshard, wait_for_unshard, post_backward
    or finalize_backward.

    The compute stream waits in wait_for_unshard and finalize_backward alone. Without them, the time that a
    step waits for communication reads as zero, and a plan has no order of communication.
    """

    def wrapper(name: str, method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        return methods[name](group, lambda: method(group, *args, **kwargs))

    return _wrapped(owner, methods, wrapper)


def chunks_by(cut: Callable[[Tensor, int, int], Any]) -> Patch:
    """FSDP cuts parameters by `cut(tensor, count, dim)`, of whose result it reads two items, in place of a
    list of all chunks. A torch that cuts in another way is left as it is: a plan for many ranks takes longer.
    """
    return _wrapped(_fsdp_param, ["_chunk_with_empty"], lambda _, __, *args, **named: cut(*args, **named))


@contextlib.contextmanager
def copies_of_offloaded(copies: bool) -> Iterator[None]:
    """With `copies`, FSDP gathers from a copy of each shard, as it does from shards in the host's memory.

    Without it, a plan of fake tensors, which are all of one device, has no copies of offloaded parameters.
    """
    plain: Any = FSDPParam.all_gather_inputs

    def all_gather_inputs(parameter: Any) -> Any:
        if parameter.sharded_state is not ShardedState.SHARDED:
            return plain.fget(parameter)
        copy = torch.empty_like(parameter._sharded_param_data)
        with mock.patch.object(parameter, "_sharded_param_data", copy):
            return plain.fget(parameter)

    with mock.patch.object(FSDPParam, "all_gather_inputs", property(all_gather_inputs) if copies else plain):
        yield


def after_resizes(note: Callable[[torch.UntypedStorage], None]) -> Patch:
    """Calls `note` with each storage whose resize_ is called from Python: FSDP gathers into such storages and
    empties them so, which no dispatch mode sees.

    Without it, gathered parameters are counted at their first size for the whole run.
    """

    def wrapper(_: str, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    return _wrapped(torch.UntypedStorage, ["resize_"], wrapper)

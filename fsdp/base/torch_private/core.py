"""torch without FSDP: tensors, modules, optimizers, fake tensors, process groups, DDP, the allocator.

Without FakeTensorMode there is no plan and no estimate after an out-of-memory error; without
TorchDispatchMode no account of memory on CPU, no plan, no activation budget.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp.base.errors import ConfigError

if TYPE_CHECKING:
    pass

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves"]
"""tree_leaves, all leaves of nested containers: torch.utils has no public module for it."""

# ---------------------------------------------------------------- tensors, modules, optimizers

_CACHED = type(functools.cache(lambda: None))


def attention_products() -> frozenset[Any]:
    """The operators that scaled_dot_product_attention becomes on CPU and CUDA, and that of varlen_attn where
    torch has it. One that is missing here is computed again by `--memory.activation_checkpointing ops`.
    """
    aten: Any = torch.ops.aten
    with contextlib.suppress(ImportError):  # the import registers the operator
        importlib.import_module("torch.nn.attention.varlen")
    varlen = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return frozenset(
        {
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_cudnn_attention.default,
            *([varlen.default] if varlen is not None else []),
        }
    )


def float8_product() -> Any:
    """The operator of a float8 matrix product. Without it, `--memory.activation_checkpointing ops` computes
    such products again.
    """
    return torch.ops.aten._scaled_mm.default


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
    found: Sequence[Tensor] = torch._foreach_norm(tensors, 2, torch.float32 if low else None)
    return found


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
        from torch.distributed.tensor import DTensor

        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


def like_shard(shard: Tensor, local: Tensor, shape: torch.Size | None = None) -> Tensor:
    """`local` with the placement of `shard`, on the device where it is: `DTensor.from_local` would move it to
    the mesh's. FSDP2 makes its parameters in host memory so. If `shard` is no DTensor, `local` itself.

    `shape`: of the whole tensor, if it is not that of `shard`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if not isinstance(shard, DTensor):
        return local
    stride = shard.stride() if shape is None else torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shard.shape if shape is None else shape, stride, local.dtype)
    spec = DTensorSpec(shard.device_mesh, shard.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What Module.compile puts before forward; None if the module is not compiled."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replaces what Module.compile puts before forward: a hook inside compiled code would break its graph.

    Without it, activation offload does not work with compiled units.
    """
    module._compiled_call_impl = call  # type: ignore[assignment]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile(module) returned; any other module as it is.

    Without it, a model that its factory has compiled is called without its targets.
    """
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    found: nn.Module = module._orig_mod if wrapper is not None and isinstance(module, wrapper) else module
    return found


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
            own = [var for var in vars(module).values() if isinstance(var, type) and var.__module__ == name]
            for value in [value for owner in (module, *own) for value in vars(owner).values()]:
                if isinstance(cached := getattr(value, "__func__", value), _CACHED):
                    cached.cache_clear()


# ---------------------------------------------------------------- fake tensors

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Raised by an operation that needs the values of a fake tensor."""


@contextlib.contextmanager
def fake_forward() -> Iterator[FakeTensorMode]:
    """Fake tensors, with stand-ins for what mixtures of experts and layers dropped at random do on them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _StandIns():
        yield mode


class _StandIns(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "grouped_mm" in name:
            return _grouped_product(*args, **kwargs)
        if name == "rand" and not any(args) and not kwargs.get("size"):
            return 1.0  # no layer is dropped: a fake tensor has no value to compare
        return func(*args, **kwargs)


def _grouped_product(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
    """Each row times the matrix of its group, which are as many operations, and a result and gradients as
    large, as all rows times the first. torch's own has a fake kernel for bfloat16 alone, and no count.
    """
    return rows.to(weights.dtype) @ weights[0]


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


def init_fake_group(rank: int, ranks: int) -> None:
    """A default process group whose collectives do nothing: the planner's. torch has it for its own tests
    alone.

    Without it, fsdp/plan cannot shard a model for another number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def flight_recorder_entries() -> list[dict[str, Any]]:
    """The collectives in PyTorch's flight recorder, oldest first; empty if this torch has none.

    The generic recorder and, in torch 2.11 and 2.15, NCCL's own. NCCL's lists the ranks of each group: they
    are `group_ranks` of its entries. Without the recorder, a hang of NCCL has no verdict.
    """
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            recorded = json.loads(dump(True, False))
            groups = recorded.get("pg_config", {})
            ranks = {group: about.get("ranks", "") for group, about in groups.items()}
            for entry in recorded.get("entries", []):
                found.append({**entry, "group_ranks": ranks.get(str(entry["process_group"][0]), "")})
    return found


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


# ---------------------------------------------------------------- CUDA's caching allocator


def start_allocator_history(most_events: int) -> None:
    """Records each allocation and release with its Python stack, at most `most_events` of them."""
    torch.cuda.memory._record_memory_history(max_entries=most_events, stacks="python")


def stop_allocator_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def write_allocator_snapshot(path: Path) -> None:
    """The file that https://pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(str(path))


# ---------------------------------------------------------------- distributed checkpoints


def storage_info(path: str, offset: int, length: int) -> Any:
    """The place of an item in a file, as `.metadata` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


# ---------------------------------------------------------------- torchvision


def import_torchvision() -> ModuleType:
    """The torchvision package, imported at the first call."""
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed.", "pip install -r requirements.txt") from None


@functools.cache
def prepare_torchvision() -> torch.library.Library | None:
    """Makes any later `import torchvision` work with a CPU build of torch and PyPI's torchvision, which is
    built for CUDA. Its extension then cannot load, and the import fails at the two operators that it
    registers fakes for: declaring their schemas is enough. They live as long as the library that this
    returns.
    """
    package = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    extensions = list(Path(package.origin or "").parent.glob("_C*.so")) if package is not None else []
    if not extensions:
        return None
    try:
        torch.ops.load_library(str(extensions[0]))
    except OSError:
        schemas = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return schemas
    return None

"""The user's own communication in place of FSDP's, the divisor of a reduction, and parameters that
--mesh.unsharded keeps whole on each rank.

    --comm.all_gather, --comm.reduce_scatter
        package.module:function(output, input, group, …) → work, or None when it is done; or a class whose
        instance is called so and may allocate(size, dtype=, device=)
    --comm.all_reduce_hook
        package.module:function(gradient), after the reduction of each unit, in place

The process groups are those of the mesh. A function must be the same on every rank; nothing here can check
that. FSDP ignores whole parameters (`ignored_params`): it neither gathers nor casts them, and does not reduce
their gradients. Not here: what is gathered when (shard.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp.base.errors import ConfigError
from fsdp.config import CommSection
from fsdp.dist.mesh import MeshSizes
from fsdp.models import load_attribute

CALLS = {
    "all_reduce_hook": ("gradient",),
    "all_gather": ("output", "input", "group"),
    "reduce_scatter": ("output", "input", "group", "op"),
}
"""The arguments with which FSDP calls the function of each flag."""


@dataclass(frozen=True)
class Hooks:
    """Imported and created before any process group exists; None leaves the operation to FSDP."""

    all_reduce: Callable[[Tensor], None] | None
    all_gather: Any
    reduce_scatter: Any


def load_hooks(section: CommSection) -> Hooks:
    """The objects that the flags name, or a ConfigError."""
    loaded: dict[str, Any] = dict.fromkeys(CALLS)
    for name, arguments in CALLS.items():
        if path := getattr(section, name):
            function: Any = load_attribute(path, f"--comm.{name}")
            try:
                function = function() if inspect.isclass(function) else function
                inspect.signature(function).bind(*arguments)
            except Exception as error:
                hint = f"it is called with ({', '.join(arguments)}); a class is created without arguments"
                raise ConfigError(f"--comm.{name} {path}: {error}.", hint) from error
            loaded[name] = function if name == "all_reduce_hook" else _Collective(function)
    return Hooks(*loaded.values())


class _Collective:
    """The user's function behind torch's AllGather and ReduceScatter interfaces. FSDP calls with
    output_tensor= and input_tensor=; the function may name them otherwise. torch allocates the memory unless
    it does.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        if callable(getattr(function, "allocate", None)):
            self.allocate = function.allocate  # type: ignore[method-assign]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **more: Any
    ) -> Any:
        return self._function(output_tensor, input_tensor, group, *args, **more)


def check_divide(section: CommSection, sizes: MeshSizes) -> None:
    if section.divide_by and sizes.shard == 1:
        raise ConfigError(
            f"--comm.divide_by {section.divide_by} divides where shards are reduced: shard 1 has none.",
            "leave it out, or --mesh.shard 2",
        )


def apply_comm(root: nn.Module, section: CommSection, hooks: Hooks) -> None:
    """Applied to each unit after fully_shard: torch's setters do not recurse by themselves."""
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        unit: Any = module
        if hooks.all_reduce is not None:
            module.set_all_reduce_hook(hooks.all_reduce)
        if hooks.all_gather is not None:
            unit.set_custom_all_gather(hooks.all_gather)
        if hooks.reduce_scatter is not None:
            unit.set_custom_reduce_scatter(hooks.reduce_scatter)
        if section.divide_by:
            module.set_gradient_divide_factor(section.divide_by)
            # A factor other than the group's size becomes ReduceOp.PREMUL_SUM: gloo refuses it, and NCCL up
            # to torch 2.13 returns zeros for it in bf16 (pytorch #190747). A sum, divided locally, is right
            # on both.
            module.set_force_sum_reduction_for_comms(True)


# ---------------------------------------------------------------- parameters that stay whole

FLAG = "--mesh.unsharded"


def whole_parameters(model: nn.Module, text: str) -> dict[str, nn.Parameter]:
    """All names of the parameters that match `text`; a tied parameter matches by any of its names."""
    if not text:
        return {}
    from fsdp.models.lora import matching, patterns

    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {named[name] for name in matching(patterns(text), list(named), FLAG, "parameter")}
    if len(chosen) == len(set(named.values())):
        raise ConfigError(f"{FLAG} {text} leaves nothing to shard.", "--mesh.strategy ddp")
    return {name: parameter for name, parameter in named.items() if parameter in chosen}


def apply_casts(
    model: nn.Module, whole: Collection[nn.Parameter], master: torch.dtype, param: torch.dtype
) -> None:
    """Lets modules with whole parameters compute in their dtype, `master`; outputs have `param` again."""
    if master == param:
        return
    for module in model.modules():
        if any(parameter in whole for parameter in module.parameters(recurse=False) if parameter.dim()):
            module.register_forward_pre_hook(lambda _, args: _cast(args, master))
            module.register_forward_hook(lambda _, args, output: _cast(output, param))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], divisor: float) -> None:
    """Sums the gradients over all ranks in one all-reduce and divides them. Collective.

    A parameter that no rank's loss depends on keeps no gradient; one that some do gets zeros from the others.
    """
    if not parameters:
        return
    like = parameters[0]
    counts = like.new_ones(len(parameters))
    if absent := [at for at, p in enumerate(parameters) if p.grad is None]:
        counts[absent] = 0.0  # a copy from the host, for which a device is waited for
    parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    packed = torch.cat([counts, *parts])
    dist.all_reduce(packed)
    counts, *sums = packed.split([len(parameters), *(p.numel() for p in parameters)])
    used = counts.tolist() if absent else [1.0] * len(parameters)
    for parameter, part, count in zip(parameters, sums, used, strict=True):
        if count:
            parameter.grad = (part / divisor).view_as(parameter)

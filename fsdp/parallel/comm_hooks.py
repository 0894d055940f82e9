"""The user's own communication in place of FSDP's, and the divisor of a reduction.

    --comm.all_gather, --comm.reduce_scatter
        package.module:function(output, input, group, …) → work, or None when it is done; or a class whose
        instance is called so and may allocate(size, dtype=, device=)
    --comm.all_reduce_hook
        package.module:function(gradient), after the reduction of each unit, in place

The process groups are those of the mesh. A function must be the same on every rank; nothing here can check
that. Not here: what is gathered when (shard.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp.base.errors import ConfigError
from fsdp.config import CommSection
from fsdp.dist.mesh import MeshSizes
from fsdp.models import load_attribute


class _Called:
    """A plain function behind torch's AllGather and ReduceScatter interfaces; torch allocates the memory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Hooks:
    """Imported and created before any process group exists; None leaves the operation to FSDP."""

    all_reduce: Callable[[torch.Tensor], None] | None
    all_gather: Any
    reduce_scatter: Any


def load_hooks(section: CommSection) -> Hooks:
    """The objects that the flags name, or a ConfigError."""
    hook = (
        load_attribute(section.all_reduce_hook, "--comm.all_reduce_hook") if section.all_reduce_hook else None
    )
    if hook is not None:
        _check_takes(hook, 1, section.all_reduce_hook, "--comm.all_reduce_hook")
    return Hooks(
        hook,
        _collective(section.all_gather, "--comm.all_gather", 3),
        _collective(section.reduce_scatter, "--comm.reduce_scatter", 4),
    )


def _collective(path: str, flag: str, count: int) -> Any:
    if not path:
        return None
    found: Any = load_attribute(path, flag)
    if inspect.isclass(found):
        try:
            made = found()
        except Exception as error:
            raise ConfigError(
                f"{flag} {path} failed: {type(error).__name__}: {error}.", "it is created without arguments"
            ) from error
        if not callable(made):
            raise ConfigError(
                f"{flag} {path} creates an object that cannot be called.", "give the class a __call__"
            )
        found = made
    _check_takes(found, count, path, flag)
    return found if callable(getattr(found, "allocate", None)) else _Called(found)


def _check_takes(function: Callable[..., Any], count: int, path: str, flag: str) -> None:
    names = {
        1: "(gradient)",
        3: "(output, input, group, async_op=False)",
        4: "(output, input, group, op, async_op=False)",
    }[count]
    keywords: Any = {1: {}, 3: {"async_op": False}, 4: {"op": None, "async_op": False}}[count]
    tensors = {1: ("gradient",), 3: ("output", "input", "group"), 4: ("output", "input", "group")}[count]
    try:
        inspect.signature(function).bind(*tensors, **keywords)
        # FSDP passes no async_op for a reduction.
        inspect.signature(function).bind(
            *tensors, **{name: value for name, value in keywords.items() if name != "async_op"}
        )
    except TypeError as error:
        raise ConfigError(f"{flag} {path}: {error}.", f"it is called with {names}") from None


def check_divide(section: CommSection, sizes: MeshSizes) -> None:
    if section.divide_by and sizes.shard == 1:
        raise ConfigError(
            f"--comm.divide_by {section.divide_by} divides where shards are reduced, and replicate "
            f"{sizes.replicate} × shard 1 "
            "has none.",
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
            unit.set_custom_all_gather(_InOrder(hooks.all_gather))
        if hooks.reduce_scatter is not None:
            unit.set_custom_reduce_scatter(_InOrder(hooks.reduce_scatter))
        if section.divide_by:
            module.set_gradient_divide_factor(section.divide_by)
            # A factor other than the group's size becomes ReduceOp.PREMUL_SUM: gloo refuses it, and NCCL up
            # to torch 2.13 returns zeros for it in bf16 (pytorch #190747). A sum, divided locally, is right
            # on both.
            module.set_force_sum_reduction_for_comms(True)


class _InOrder:
    """FSDP calls with output_tensor= and input_tensor=; the user's function may name them otherwise."""

    def __init__(self, collective: Any) -> None:
        self._collective = collective
        self.allocate = collective.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *args: Any, **more: Any
    ) -> Any:
        return self._collective(output_tensor, input_tensor, group, *args, **more)

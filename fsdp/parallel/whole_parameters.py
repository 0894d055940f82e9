"""Parameters that --mesh.unsharded keeps whole on each rank: their names, dtypes and gradients.

FSDP ignores them (`ignored_params`): it neither gathers nor casts them, and does not reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import FakeTensor
from fsdp.models.lora import matching, patterns

FLAG = "--mesh.unsharded"


def whole_names(model: nn.Module, text: str) -> frozenset[str]:
    """Names of the parameters that match `text`; a tied parameter matches by any of its names."""
    if not text:
        return frozenset()
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {named[name] for name in matching(patterns(text), list(named), FLAG, "parameter")}
    if len(chosen) == len(set(named.values())):
        raise ConfigError(f"{FLAG} {text} leaves nothing to shard.", "--mesh.strategy ddp")
    return frozenset(name for name, parameter in named.items() if parameter in chosen)


def whole_parameters(model: nn.Module, text: str) -> set[nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {named[name] for name in whole_names(model, text)}


def apply_casts(
    model: nn.Module, whole: Collection[nn.Parameter], master: torch.dtype, param: torch.dtype
) -> None:
    """Lets modules with whole parameters compute in their dtype, `master`; outputs have `param` again."""
    if master == param:
        return
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        kept = [parameter in whole for parameter in own if parameter.dim()]
        if not any(kept):
            continue
        if not all(kept):
            raise ConfigError(
                f"{FLAG} keeps some parameters of {name or 'the model itself'} whole and shards others: "
                f"they would have two dtypes, {master} and {param}.",
                f"{FLAG} {name + '.*' if name else 'with names of whole layers'}",
            )
        module.register_forward_pre_hook(lambda _, args, to=master: _cast(args, to))
        module.register_forward_hook(lambda _, args, output, to=param: _cast(output, to))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value


@torch.no_grad()
def average_scalars(parameters: Sequence[nn.Parameter], divisor: float) -> None:
    """As `average_gradients`, one all-reduce a parameter. Collective: the parameters are those of all ranks.

    A rank without a gradient gives -0.0, which changes no sum: only where all do is the sum -0.0.
    """
    for parameter in parameters:
        absent = parameter.grad is None
        total = torch.full_like(parameter, -0.0) if parameter.grad is None else parameter.grad.add_(0.0)
        dist.all_reduce(total)
        if not (absent and _is_negative_zero(total)):
            parameter.grad = total.div_(divisor)


def _is_negative_zero(value: Tensor) -> bool:
    """True for a planner's fake tensor, which has no value."""
    return isinstance(value, FakeTensor) or bool(torch.signbit(value) & (value == 0))


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
    counts, sums = packed[: len(parameters)], packed[len(parameters) :] / divisor
    used = counts.tolist() if absent else [1.0] * len(parameters)
    for parameter, part, count in zip(
        parameters, sums.split([p.numel() for p in parameters]), used, strict=True
    ):
        if count:
            parameter.grad = part.view_as(parameter).clone()

"""Errors of a sharded model's forward, in a line with a HINT where the cause is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError
from fsdp.models.checks import frames, kept_tensors, misfit, stale_reference
from fsdp.models.units import clean_name
from fsdp.parallel.activations import refused_recomputation
from fsdp.parallel.attention import refused_attention


@contextlib.contextmanager
def explained(root: nn.Module) -> Iterator[None]:
    """Context in which a forward that does not fit its data, or cannot be recomputed, raises a
    ConfigError.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        refused = refused_recomputation(error) or refused_attention(error) or misfit(error, root)
        refused = (
            refused or _refused_shard(error, root) or _refused_reference(error, root) or _refused_freed(error)
        )
        if refused is None:
            raise
        raise refused from error


def _refused_shard(error: Exception, root: nn.Module) -> ConfigError | None:
    """The ConfigError for a forward that computes with a shard, as one that calls another method of a unit
    than its forward; None for other errors.
    """
    if "DTensor" not in str(error):
        return None
    names = {module: name for name, module in root.named_modules()}
    owners = [frame.f_locals.get("self") for frame in frames(error)]
    found = next(
        (
            f"{names[owner]}.{key}".lstrip(".")
            for owner in reversed(owners)
            if isinstance(owner, nn.Module) and owner in names
            for key, parameter in owner.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        ),
        "a parameter",
    )
    return ConfigError(
        f"the forward computes with {clean_name(found)} where this rank has a shard of it alone: outside of "
        "the forward of its unit, or after torch.autograd.grad.",
        "--mesh.wrap root gathers all parameters at once; --mesh.wrap class:NAME makes a unit of the class "
        "whose forward computes with it",
    )


def _refused_freed(error: Exception) -> ConfigError | None:
    """The ConfigError for a second backward, as that of a gradient penalty, through a unit that FSDP freed
    in the first one; None for other errors.
    """
    if "out of bounds for storage of size 0" not in str(error):
        return None
    return ConfigError(
        "backward reads a parameter that FSDP has freed, as after torch.autograd.grad or a first backward.",
        "take that gradient inside of the model's forward, with --mesh.wrap root; or --mesh.strategy ddp",
    )


def _refused_reference(error: Exception, root: nn.Module) -> ConfigError | None:
    """The ConfigError for a forward that computes with parameters which a module keeps in a list or
    dictionary: they are those of the model before sharding; None for other errors.
    """
    if "meta" not in str(error):
        return None
    found = next((name for name, tensor in kept_tensors(root) if tensor.is_meta), None)
    return None if found is None else stale_reference(found)

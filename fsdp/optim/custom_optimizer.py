"""An optimizer of the user, `--optim.name package.module:factory`:

    factory(named_parameters, *, lr, betas, weight_decay) → torch.optim.Optimizer

`named_parameters` are the trained parameters as (name, tensor): DTensors where they are sharded. Of lr,
betas, eps, weight_decay and momentum, the flags of their names, the factory gets those that it accepts. A
group with a rate of its own keeps its ratio to --optim.lr. Its states are checked after the first update and
before each save, since a checkpoint can be resumed on other ranks only if it knows what each of them holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.digest import digest_shard
from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection
from fsdp.dist import collectives
from fsdp.models import load_attribute
from fsdp.models.factory import blame, parameters_of
from fsdp.models.units import clean_name

FLAG = "--optim.name"
LR_RATIO = "lr_ratio"
"""The key of a group's rate over --optim.lr."""
PLAIN = (int, float, bool, str, type(None))
FORMS = "keep torch.zeros_like(parameter), or a small tensor that is equal on every rank"


def is_custom(section: OptimSection) -> bool:
    return ":" in section.name


def load_factory(section: OptimSection) -> Callable[..., Any] | None:
    """The user's factory, imported; None for a built-in name. Raises ConfigError."""
    if not is_custom(section):
        return None
    factory = load_attribute(section.name, FLAG)
    if factory is getattr(torch.optim, "Muon", None):
        raise ConfigError(
            f"{FLAG} {section.name} updates whole matrices alone: no shards, vectors or embeddings.",
            f"{FLAG} muon",
        )
    return factory


def build_custom(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the factory returns, checked against the trained parameters of the model."""
    factory = load_factory(section)
    assert factory is not None
    named = [(clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        made = factory(named, **settings_for(section, factory))
    except Exception as error:
        raise ConfigError(
            f"{FLAG} {section.name} failed: {blame(error)}.",
            "it is called with (named_parameters, *, lr, betas, weight_decay)",
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"{FLAG} {section.name} returned a {type(made).__name__}.", "return a torch.optim.Optimizer"
        )
    check_step(f"{FLAG} {section.name}", made)
    _check_parameters(section.name, made, named)
    for group in made.param_groups:
        group[LR_RATIO] = float(group.setdefault("lr", section.lr)) / section.lr
    return made


def settings_for(section: OptimSection, factory: Callable[..., Any]) -> dict[str, Any]:
    """The settings that a factory accepts; with **kwargs, also lr, betas and weight_decay."""
    every = {
        "lr": section.lr, "betas": (section.beta1, section.beta2), "weight_decay": section.weight_decay,
        "eps": section.eps, "momentum": section.momentum,
    }  # fmt: skip
    accepted = parameters_of(factory)
    usual = ("lr", "betas", "weight_decay")
    if accepted is None:
        return {name: every[name] for name in usual}
    return {n: v for n, v in every.items() if n in accepted.named or (accepted.any_name and n in usual)}


def check_step(whose: str, made: torch.optim.Optimizer) -> None:
    """Refuses one that computes losses by itself, as LBFGS does. Messages begin with `whose`."""
    try:
        # The class's: a learning-rate scheduler puts a function without a signature of its own on the object.
        inspect.signature(type(made).step).bind(made)
    except TypeError:
        raise ConfigError(
            f"{whose}: step() of {type(made).__name__} needs a closure, which a run does not pass.",
            "an optimizer that steps once for each gradient",
        ) from None


def _check_parameters(path: str, made: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]) -> None:
    names = {parameter: name for name, parameter in named}
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in held):
        raise ConfigError(
            f"{FLAG} {path}: the optimizer holds a tensor that is no trained parameter.",
            "pass on the tensors of named_parameters themselves, not copies",
        )
    missing = names.keys() - set(held)
    if missing:
        first = next(name for name, parameter in named if parameter in missing)
        raise ConfigError(
            f"{FLAG} {path}: the optimizer leaves out {first}"
            + (f" and {len(missing) - 1} more." if len(missing) > 1 else "."),
            f"give it all parameters, or --model.frozen {first}",
        )


# ---------------------------------------------------------------- its states


class StateCheck:
    """States that a checkpoint cannot keep for another number of ranks are refused by name."""

    def __init__(self, whose: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Messages begin with `whose`."""
        self._whose, self._optimizer = whose, optimizer
        self._names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
        self._updated = False

    def after_update(self) -> None:
        """Checks once: the first update has created the states. Collective."""
        if not self._updated:
            self._updated = True
            self.check()

    def check(self) -> None:
        """Collective: every rank raises the same ConfigError."""
        wrong = next(self._wrong(), None)
        every = collectives.all_gather_objects((wrong, {} if wrong else dict(self._replicated())))
        found = next((one for one, _ in every if one is not None), None)
        if found is None:
            found = _differing([digests for _, digests in every])
        if found is not None:
            raise ConfigError(
                f"{self._whose}: {found}: a checkpoint of it cannot be resumed on other ranks.", FORMS
            )

    def _states(self) -> Iterator[tuple[nn.Parameter, str, Any]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    yield parameter, name, value

    def _wrong(self) -> Iterator[str]:
        # A small vector may have the shape of one parameter's part by chance: its name then has others.
        replicated = {name for parameter, name, value in self._states() if _has_own_shape(parameter, value)}
        for parameter, name, value in self._states():
            fault = _fault(parameter, value)
            if fault and not (name in replicated and _is_replicated(parameter, value)):
                yield f"state {name} of {self._names[parameter]} is {fault}"

    def _replicated(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Plain states of sharded parameters, by name: their shape and bits."""
        for parameter, name, value in self._states():
            if _is_replicated(parameter, value):
                digest = digest_shard(value)
                key = f"state {name} of {self._names[parameter]}"
                yield key, (tuple(value.shape), digest.plain, digest.weighted)


def _is_replicated(parameter: Tensor, value: Any) -> bool:
    """Whether it is a plain state of a sharded parameter: each rank keeps it whole."""
    return isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor)


def _has_own_shape(parameter: Tensor, value: Any) -> bool:
    if not _is_replicated(parameter, value) or not value.dim():
        return False
    assert isinstance(parameter, DTensor)
    return value.shape not in (parameter.shape, parameter.to_local().shape)


def _fault(parameter: Tensor, value: Any) -> str:
    """What a state is if it is neither as its parameter, nor replicated, nor a number; else empty."""
    if not isinstance(value, Tensor):
        # exactly: numpy's float64 is a float, and no checkpoint's reader accepts it
        return "" if type(value) in PLAIN else f"a {type(value).__name__}"
    if isinstance(value, DTensor):
        if not isinstance(parameter, DTensor):
            return "a DTensor, unlike its parameter"
        as_parameter = value.shape == parameter.shape and value.placements == parameter.placements
        placed = f"a DTensor of {tuple(value.shape)}, {', '.join(map(str, value.placements))}"
        return "" if as_parameter else f"{placed}, unlike its parameter of {tuple(parameter.shape)}"
    if not isinstance(parameter, DTensor) or not value.dim():
        return ""
    if value.shape == parameter.shape:
        return f"a plain tensor of {tuple(value.shape)}, the whole shape of its sharded parameter"
    if value.shape == parameter.to_local().shape:
        return f"a plain tensor of {tuple(value.shape)}, the shape of this rank's part"
    return ""


def _differing(every: Iterable[dict[str, tuple[Any, ...]]]) -> str | None:
    first, *others = every
    for rank, theirs in enumerate(others, 1):
        for name in [*first, *(name for name in theirs if name not in first)]:
            if first.get(name) != theirs.get(name):
                return f"{name} is a plain tensor that differs between rank 0 and rank {rank}"
    return None

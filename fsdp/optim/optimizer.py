"""Optimizers, their parameter groups, and the learning rate as a pure function of the step: nothing of it is
saved, and a resumed run continues it.

Matrices decay, vectors and scalars do not. Parameters that are not sharded (0-dim ones) stand in groups of
their own: a grouped kernel takes DTensors or plain tensors, never both.

An optimizer of the user, `--optim.name package.module:factory`:

    factory(named_parameters, *, lr, betas, weight_decay) → torch.optim.Optimizer

`named_parameters` are the trained parameters as (name, tensor): DTensors where they are sharded. Of lr,
betas, eps, weight_decay and momentum, the flags of their names, the factory gets those that it accepts. A
group with a rate of its own keeps its ratio to --optim.lr. Its states are checked after the first update and
before each save, since a checkpoint can be resumed on other ranks only if it knows what each of them holds.

TrainState: everything that a resume restores, and nothing else.

Random streams are derived from (seed, step, stream) and the data's order from (seed, step), so neither is
here. The learning rate is a function of the step. Beside parameters and optimizer a restored run needs four
numbers; a mixture and a stream also have a position of their own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fsdp.base.devices import digest_shard
from fsdp.base.errors import ConfigError, first_line
from fsdp.base.torch_private import LocalShardAdam
from fsdp.config import OptimSection
from fsdp.config.sections import ADAMS, DECAYING
from fsdp.distributed import collectives
from fsdp.distributed.boxes import local_tensor
from fsdp.models import load_attribute
from fsdp.models.registry import blame, parameters_of
from fsdp.models.units import clean_name

FLAG = "--optim.name"
LR_RATIO = "lr_ratio"
"""The key of a group's rate over --optim.lr."""
PLAIN = (int, float, bool, str, type(None))


def is_custom(section: OptimSection) -> bool:
    return ":" in section.name


def load_factory(section: OptimSection) -> Callable[..., Any] | None:
    """The user's factory, imported; None for a built-in name. Raises ConfigError."""
    return load_attribute(section.name, FLAG) if is_custom(section) else None


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
    held = {parameter for group in made.param_groups for parameter in group["params"]}
    strangers, left_out = held - {p for _, p in named}, [name for name, p in named if p not in held]
    if strangers or left_out:
        fault = "holds a tensor that is no trained parameter" if strangers else f"leaves out {left_out[0]}"
        raise ConfigError(
            f"{FLAG} {section.name}: the optimizer {fault}.",
            "give it all tensors of named_parameters, themselves, not copies; --model.frozen for the others",
        )
    for group in made.param_groups:
        group[LR_RATIO] = float(group.setdefault("lr", section.lr)) / section.lr
    return made


def settings_for(section: OptimSection, factory: Callable[..., Any]) -> dict[str, Any]:
    """The settings that a factory accepts; with **kwargs, also lr, betas and weight_decay."""
    every = {
        "lr": section.lr,
        "betas": (section.beta1, section.beta2),
        "weight_decay": section.weight_decay,
        "eps": section.eps,
        "momentum": section.momentum,
    }
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


# ---------------------------------------------------------------- states of an optimizer of the user


class StateCheck:
    """Refuses states, by name, that a checkpoint cannot keep for another number of ranks. A state is a
    number, a DTensor sharded as its parameter, or a plain tensor that is equal on every rank.
    """

    def __init__(self, owner: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Messages begin with `owner`."""
        self._owner, self._optimizer = owner, optimizer
        self._names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
        self._updated = False

    def after_update(self) -> None:
        """Checks once: the first update has created the states. Collective."""
        if not self._updated:
            self._updated = True
            self.check()

    def check(self) -> None:
        """Collective: every rank raises the same ConfigError."""
        fault, digests = "", {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    label = f"state {name} of {self._names[parameter]}"
                    if problem := _state_fault(parameter, value):
                        fault = fault or f"{label} is {problem}"
                    elif isinstance(parameter, DTensor) and type(value) is Tensor:
                        digest = digest_shard(value)
                        digests[label] = (tuple(value.shape), digest.plain, digest.weighted)
        faults, tables = zip(*collectives.all_gather_objects((fault, digests)), strict=True)
        differing = [
            name for t in tables for name in {**t, **tables[0]} if t.get(name) != tables[0].get(name)
        ]
        fault = next((f"{name} is a plain tensor that differs between ranks" for name in differing), "")
        fault = next(filter(None, faults), fault)
        if fault:
            raise ConfigError(
                f"{self._owner}: {fault}: a checkpoint of it cannot be resumed on other ranks.",
                "keep torch.zeros_like(parameter), or a small tensor that is equal on every rank",
            )


def _state_fault(parameter: Tensor, value: Any) -> str:
    if not isinstance(value, Tensor):
        # exactly: numpy's float64 is a float, and no checkpoint's reader accepts it
        return "" if type(value) in PLAIN else f"a {type(value).__name__}"
    if isinstance(value, DTensor):
        alike = isinstance(parameter, DTensor) and (
            (value.shape, value.placements) == (parameter.shape, parameter.placements)
        )
        return "" if alike else f"a DTensor of {tuple(value.shape)}, sharded unlike its parameter"
    local = parameter.to_local() if isinstance(parameter, DTensor) else None
    if local is not None and value.dim() and value.shape in (local.shape, parameter.shape):
        return f"a plain tensor of {tuple(value.shape)}, the shape of its sharded parameter or of its part"
    return ""


# ---------------------------------------------------------------- built-in optimizers


class ShardedAdam(LocalShardAdam):
    """torch's update of this rank's own parts. It is elementwise, so the numbers are the same; hundreds of
    tensors need not go through DTensor's dispatch at every step, and a first step need not learn how it would
    cut them.
    """


class ShardedAdamW(LocalShardAdam, torch.optim.AdamW): ...


def build_optimizer(
    section: OptimSection, model: nn.Module, *, compiled: bool = False
) -> torch.optim.Optimizer:
    """`compiled`: the update of bf16 and 8-bit moments, which torch has no kernel for, is compiled."""
    if is_custom(section):
        return build_custom(section, model)
    if section.name == "muon":
        return _build_muon(section, model)
    groups = parameter_groups(section, model.parameters())
    halved = any(p.dtype == torch.bfloat16 for group in groups for p in group["params"])
    if section.state != "master" or halved:  # no dtype of torch's Adam
        from fsdp.optim.small_states import SmallStateAdam

        return SmallStateAdam(
            groups,
            kind="bf16" if section.state == "master" else section.state,
            places={parameter: at for at, parameter in enumerate(model.parameters())},
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            compiled=compiled,
        )
    fused = section.fused != "false"
    if section.name == "sgd":
        # torch's fused SGD takes plain tensors only.
        fused = fused and not any(isinstance(p, DTensor) for p in model.parameters())
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=fused)
    kind = {"adamw": ShardedAdamW, "adam": ShardedAdam}[section.name]
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps, fused=fused)


def _build_muon(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    from fsdp.optim.muon import ShardedMuon, hidden_matrices

    matrices = hidden_matrices(model, section.muon_parameters)
    other = parameter_groups(section, (p for p in model.parameters() if p not in set(matrices)))
    fused, betas = section.fused != "false", (section.beta1, section.beta2)
    adamw = ShardedAdamW(other, lr=section.lr, betas=betas, eps=section.eps, fused=fused) if other else None
    made = ShardedMuon(
        matrices,
        adamw,
        lr=section.muon_lr or section.lr,
        weight_decay=section.weight_decay,
        momentum=section.muon_momentum,
    )
    made.param_groups[0][LR_RATIO] = (section.muon_lr or section.lr) / section.lr
    return made


def parameter_groups(section: OptimSection, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """At most four groups, in a fixed order: decayed or not, sharded or not; without frozen parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decay = section.weight_decay if section.name in DECAYING else 0.0
    groups = []
    for matrix in (True, False):
        for sharded in (True, False):
            members = [p for p in trained if (p.dim() >= 2, isinstance(p, DTensor)) == (matrix, sharded)]
            if members:
                groups.append({"params": members, "weight_decay": decay if matrix else 0.0})
    return groups


def apply_hyperparameters(section: OptimSection, optimizer: torch.optim.Optimizer) -> None:
    """After a restore: rates and decay follow the flags, not the checkpoint."""
    if section.name == "muon":
        from fsdp.optim.muon import ShardedMuon

        assert isinstance(optimizer, ShardedMuon)
        optimizer.drop_other_states()
    if is_custom(section) or section.name == "muon":
        return  # its groups are as they were built; a restore changes none
    if optimizer.state:  # a run that starts has none yet
        from fsdp.optim.small_states import check_states

        check_states(optimizer)
    fresh = {"betas": (section.beta1, section.beta2), "eps": section.eps, "momentum": section.momentum}
    decay = section.weight_decay if section.name in DECAYING else 0.0
    for group in optimizer.param_groups:
        group.update({name: value for name, value in fresh.items() if name in group})
        group["weight_decay"] = decay if group["params"][0].dim() >= 2 else 0.0


def same_states(saved: str, name: str) -> bool:
    """Whether states saved by one --optim.name are those of another; True where a name is not known. Adam's
    and AdamW's are the same.
    """
    return not saved or not name or saved == name or (saved in ADAMS and name in ADAMS)


# ---------------------------------------------------------------- the learning rate

TRIED = 1000
"""Steps at which a user's function is called before the run."""

Factor = Callable[[int, int, OptimSection], float]


class Schedule:
    """The rate of each optimizer step of a run of `total_steps`."""

    def __init__(self, section: OptimSection, total_steps: int) -> None:
        self._section, self._total = section, total_steps
        self._factor: Factor | None = None
        if ":" in section.schedule:
            self._factor = load_attribute(section.schedule, "--optim.schedule")
            for step in range(1, total_steps + 1, max(1, total_steps // TRIED)):
                self.lr(step)
            self.lr(max(1, total_steps))

    def lr(self, step: int) -> float:
        """The rate of step `step`, counted from 1."""
        if self._factor is None:
            return _rate(self._section, step, self._total)
        try:
            factor = float(self._factor(step, self._total, self._section))
            if not 0 <= factor < math.inf:
                raise ValueError(f"it returned {factor}, which is not a finite number from 0")
        except Exception as error:
            raise ConfigError(
                f"--optim.schedule {self._section.schedule} failed at step {step}: {blame(error)}.",
                "it is called with (step, total_steps, settings), and returns the factor of --optim.lr",
            ) from error
        return self._section.lr * factor


def _rate(section: OptimSection, step: int, total_steps: int) -> float:
    """The built-in schedules: linear warm-up to the peak, then down to min_lr_ratio of it."""
    warmup = section.warmup_steps if section.warmup_steps >= 0 else total_steps // 20
    if step <= warmup:
        return section.lr * step / max(1, warmup)
    if section.schedule == "constant":
        return section.lr
    floor = section.min_lr_ratio
    start = warmup
    if section.schedule == "wsd":
        start = max(warmup, total_steps - round(section.decay_share * total_steps))
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    if section.schedule == "cosine":
        return section.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    if section.schedule in ("linear", "wsd"):
        return section.lr * (floor + (1 - floor) * (1 - done))
    raise KeyError(section.schedule)


# ---------------------------------------------------------------- an update


class StateStore(Protocol):
    """Where states are between updates, if not on the device: files or host memory."""

    def preallocated(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]: ...

    def step(self, optimizer: torch.optim.Optimizer) -> None: ...


def update_of(optimizer: torch.optim.Optimizer, store: StateStore | None) -> Callable[[], None]:
    """The optimizer's update: as a whole, or a part at a time. The numbers are the same to the bit."""
    return partial(_step, optimizer) if store is None else partial(store.step, optimizer)


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except RuntimeError as error:
        if not any(words in str(error) for words in ("DTensor", "Sharding propagation", "sharding strategy")):
            raise
        raise ConfigError(
            f"step() of {type(optimizer).__name__} cannot update sharded parameters: {first_line(error)}",
            "another optimizer, or --mesh.strategy ddp, which keeps whole parameters",
        ) from error


# ---------------------------------------------------------------- state


@dataclass
class TrainState:
    """model is what fsdp/shard/shard.py returned: the FSDP root, or the module inside
    DistributedDataParallel.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    optimizer_name: str = ""
    """--optim.name, which a checkpoint keeps; empty where it is not known."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The data's position where (seed, step) does not give it: a mixture's segments, a stream's states."""

    def counters(self) -> dict[str, float | int]:
        """The numbers beside the tensors, as a checkpoint keeps them."""
        return {
            name: getattr(self, name) for name in ("step", "samples", "tokens", "loss_scale", "good_steps")
        }

    def set_counters(self, values: dict[str, float | int]) -> None:
        for name in self.counters():
            setattr(self, name, type(getattr(self, name))(values[name]))


KEY: Any = "ema"
"""Of the averages in the optimizer's `state`."""


class Ema:
    """In the dtype of the stored parameters. It starts from their present values."""

    def __init__(self, decay: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        named = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        with torch.no_grad():
            # Not clone: of a float8 weight it would make a tensor that is cast as weights are.
            copies = {n: torch.zeros_like(p, requires_grad=False).copy_(p) for n, p in named.items()}
        optimizer.state[KEY] = copies
        self._averages = list(copies.values())
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the parameters: average ← decay · average + (1 − decay) · parameter."""
        self._average(*self._locals(), 0)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters hold the averages inside, and the averages the parameters."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(*self._locals(), strict=True):
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)

    def _locals(self) -> tuple[list[Tensor], list[Tensor]]:
        return [local_tensor(t) for t in self._averages], [local_tensor(p) for p in self._parameters]


def maybe_ema(section: OptimSection, model: nn.Module, optimizer: torch.optim.Optimizer) -> Ema | None:
    return Ema(section.ema, model, optimizer) if section.ema else None


def averages(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The averages by the parameters' names; empty without --optim.ema."""
    stored: dict[str, Tensor] = optimizer.state.get(KEY, {})
    return stored

"""Optimizers and their parameter groups. Not here: the learning rate (schedule.py).

Matrices decay, vectors and scalars do not. Parameters that are not sharded (0-dim ones) stand in groups of
their own: a grouped kernel takes DTensors or plain tensors, never both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.base.torch_private.core import LocalShardAdam
from fsdp.config import OptimSection
from fsdp.config.sections import ADAMS, DECAYING
from fsdp.optim.custom_optimizer import LR_RATIO, build_custom, is_custom

if TYPE_CHECKING:
    from fsdp.optim.small_states import Kind


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
    kept = _small_states(section, groups)
    if kept is not None:
        from fsdp.optim.small_states import SmallStateAdam

        return SmallStateAdam(
            groups,
            kind=kept,
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


def _small_states(section: OptimSection, groups: list[dict[str, Any]]) -> Kind | None:
    """The form of Adam's moments if they, or the masters, are not in a dtype of torch's Adam."""
    if section.state != "master":
        return section.state
    halved = any(p.dtype == torch.bfloat16 for group in groups for p in group["params"])
    return "bf16" if halved else None


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
    sorted_out: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            sorted_out.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(
                parameter
            )
    decay = section.weight_decay if section.name in DECAYING else 0.0
    return [
        {"params": found, "weight_decay": decay if matrix else 0.0}
        for (matrix, _), found in sorted(sorted_out.items(), key=lambda item: item[0], reverse=True)
    ]


def apply_hyperparameters(section: OptimSection, optimizer: torch.optim.Optimizer) -> None:
    """After a restore: rates, decay and the form of the states follow the flags, not the checkpoint."""
    if section.name == "muon":
        from fsdp.optim.muon import ShardedMuon

        assert isinstance(optimizer, ShardedMuon)
        optimizer.drop_other_states()
    if is_custom(section) or section.name == "muon":
        return  # its groups are as they were built; a restore changes none
    if optimizer.state:  # a run that starts has none yet
        from fsdp.optim.small_states import adapt_states

        adapt_states(optimizer)
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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of each group; those of a user's optimizer keep their ratio to it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_RATIO, 1.0)

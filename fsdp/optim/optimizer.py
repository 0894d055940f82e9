"""Optimizers, their parameter groups, and the learning rate as a pure function of the step.

Matrices decay, vectors and scalars do not. Parameters that are not sharded (0-dim ones) stand in groups of
their own: a grouped kernel takes DTensors or plain tensors, never both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.config import OptimSection
from fsdp.dist.local_tensors import local_tensor
from fsdp.optim.small_states import SmallStateAdam, adapt_states, moment_bytes, places_of


class _OnShards(torch.optim.Adam):
    """torch's update of this rank's own parts. It is elementwise, so the numbers are the same; hundreds of
    tensors need not go through DTensor's dispatch at every step, and a first step need not learn how it would
    cut them.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


class ShardedAdam(_OnShards): ...


class ShardedAdamW(_OnShards, torch.optim.AdamW): ...


def lr_at(section: OptimSection, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (counted from 1) of `total_steps`."""
    warmup = section.warmup_steps if section.warmup_steps >= 0 else total_steps // 20
    if step <= warmup:
        return section.lr * step / max(1, warmup)
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = section.min_lr_ratio
    if section.schedule == "cosine":
        return section.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    if section.schedule == "linear":
        return section.lr * (floor + (1 - floor) * (1 - done))
    return section.lr


def build_optimizer(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(section, model.parameters())
    if section.state != "master":
        return SmallStateAdam(
            groups,
            kind=section.state,
            places=places_of(model.parameters()),
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
        )
    fused = section.fused != "false"
    if section.name == "sgd":
        # torch has a fused SGD for plain tensors alone.
        fused = fused and not any(isinstance(p, DTensor) for p in model.parameters())
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=fused)
    kind = ShardedAdamW if section.name == "adamw" else ShardedAdam
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps, fused=fused)


def parameter_groups(section: OptimSection, parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """At most four groups, in a fixed order: decayed or not, sharded or not. Frozen parameters are in none."""
    sorted_out: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            sorted_out.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(
                parameter
            )
    decay = section.weight_decay if section.name == "adamw" else 0.0
    return [
        {"params": found, "weight_decay": decay if matrix else 0.0}
        for (matrix, _), found in sorted(sorted_out.items(), key=lambda item: item[0], reverse=True)
    ]


def state_bytes(section: OptimSection, parameters: Iterable[torch.Tensor], itemsize: int) -> int:
    """What the optimizer keeps of whole parameters that are `itemsize` bytes an element."""
    trained = [p for p in parameters if p.requires_grad]
    if section.state != "master":
        return sum(moment_bytes(p, section.state) for p in trained)
    moments = {"adamw": 2, "adam": 2, "sgd": 1 if section.momentum else 0}[section.name]
    return moments * itemsize * sum(p.numel() for p in trained)


def apply_hyperparameters(section: OptimSection, optimizer: torch.optim.Optimizer) -> None:
    """After a restore: what the checkpoint says of rates, decay and the states' form gives way to what is
    asked for now.
    """
    adapt_states(optimizer)
    fresh = {"betas": (section.beta1, section.beta2), "eps": section.eps, "momentum": section.momentum}
    decay = section.weight_decay if section.name == "adamw" else 0.0
    for group in optimizer.param_groups:
        group.update({name: value for name, value in fresh.items() if name in group})
        group["weight_decay"] = decay if group["params"][0].dim() >= 2 else 0.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

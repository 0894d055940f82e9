"""Bytes that a rank sends in a step, from shapes alone: the cost of each way to accumulate and to reshard.

Counted as ring algorithms send: (n-1)/n of what is gathered or scattered, twice that of what is all-reduced.
Not here: time, or the few bytes of the norm, the loss and the stop vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp.base.text import byte_size
from fsdp.config import MeshSection, reshard_policy
from fsdp.dist.mesh import MeshSizes
from fsdp.models.units import find_units
from fsdp.parallel.whole_parameters import whole_parameters


@dataclass(frozen=True)
class Traffic:
    """Bytes a rank sends in one optimizer step."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce

    def __str__(self) -> str:
        parts = {
            "all-gather": self.all_gather,
            "reduce-scatter": self.reduce_scatter,
            "all-reduce": self.all_reduce,
        }
        return " + ".join(f"{name} {byte_size(sent)}" for name, sent in parts.items() if sent) or "nothing"


@dataclass(frozen=True)
class _CommUnit:
    """One communication unit with FSDP's padding: bytes of all its elements, number of trained ones."""

    whole: int
    trained: int
    stays: bool
    """Whether it stays gathered from forward to backward whatever the policy: the last unit, and the
    root's own.
    """


def traffic(
    model: nn.Module,
    *,
    sizes: MeshSizes,
    section: MeshSection,
    accumulation: int,
    gathered: torch.dtype,
    reduced: torch.dtype,
    accumulate: str = "",
    float8: Iterable[Tensor] = (),
) -> Traffic:
    """`accumulate` replaces the section's; `float8` are weights gathered in one byte an element."""
    how = accumulate or section.accumulate
    if sizes.strategy == "ddp":
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        times = 1 if how == "last" else accumulation
        return Traffic(all_reduce=times * 2 * _part(sizes.replicate) * trained * reduced.itemsize)
    whole = whole_parameters(model, section.unsharded)
    groups = _groups(model, section.wrap, sizes.shard, gathered, set(float8), whole)
    kept = sum(p.numel() for p in whole if p.requires_grad) * reduced.itemsize
    reductions = 1 if how == "last" else accumulation
    all_reductions = accumulation if how == "every" else 1
    trained_bytes = sum(group.trained for group in groups) * reduced.itemsize
    return Traffic(
        all_gather=sum(_gathers(group, section, sizes, accumulation) * group.whole for group in groups),
        reduce_scatter=reductions * _part(sizes.shard) * trained_bytes,
        all_reduce=all_reductions * 2 * _part(sizes.replicate) * trained_bytes / sizes.shard
        + 2 * _part(sizes.ranks) * kept,
    )


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _gathers(group: _CommUnit, section: MeshSection, sizes: MeshSizes, accumulation: int) -> float:
    """How often a step gathers a unit, each weighted by the share that other ranks send."""
    policy = reshard_policy(section.reshard_after_forward)
    forward = _part(sizes.shard)
    if policy == "step":
        return forward
    if group.stays or (policy is not True and policy in (False, 1)):  # True == 1
        return accumulation * forward
    backward = forward if policy is True else _part(min(int(policy), sizes.shard))
    return accumulation * (forward + backward)


def _groups(
    model: nn.Module,
    wrap: str,
    shards: int,
    gathered: torch.dtype,
    float8: set[Tensor],
    whole: set[nn.Parameter],
) -> list[_CommUnit]:
    def group(parameters: Sequence[nn.Parameter], stays: bool) -> _CommUnit:
        small = _padded([p for p in parameters if p in float8], shards)
        whole = _padded(parameters, shards) - small
        trained = _padded([p for p in parameters if p.requires_grad], shards)
        return _CommUnit(small + whole * gathered.itemsize, trained, stays)

    taken = set(whole)
    groups = []
    units = find_units(model, wrap)
    for at, unit in enumerate(units, start=1):
        own = [p for module in unit for p in module.parameters() if p not in taken]
        taken.update(own)
        groups.append(group(own, stays=at == len(units)))
    rest = [p for p in model.parameters() if p not in taken]
    return [*groups, group(rest, stays=True)]


def _padded(parameters: Iterable[nn.Parameter], shards: int) -> int:
    """Rows are padded to a multiple of the shards; 0-dim parameters are not sharded."""
    return sum(
        -(-p.shape[0] // shards) * shards * p.shape[1:].numel() for p in dict.fromkeys(parameters) if p.dim()
    )


def traffic_line(
    model: nn.Module,
    *,
    sizes: MeshSizes,
    section: MeshSection,
    accumulation: int,
    gathered: torch.dtype,
    reduced: torch.dtype,
    float8: Iterable[Tensor] = (),
) -> str:
    """The start-up line: this run's bytes by kind and, if micro-batches accumulate, those of the other
    ways.
    """
    chosen, *others = (
        (
            how,
            traffic(
                model,
                sizes=sizes,
                section=section,
                accumulation=accumulation,
                gathered=gathered,
                reduced=reduced,
                accumulate=how,
                float8=float8,
            ),
        )
        for how in sorted(("last", "shard", "every"), key=lambda how: how != section.accumulate)
    )
    text = f"{chosen[1]} sent by a rank"
    if accumulation == 1:
        return text
    beside = ", ".join(
        f"{how} {byte_size(one.total)}" for how, one in others if sizes.strategy != "ddp" or how != "shard"
    )
    return f"{text} (--mesh.accumulate {section.accumulate}; {beside})"

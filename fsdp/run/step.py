"""One training step: batch → micro-batches → reduce → check → clip → update → average.

`train_step` is the whole step. What is optional in it (the average of the weights, scales of float8, the
protection of a save that still reads) is in `StepParts`. fsdp/plan traces the same function on fake tensors,
and a loop of one's own ends with the same `apply_update`. Not here: where batches come from, and the learning
rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.checkpoint import Checkpointer
from fsdp.data.types import Batch, DataInfo, StepBatch
from fsdp.distributed.collectives import Sum, all_gather_objects, call_after_backward
from fsdp.models.loss import LABELS, PART, SAME_LOSSES, LossFunction, LossParts
from fsdp.models.registry import ROW_POSITIONS
from fsdp.models.units import clean_name
from fsdp.optim.gradients import Gradients, InTurn, LossScaler, Verdicts
from fsdp.optim.optimizer import LR_RATIO
from fsdp.shard.shard import Sharded

if TYPE_CHECKING:
    from fsdp.shard.expert import ExpertModules


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The objects that a step uses. `clip_norm` 0 turns clipping off."""

    sharded: Sharded
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    update: Callable[[], None]
    clip_norm: float
    loss_function: LossFunction | None = None
    """None in a loop of one's own."""
    scaler: LossScaler | None = None
    verdicts: Verdicts | None = None
    enter: Callable[[str], None] = lambda phase: None
    """A phase begins: forward and backward once a micro-batch, then reduce, then optimizer."""
    saves: Checkpointer | None = None
    after_update: tuple[Callable[[], None], ...] = ()


class Totals:
    """What a step shares with the other ranks: the divisor of the global batch's loss, and its sums. This one
    is of a rank that knows only its own shapes, as in a plan.
    """

    rows = 1
    """Of the global batch: the divisor of what a model adds to its cross entropy."""
    sources = 0
    """Sources of a mixture, whose losses are summed too."""
    loss: Tensor | None = None
    """The global batch's mean loss, after `finish`. May still be on its way."""
    factor: Callable[[], Tensor] | None = None
    """Of the gradients, if the divisor of the loss is known only after the backward."""

    def weight(self) -> float:
        """The divisor of the loss. Called after each forward: a sum of token counts over the ranks overlaps
        with the first one. A model that takes num_items_in_batch needs it before.
        """
        return 1.0

    def reduce(self, numbers: Tensor, scaled: Tensor) -> None:
        """Before the last backward, which starts at `scaled`: `numbers` are this rank's sums, as `numbers_of`
        has them.
        """
        Sum(numbers)

    def finish(self) -> None:
        """Sets `loss`."""


def train_step(
    parts: StepParts, batches: Iterator[Batch], count: int, *, step: int, lr: float, totals: Totals
) -> Tensor:
    """A step of `count` micro-batches; returns the gradient norm, of all ranks. Collective."""
    assert parts.loss_function is not None
    sharded, numbers, scale = parts.sharded, None, 1.0 if parts.scaler is None else parts.scaler.factor
    for left in reversed(range(count)):
        with sharded.micro_batch(not left):
            scaled, numbers = _forward(parts, next(batches), numbers, scale, totals)
            if not left:
                if parts.verdicts is not None:
                    parts.verdicts.own_loss = numbers.view(-1)[0].clone()
                totals.reduce(numbers, scaled)
            parts.enter("backward")
            scaled.backward()
            del scaled  # its graph holds the micro-batch
    norm = reduced_norm(parts, totals.factor)
    if parts.scaler is not None:
        norm = parts.scaler.unscale(parts.gradients, norm)
    totals.finish()
    for group in parts.optimizer.param_groups:  # a user's optimizer keeps the ratio of its rates
        group["lr"] = lr * group.get(LR_RATIO, 1.0)
    apply_update(parts, step, totals.loss, norm)
    return norm


def _forward(
    parts: StepParts, batch: Batch, numbers: Tensor | None, scale: float, totals: Totals
) -> tuple[Tensor, Tensor]:
    """Of one micro-batch: its part of the global batch's mean loss, scaled, and `numbers` with its own."""
    assert parts.loss_function is not None
    parts.enter("forward")
    sharded = parts.sharded
    loss = parts.loss_function(sharded.runs, batch.data, batch.valid, batch.valid_rows, totals.weight)
    if not loss.loss_sum.requires_grad:
        raise ConfigError(
            "the loss does not depend on a trained parameter, so that it has no gradient.",
            "compute it without .detach(), .item() and torch.no_grad(), from parameters that are not frozen",
            scope="rank",  # it may be one rank's alone
        )
    factor = sharded.averaged_over * scale
    scaled = loss.loss_sum * (factor / totals.weight())
    if loss.auxiliary is not None:
        scaled = scaled + loss.auxiliary * (factor / totals.rows)
    own = loss.loss_sum.detach().double()
    if loss.weight is not None or loss.auxiliary is not None or loss.parts or totals.sources:
        own = numbers_of(own, loss, batch, totals.sources)
    if sharded.experts is not None:
        own = torch.cat([own.view(-1), sharded.experts.tokens()])
    return scaled, own if numbers is None else numbers + own


def reduced_norm(parts: StepParts, factor: Callable[[], Tensor] | None = None) -> Tensor:
    """The norm of the reduced gradients, after they are multiplied by `factor`. Collective.

    ConfigError if requires_grad_ was called since the start: neither FSDP's gathered parameters nor the
    optimizer follow it. It takes 40 µs a step for 300 parameters.
    """
    parts.enter("reduce")
    if (changed := parts.gradients.changed()) is not None:
        names = [clean_name(name) for name, p in parts.sharded.root.named_parameters() if p is changed]
        raise ConfigError(
            f"requires_grad_({changed.requires_grad}) was called on {names[0] if names else 'a parameter'} "
            "after the start, which the sharded model and the optimizer do not follow.",
            "--model.frozen from the start; for several stages a run each, the next one with --model.weights "
            "RUN/full_model and a --model.frozen of its own",
        )
    if factor is not None:
        parts.gradients.scale(factor())
    return parts.gradients.norm()


def apply_update(parts: StepParts, step: int, loss: Tensor | None, norm: Tensor) -> None:
    """One agreed check of the numbers, clipping, the update; clears the gradients."""
    if parts.verdicts is None or parts.verdicts.may_update(step, loss, norm):
        if parts.clip_norm:
            fused = parts.verdicts is not None and parts.verdicts.device_decides
            parts.gradients.clip(parts.clip_norm, norm, parts.optimizer if fused else None)
        parts.enter("optimizer")
        if parts.saves is not None and parts.saves.flight is not None:
            parts.saves.before_update()
        parts.update()
        for act in parts.after_update:
            act()
    parts.optimizer.zero_grad(set_to_none=True)


def gradients_of(sharded: Sharded, in_turn: InTurn | None = None) -> Gradients:
    """The gradients of a sharded model, whose norm is summed over the ranks of one copy of the weights."""
    if sharded.sizes.strategy == "ddp":
        return Gradients(sharded.root.parameters(), None, in_turn)
    mesh, copy = sharded.mesh, sharded.views.get("copy")
    if copy is None:
        return Gradients(sharded.root.parameters(), mesh.get_group("dp_shard"), in_turn)
    tensor_rank = mesh.get_local_rank("tensor")
    return Gradients(sharded.root.parameters(), copy.get_group("copy"), in_turn, tensor_rank)


# ---------------------------------------------------------------- sums over the global batch


def numbers_of(total: Tensor, loss: LossParts, batch: Batch, sources: int) -> Tensor:
    """A micro-batch's numbers in float64: the loss, the weight of a user's loss, what a model adds to its
    cross entropy or the losses that it returns, then the sources' losses and weights.
    """
    numbers = (loss.weight, loss.auxiliary, *loss.parts.values())
    own = [part.detach().view(1).double() for part in numbers if part is not None]
    return torch.cat([total.view(1), *own, *sums_by_source(loss, batch, sources)])


def sums_by_source(loss: LossParts, batch: Batch, sources: int) -> list[Tensor]:
    """The sums of losses and of weights, a number for each source of a mixture; empty if they are not
    known."""
    if loss.rows is None or batch.sources is None:
        return []
    losses, weights = loss.rows
    # A padded batch may have been cut. No product with 0: a loss that is not finite stays its source's.
    rows = batch.sources[: len(losses)] == torch.arange(sources, device=losses.device).view(-1, 1)
    counted = rows & batch.valid[: len(losses)]
    return [torch.where(counted, part.double(), 0).sum(1) for part in (losses, weights)]


class BatchTotals(Totals):
    """Those of a step of a run. Its sum travels while the gradients are reduced, that of its tokens, where
    each rank has its own, while the first forward computes.
    """

    more: Tensor | None = None
    """After `finish`, the numbers beside the loss that `named` reads; may still be on the device."""
    lacks_sources = False
    """After `finish`: the model has no loss for each row, of which a mixture's sources have theirs."""

    def __init__(
        self,
        loss_function: LossFunction,
        info: DataInfo,
        batch: StepBatch,
        labels: tuple[str, ...],
        signed: Callable[[], None] | None,
        *,
        counts: bool = True,
        experts: ExpertModules | None = None,
    ) -> None:
        """`labels` are the sources' names; `signed` is called when the last backward has all gradients.
        `counts` is false on a rank whose numbers another rank has too.
        """
        self._loss_function, self._labels, self._signed = loss_function, labels, signed
        self._counts, self._experts = counts, experts
        self.rows, self.sources = batch.samples, len(labels)
        if loss_function.custom is not None:
            self.factor = self._factor
        data = batch.micro[0].data
        classes = bool(info.class_names) and all(data[name].dim() < 2 for name in LABELS if name in data)
        divided = ROW_POSITIONS in data  # labels became targets, of which a row has one less
        if not divided and not loss_function.shifts(data) and (classes or not info.masks_targets):
            self._summed: Sum | None = None
            self.tokens = batch.samples * info.tokens_per_sample
            """The global batch's unmasked tokens, after the first `weight`."""
        else:
            count = counts * sum(loss_function.tokens(micro.counted) for micro in batch.micro)
            self._summed, self.tokens = Sum(torch.tensor(count, dtype=torch.int64)), 0

    def weight(self) -> float:
        if self._summed is not None:
            self.tokens, self._summed = int(self._summed.wait()), None
        counted = self.tokens if self._loss_function.counts_tokens else self.rows
        if self._loss_function.custom is not None:
            counted = max(self.tokens, self.rows)  # until all weights are known: see factor
        self._weight = float(max(1, counted))
        return self._weight

    def reduce(self, numbers: Tensor, scaled: Tensor) -> None:
        if self._signed is not None:
            call_after_backward(scaled, self._signed)
        if not self._loss_function.compared:
            self._compare()
        if not self._counts:
            numbers = 0 * numbers  # a NaN stays one
        # On the host behind the backward: a sum during it takes gloo's threads a processor. Of DDP before it:
        # behind, it would meet a bucket of the others where this rank skips a part of the model.
        behind = scaled if numbers.device.type == "cpu" and self._signed is not None else None
        self._sum = Sum(numbers.view(-1), behind=behind)

    def _compare(self) -> None:
        """The sums are by place: in the first step ConfigError unless all ranks have the same losses."""
        self._loss_function.compared = True
        first, *others = all_gather_objects([*self._loss_function.parts.get(True, ())])
        if rank := next((n for n, names in enumerate(others, 1) if names != first), 0):
            here, there = (", ".join(names) or "one loss" for names in (first, others[rank - 1]))
            fault = f"the model returned {here} on rank 0, and {there} on rank {rank}."
            raise ConfigError(fault, SAME_LOSSES)

    def _factor(self) -> Tensor:
        weight = self._sum.wait()[1]
        return self._weight / torch.where(weight != 0, weight, 1)

    def finish(self) -> None:
        sums, added, loads = self._sum.wait(), self._loss_function.adds, list[Tensor]()
        if self._experts is not None:
            sums, numbers = self._experts.loads(sums)
            loads = [numbers]
        self.loss = sums[0] / self._weight
        if self.factor is not None:
            self.loss = self.loss * self.factor()
        own = len(self._loss_function.parts.get(True, ()))
        first = 1 + (self.factor is not None) + added + own
        parts = loads + ([sums[1:2] / self.rows] if added else [])
        parts += [sums[first - own : first] / self._weight] if own else []
        if self.sources:
            self.lacks_sources = len(sums) == first
            parts += [] if self.lacks_sources else [sums[first : first + 2 * self.sources]]
        if parts:
            self.more = torch.cat(parts)

    def named(self, numbers: list[float]) -> dict[str, float]:
        """The record's fields from the fetched numbers of `more`."""
        names = [] if self._experts is None else [*self._experts.FIELDS]
        names += ["aux_loss"] if self._loss_function.adds else []
        names += [PART + name for name in self._loss_function.parts.get(True, ())]
        fields, numbers = dict(zip(names, numbers, strict=False)), numbers[len(names) :]
        losses, weights = numbers[: self.sources], numbers[self.sources :]
        for label, loss, weight in zip(self._labels, losses, weights, strict=False):  # none, or one each
            if weight:
                fields |= {f"{PART}{label}": loss / weight, f"{self._loss_function.unit}/{label}": weight}
        return fields

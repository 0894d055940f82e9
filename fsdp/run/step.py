"""One training step: batch → micro-batches → reduce → check → clip → update → average.

`train_step` is the whole step. What is optional in it (the average of the weights, replica checks, scales of
float8, the protection of a save that still reads) is a call in one of the lists of `StepParts`. fsdp/plan
traces the same function on fake tensors. Not here: where batches come from, and the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.types import Batch, DataInfo, StepBatch
from fsdp.dist.collectives import Sum, call_after_backward
from fsdp.models.loss import LABELS, LossFunction, LossParts, check_has_gradient
from fsdp.models.units import clean_name
from fsdp.optim.gradients import Gradients, InTurn, LossScaler, Verdicts
from fsdp.optim.optimizer import set_lr
from fsdp.parallel.shard import Sharded


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The objects that a step uses. `clip_norm` 0 turns clipping off."""

    sharded: Sharded
    loss_function: LossFunction
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    update: Callable[[], None]
    scaler: LossScaler | None
    clip_norm: float
    verdicts: Verdicts | None = None
    enter: Callable[[str], None] = lambda phase: None
    """A phase begins: forward and backward once a micro-batch, then reduce, then optimizer."""
    before_update: tuple[Callable[[], None], ...] = ()
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

    def correction(self) -> Tensor | None:
        """The factor of the gradients, if the divisor of the loss is known only after the backward."""
        return None

    def finish(self) -> None:
        """Sets `loss`."""


def train_step(
    parts: StepParts, batches: Iterator[Batch], count: int, *, step: int, lr: float, totals: Totals
) -> Tensor:
    """A step of `count` micro-batches; returns the gradient norm, of all ranks. Collective."""
    numbers: Tensor | None = None
    for at in range(count):
        numbers = _micro_batch(parts, next(batches), numbers, last=at == count - 1, totals=totals)
    parts.enter("reduce")
    gradients = parts.gradients
    check_trained(parts.sharded, gradients)
    if (factor := totals.correction()) is not None:
        gradients.scale(factor)
    norm = gradients.norm()
    if parts.scaler is not None:
        norm = parts.scaler.unscale(gradients, norm)
    totals.finish()
    if parts.verdicts is None or parts.verdicts.may_update(step, totals.loss, norm):
        if parts.clip_norm:
            gradients.clip(parts.clip_norm, norm)
        set_lr(parts.optimizer, lr)
        parts.enter("optimizer")
        for prepare in parts.before_update:
            prepare()
        parts.update()
        for average in parts.after_update:
            average()
    parts.optimizer.zero_grad(set_to_none=True)
    return norm


def _micro_batch(
    parts: StepParts, batch: Batch, numbers: Tensor | None, *, last: bool, totals: Totals
) -> Tensor:
    """Forward and backward of one micro-batch: gradients of the global batch's mean loss. Returns `numbers`
    with its own added.
    """
    scale = parts.scaler.scale if parts.scaler is not None else 1.0
    with parts.sharded.micro_batch(last):
        parts.enter("forward")
        loss = parts.loss_function(
            parts.sharded.called, batch.data, batch.valid, batch.valid_rows, totals.weight
        )
        check_has_gradient(loss.loss_sum)
        weight = totals.weight()
        own = numbers_of(loss, batch, totals.sources)
        numbers = own if numbers is None else numbers + own
        # A reduction averages over the ranks: each multiplies by their number.
        scaled = loss.loss_sum * (parts.sharded.divisor * scale / weight)
        if loss.auxiliary is not None:
            scaled = scaled + loss.auxiliary * (parts.sharded.divisor * scale / totals.rows)
        if last:
            if parts.verdicts is not None:
                parts.verdicts.own_loss = numbers.view(-1)[0].clone()
            totals.reduce(numbers, scaled)
        parts.enter("backward")
        scaled.backward()
    return numbers


def gradients_of(sharded: Sharded, in_turn: InTurn | None = None) -> Gradients:
    """The gradients of a sharded model, whose norm is summed over dp_shard."""
    group = sharded.mesh.get_group("dp_shard") if sharded.sizes.strategy != "ddp" else None
    return Gradients(sharded.root.parameters(), group, in_turn)


def check_trained(sharded: Sharded, gradients: Gradients) -> None:
    """ConfigError if requires_grad_ was called since the start: neither FSDP's gathered parameters nor the
    optimizer follow it. It takes 40 µs a step for 300 parameters.
    """
    changed = gradients.changed()
    if changed is None:
        return
    names = [clean_name(name) for name, p in sharded.root.named_parameters() if p is changed]
    raise ConfigError(
        f"requires_grad_({changed.requires_grad}) was called on {names[0] if names else 'a parameter'} after "
        "the start, which the sharded model and the optimizer do not follow.",
        "--model.frozen from the start; for several stages a run each, the next one with --model.weights "
        "RUN/full_model and a --model.frozen of its own",
    )


# ---------------------------------------------------------------- sums over the global batch


def numbers_of(loss: LossParts, batch: Batch, sources: int) -> Tensor:
    """A micro-batch's numbers in float64, 0-d for a loss alone: the loss, the weight of a user's loss or what
    a model adds to its cross entropy, then the sources' losses and weights.
    """
    own = [part.detach().view(1).double() for part in (loss.weight, loss.auxiliary) if part is not None]
    own += sums_by_source(loss, batch, sources)
    total = loss.loss_sum.detach().double()
    return torch.cat([total.view(1), *own]) if own else total


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

    def __init__(
        self,
        loss_function: LossFunction,
        info: DataInfo,
        batch: StepBatch,
        labels: tuple[str, ...],
        signed: Callable[[], None],
    ) -> None:
        """`labels` are the sources' names; `signed` is called when the last backward has all gradients."""
        self._loss_function, self._labels, self._signed = loss_function, labels, signed
        self.rows, self.sources = batch.samples, len(labels)
        data = batch.micro[0].data
        classes = bool(info.class_names) and all(data[name].dim() < 2 for name in LABELS if name in data)
        if not loss_function.shifts(data) and (classes or not info.masks_targets):
            self._tokens: Sum | int = batch.samples * info.tokens_per_sample
        else:
            count = sum(loss_function.tokens(micro.counted) for micro in batch.micro)
            self._tokens = Sum(torch.tensor(count, dtype=torch.int64))

    @property
    def tokens(self) -> int:
        """The global batch's unmasked tokens."""
        if not isinstance(self._tokens, int):
            self._tokens = int(self._tokens.wait())
        return self._tokens

    def weight(self) -> float:
        tokens = self.tokens
        counted = tokens if self._loss_function.counts_tokens else self.rows
        if self._loss_function.custom is not None:
            counted = max(tokens, self.rows)  # until all weights are known: see correction
        self._weight = float(max(1, counted))
        return self._weight

    def reduce(self, numbers: Tensor, scaled: Tensor) -> None:
        call_after_backward(scaled, self._signed)
        # On the host behind the backward: a sum during it takes gloo's threads a processor.
        self._sum = Sum(numbers.view(-1), behind=scaled if numbers.device.type == "cpu" else None)

    def correction(self) -> Tensor | None:
        if self._loss_function.custom is None:
            return None
        weight = self._sum.wait()[1]
        return self._weight / torch.where(weight != 0, weight, 1)

    def finish(self) -> None:
        self.loss = self._sum.wait()[0] / self._weight
        if (factor := self.correction()) is not None:
            self.loss = self.loss * factor

    @property
    def more(self) -> Tensor | None:
        """The numbers beside the loss that `named` reads; may still be on the device."""
        sums, added = self._sum.wait(), self._loss_function.adds
        parts = [sums[1:2] / self.rows] if added else []
        first = 1 + (self._loss_function.custom is not None) + added
        if self.sources and len(sums) > first:
            parts.append(sums[first : first + 2 * self.sources])
        return torch.cat(parts) if parts else None

    @property
    def lacks_sources(self) -> bool:
        """Whether the model has no loss for each row, of which a mixture's sources have theirs."""
        first = 1 + (self._loss_function.custom is not None) + self._loss_function.adds
        return bool(self.sources) and len(self._sum.tensor) == first

    def named(self, numbers: list[float]) -> dict[str, float]:
        """The record's fields from the fetched numbers of `more`."""
        fields = {"aux_loss": numbers.pop(0)} if self._loss_function.adds else {}
        losses, weights = numbers[: self.sources], numbers[self.sources :]
        for label, loss, weight in zip(self._labels, losses, weights, strict=False):  # none, or one each
            if weight:
                fields |= {f"loss/{label}": loss / weight, f"{self._loss_function.unit}/{label}": weight}
        return fields

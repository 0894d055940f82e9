"""One training step: forward and backward of the micro-batches, gradient norm, clipping, update.

fsdp/run/loop.py runs it; fsdp/plan traces the same functions on fake tensors. Not here: where batches come
from, the learning rate, and what a run checks at the hooks (step_hooks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.types import Batch
from fsdp.models.checks import check_has_gradient
from fsdp.models.loss import LossFunction
from fsdp.models.units import clean_name
from fsdp.optim.gradients import Gradients, InTurn
from fsdp.optim.loss_scale import LossScaler
from fsdp.optim.optimizer import set_lr
from fsdp.parallel.shard import Sharded
from fsdp.parallel.update import Update
from fsdp.run.source_losses import numbers_of


class StepHooks:
    """Calls that a step makes to its caller. A hook that is not overridden does nothing."""

    def enter(self, phase: str) -> None:
        """A phase begins: forward and backward once a micro-batch, then reduce, then optimizer."""

    def weight(self) -> float:
        """The divisor of the global batch's loss. Called after each forward: a sum of token counts over the
        ranks overlaps with the first one. A model that takes num_items_in_batch needs it before.
        """
        return 1.0

    def rows(self) -> int:
        """The rows of the global batch, the divisor of what a model adds to its cross entropy."""
        return 1

    def reduce_loss(self, total: Tensor, scaled: Tensor) -> None:
        """Before the last backward, which starts at `scaled`: `total` is this rank's sum of losses and
        further numbers, as source_losses.py has them.
        """

    def correction(self) -> Tensor | None:
        """The factor of the gradients, if the divisor of the global batch's loss is known only now."""
        return None

    def measured(self) -> None:
        """The gradient norm is computed; gradients still have the loss scale."""

    def may_update(self, norm: Tensor) -> bool:
        """Whether the optimizer is called: the same value on every rank."""
        return True

    def before_update(self) -> None:
        """Parameters and optimizer states are about to change."""

    def after_update(self) -> None:
        """Parameters and optimizer states have changed."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The objects that a step uses. `clip_norm` 0 turns clipping off."""

    sharded: Sharded
    loss_function: LossFunction
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    update: Update
    scaler: LossScaler | None
    clip_norm: float
    sources: int = 0
    """Sources of a mixture, whose losses are summed too."""


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
    name = next(
        (clean_name(name) for name, p in sharded.root.named_parameters() if p is changed), "a parameter"
    )
    raise ConfigError(
        f"requires_grad_({changed.requires_grad}) was called on {name} after the start, which the sharded "
        "model and the optimizer do not follow.",
        "--model.frozen from the start; for several stages a run each, the next one with --model.weights "
        "RUN/full_model and a --model.frozen of its own",
    )


def run_step(
    parts: StepParts, batches: Iterator[Batch], count: int, *, lr: float, hooks: StepHooks
) -> Tensor:
    """A step of `count` micro-batches; returns the gradient norm."""
    accumulate(parts, batches, count, hooks)
    norm = reduced_norm(parts, hooks)
    if hooks.may_update(norm):
        apply_update(parts, norm, lr, hooks)
    parts.optimizer.zero_grad(set_to_none=True)
    return norm


def accumulate(parts: StepParts, batches: Iterator[Batch], count: int, hooks: StepHooks) -> None:
    """Gradients of the global batch's mean loss, from `count` micro-batches."""
    total: Tensor | None = None
    for at in range(count):
        total = micro_batch(parts, next(batches), total, last=at == count - 1, hooks=hooks)


def micro_batch(
    parts: StepParts, batch: Batch, total: Tensor | None, *, last: bool, hooks: StepHooks
) -> Tensor:
    """Forward and backward of one micro-batch; `total` with its loss added."""
    scale = parts.scaler.scale if parts.scaler is not None else 1.0
    with parts.sharded.micro_batch(last):
        hooks.enter("forward")
        found = parts.loss_function(
            parts.sharded.called, batch.data, batch.valid, batch.valid_rows, hooks.weight
        )
        check_has_gradient(found.loss_sum)
        weight = hooks.weight()
        loss = numbers_of(found, batch, parts.sources)
        total = loss if total is None else total + loss
        # A reduction averages over the ranks: each multiplies by their number.
        scaled = found.loss_sum * (parts.sharded.divisor * scale / weight)
        if found.auxiliary is not None:
            scaled = scaled + found.auxiliary * (parts.sharded.divisor * scale / hooks.rows())
        if last:
            hooks.reduce_loss(total, scaled)
        hooks.enter("backward")
        scaled.backward()
    return total


def reduced_norm(parts: StepParts, hooks: StepHooks) -> Tensor:
    """The global gradient norm, the gradients freed of the loss scale. Collective."""
    hooks.enter("reduce")
    check_trained(parts.sharded, parts.gradients)
    factor = hooks.correction()
    if factor is not None:
        parts.gradients.scale(factor)
    norm = parts.gradients.norm()
    hooks.measured()
    return norm if parts.scaler is None else parts.scaler.unscale(parts.gradients, norm)


def apply_update(parts: StepParts, norm: Tensor, lr: float, hooks: StepHooks) -> None:
    """Clips the gradients and runs the optimizer at rate `lr`."""
    if parts.clip_norm:
        parts.gradients.clip(parts.clip_norm, norm)
    set_lr(parts.optimizer, lr)
    hooks.enter("optimizer")
    hooks.before_update()
    parts.update.step()
    hooks.after_update()

"""The sum of a micro-batch's cross entropy, and what it is weighted by.

Sum and weight stay apart: a global batch is weighted by its samples or tokens, not by micro-batch. Not here:
calling the model, and which loss is trained (loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.models.checks import IGNORED

SummedEntropy = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class LossParts:
    """loss_sum over the weight of the global batch is the mean. `correct` is counted in evaluation.

    `weight` is this micro-batch's part of that weight if a user's loss returned it; None if it is known from
    the data. `rows`, if LossFunction.per_row is set and the model gives them: each row's part of the sum
    and of the weight. `auxiliary`: what the model adds to its cross entropy, times the micro-batch's rows;
    its weight is the global batch's rows.
    """

    loss_sum: Tensor
    correct: Tensor | None
    weight: Tensor | None = None
    rows: tuple[Tensor, Tensor] | None = None
    auxiliary: Tensor | None = None


@dataclass(frozen=True)
class TokenCounts:
    """Unmasked tokens of one micro-batch: all, and those after each row's first (causal targets)."""

    all: int
    after_first: int


def summed_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """The sum of the losses of unmasked targets, in at least fp32; see `squared_normalizers`."""
    flat, wanted = flat_logits(logits), targets.reshape(-1)
    if not z_loss:
        return F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED)
    scores = F.log_softmax(flat, dim=-1)
    entropy = F.nll_loss(scores, wanted, reduction="sum", ignore_index=IGNORED)
    return entropy + z_loss * squared_normalizers(flat, scores, wanted)


def squared_normalizers(logits: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Σ log²(Σ exp(logits)) over unmasked targets, where `scores` is log_softmax(logits): the log is the
    difference of the two, here at the target. Backward keeps no logits, which gather would save.
    """
    place = torch.arange(len(targets), device=targets.device), targets.clamp(min=0)
    normalizers = logits[place] - scores[place]
    return normalizers.masked_fill(targets == IGNORED, 0.0).square().sum()


def cross_entropy_parts(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor,
    *,
    per_row: bool = False,
    summed: SummedEntropy | None = None,
    z_loss: float = 0.0,
) -> LossParts:
    """Sums in at least fp32 over valid rows and unmasked targets. `summed` is `summed_entropy`, compiled.
    `z_loss` is added in training alone, and is in no row.
    """
    logits, targets = classes_last(logits, targets), mask_padding(targets, valid)
    rows = None
    if torch.is_grad_enabled() and not per_row:
        return LossParts((summed or summed_entropy)(logits, targets, z_loss), None)
    flat, wanted = flat_logits(logits), targets.reshape(-1)
    if per_row:
        # One log-softmax for both terms: backward keeps it.
        scores = F.log_softmax(flat, dim=-1)
        losses = F.nll_loss(scores, wanted, reduction="none", ignore_index=IGNORED).view(targets.shape)
        loss_sum, rows = losses.sum(), (row_sums(losses), row_sums(targets != IGNORED))
        if z_loss and torch.is_grad_enabled():
            loss_sum = loss_sum + z_loss * squared_normalizers(flat, scores, wanted)
    else:
        loss_sum = F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED)
    # A pass over all logits, skipped in training.
    correct = None if torch.is_grad_enabled() else (flat.argmax(-1) == wanted).sum()
    return LossParts(loss_sum, correct, rows=rows)


def class_dimension(logits: Tensor, targets: Tensor) -> int | None:
    """Where the shapes put the classes: last, or second as torch has them, (rows, classes, d1, …); None if
    neither fits. Where both do, a text's are last and a picture's second.
    """
    last = logits.shape[:-1] == targets.shape or (logits.dim() == 2 and len(logits) == targets.numel())
    second = logits.dim() > 2 and logits.shape[:1] + logits.shape[2:] == targets.shape
    if second and (not last or logits.dim() > 3):
        return 1
    return -1 if last else None


def classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    where = class_dimension(logits, targets)
    if where is None and not targets.is_floating_point():  # torch refuses those itself: checks.py
        raise ConfigError(
            f"the model returned logits of the shape {tuple(logits.shape)} for targets of "
            f"{tuple(targets.shape)}: no dimension of them can be that of the classes.",
            "return logits of (rows, …, classes) or (rows, classes, …) for targets of (rows, …), or the loss "
            "as one number: loss.mean()",
        )
    return logits.movedim(1, -1) if where == 1 else logits


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row in float64, without a gradient."""
    return values.detach().reshape(len(values), -1).sum(1, dtype=torch.float64)


def mask_padding(targets: Tensor, valid: Tensor) -> Tensor:
    """Masks the targets of padding rows."""
    return torch.where(valid.view(-1, *[1] * (targets.dim() - 1)), targets, IGNORED)


def flat_logits(logits: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()


def next_labels(labels: Tensor) -> Tensor:
    """Returns each position's next label. Shifting labels copies less than slicing logits."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def count_tokens(data: Mapping[str, Tensor], valid: Tensor) -> dict[str, TokenCounts]:
    """Counts unmasked targets and labels on the host, before the copy to a device; empty without tokens."""
    found = {name: data[name] for name in ("targets", "labels") if name in data}
    return {
        name: TokenCounts(int(marks.sum()), int(marks[:, 1:].sum()))
        for name, labels in found.items()
        if labels.dim() >= 2 and not labels.is_floating_point()
        for marks in [labels[valid] != IGNORED]
    }

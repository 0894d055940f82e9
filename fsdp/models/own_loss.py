"""A loss that the model computes itself, as those of transformers do when they receive labels.

It is a mean over one micro-batch's unmasked labels. Means of micro-batches do not add up to the mean of the
global batch: where the loss is the cross entropy of the returned logits, it is computed from those again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.checks import IGNORED
from fsdp.models.cross_entropy import (
    LossParts,
    SummedEntropy,
    cross_entropy_parts,
    flat_logits,
    mask_padding,
    next_labels,
)
from fsdp.models.model_output import Output


@dataclass(frozen=True)
class OwnLoss:
    """A model's own loss, found by `learn`: cross entropy of logits and `labels`, plus `auxiliary` times its
    auxiliary loss.

    shifted: the logits of a position predict the next label. withheld: the logits are the same without
    labels, so the model need not compute its loss.
    """

    labels: str
    shifted: bool
    auxiliary: float
    withheld: bool


def matching_shift(output: Output, labels: Tensor, auxiliary_weight: float) -> bool | None:
    """Whether the loss is the cross entropy of these logits with the next labels (True) or with the labels at
    the same position (False); None if neither.
    """
    loss, logits = output.loss, output.logits
    assert loss is not None
    assert logits is not None
    if logits.shape[:-1] != labels.shape:
        return None
    expected = 0.0 if output.auxiliary is None else auxiliary_weight * float(output.auxiliary)
    apart = {}
    for shifted in (False, True)[: labels.dim()]:
        mean = F.cross_entropy(
            flat_logits(logits),
            (next_labels(labels) if shifted else labels).reshape(-1),
            ignore_index=IGNORED,
        )
        apart[shifted] = abs(float(loss) - expected - float(mean))
    # A loss that the model computes in half precision has three digits; any other has six.
    bound = (1e-2 if loss.dtype.itemsize < 4 else 1e-5) * max(1.0, abs(float(loss)))
    within = {shifted: distance for shifted, distance in apart.items() if distance <= bound}
    return min(within, key=lambda shifted: within[shifted]) if within else None


def own_parts(
    own: OwnLoss,
    output: Output,
    data: Mapping[str, Tensor],
    valid: Tensor,
    *,
    per_row: bool = False,
    summed: SummedEntropy | None = None,
    z_loss: float = 0.0,
) -> LossParts:
    labels = targets_of(own, data)
    assert output.logits is not None
    parts = cross_entropy_parts(output.logits, labels, valid, per_row=per_row, summed=summed, z_loss=z_loss)
    return with_auxiliary(parts, own, output, labels, valid)


def targets_of(own: OwnLoss | None, data: Mapping[str, Tensor]) -> Tensor:
    """Returns the class that each position's logits predict."""
    if own is None:
        if "targets" not in data:
            raise ConfigError(
                "the model returns logits and no loss, and the data have no targets: they have "
                f"{', '.join(data)}.",
                "targets, the token after each of inputs; labels are for a model whose forward takes them",
            )
        return data["targets"]
    return next_labels(data[own.labels]) if own.shifted else data[own.labels]


def with_auxiliary(
    parts: LossParts, own: OwnLoss | None, output: Output, labels: Tensor, valid: Tensor
) -> LossParts:
    if own is None or not own.auxiliary or output.auxiliary is None:
        return parts
    # Not labels[valid]: the host would wait for a device to learn how many rows are valid.
    counted = (mask_padding(labels, valid) != IGNORED).sum()
    return replace(parts, loss_sum=parts.loss_sum + own.auxiliary * output.auxiliary * counted)


def auxiliary_weight_of(model: nn.Module) -> float:
    """Returns the factor of a mixture of experts' router loss, by the names that transformers uses."""
    config = getattr(model, "config", None)
    for place in (model, config, getattr(config, "text_config", None)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(found := getattr(place, name, None), (int, float)):
                return float(found)
    return 0.0


def with_labels(data: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Replaces labels that are all masked, which would reveal nothing, by class 0."""
    labels = data.get(name)
    if (
        labels is None
        or labels.dim() < 2
        or labels.is_floating_point()
        or bool((labels[:, 1:] != IGNORED).any())
    ):
        return data
    return {**data, name: torch.where(labels == IGNORED, 0, labels)}


def weighted_by_samples(labels: Tensor) -> bool:
    """Whether a mean over labels is a mean over samples: each has one label, or an equal count of numbers."""
    return labels.dim() < 2 or labels.is_floating_point()

"""Finds loss and logits in what a model returns. The output decides, not a base class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Output:
    """The parts of a model's output that determine the loss."""

    loss: Tensor | None
    logits: Tensor | None
    auxiliary: Tensor | None = None


def read_output(output: Any) -> Output:
    """Reads loss and logits: a scalar is a loss, another tensor logits; an object or mapping names them, a
    tuple has them in this order.
    """
    if isinstance(output, Tensor):
        return Output(output, None) if output.dim() == 0 else Output(None, output)
    get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    loss, logits = get("loss"), get("logits")
    if loss is not None or logits is not None:
        auxiliary = get("aux_loss")
        return Output(loss, logits, auxiliary if isinstance(auxiliary, Tensor) else None)
    if isinstance(output, (tuple, list)) and output:
        first = read_output(output[0])
        if (
            first.loss is not None
            and len(output) > 1
            and isinstance(output[1], Tensor)
            and output[1].dim() > 1
        ):
            return Output(first.loss, output[1])
        return first
    raise TypeError(f"the model returned {type(output).__name__}: neither a tensor, nor a loss, nor logits")


def loss_or_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the model's own loss if there is one, else its logits."""
    found = read_output(output)
    return (found.loss, None) if found.loss is not None else (None, found.logits)

"""Finds loss and logits in what a model returns. The output decides, not a base class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdp.base.errors import ConfigError


@dataclass(frozen=True)
class Output:
    """The parts of a model's output that determine the loss."""

    loss: Tensor | None
    logits: Tensor | None


def read_output(output: Any, *, labelled: bool = False) -> Output:
    """Reads loss and logits: a scalar is a loss, another tensor logits; an object or mapping names them, a
    tuple has them in this order. A model that was given labels (`labelled`) may have them the other way
    round, as nanoGPT's.
    """
    if isinstance(output, Tensor):
        return Output(output, None) if output.dim() == 0 else Output(None, output)
    get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    loss, logits = get("loss"), get("logits")
    if loss is not None or logits is not None:
        name, needed = ("logits", logits) if loss is None else ("loss", loss)
        if not isinstance(needed, Tensor):
            raise ConfigError(
                f"the model returned a {type(needed).__name__} as {name}.", f"return {name} as a tensor"
            )
        return Output(loss, logits if isinstance(logits, Tensor) else None)
    if isinstance(output, (tuple, list)) and output:
        first = read_output(output[0])
        second = output[1] if len(output) > 1 and isinstance(output[1], Tensor) else None
        if first.loss is not None and second is not None and second.dim() > 1:
            return Output(first.loss, second)
        if labelled and first.loss is None and second is not None and second.dim() == 0:
            return Output(second, first.logits)
        return first
    raise ConfigError(
        f"the model returned a {type(output).__name__}: neither a tensor, nor a loss, nor logits.",
        "return logits, a loss, or an object or dictionary with either; --train.loss computes the loss from "
        "any output",
    )


def loss_or_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the model's own loss if there is one, else its logits."""
    found = read_output(output)
    return (found.loss, None) if found.loss is not None else (None, found.logits)

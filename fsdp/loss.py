"""From a batch to the sum of its losses: how a model is called, and how what it returns is weighed.

A model gives logits (cross entropy is taken) or a loss of its own; no base class decides which, the output does. The sum and
its weight are kept apart, so that a global batch is weighed by its samples or tokens and not by micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class LossParts:
    """loss_sum over the weight of the whole global batch is the mean. correct is counted in evaluation, of logits."""

    loss_sum: Tensor
    correct: Tensor | None


class LossFunction:
    """Calls one model the way its forward wants to be called. Made before sharding, while forward is still the model's own."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._accepts = set(parameters)
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._own_loss: bool | None = True if "targets" in parameters else None
        self._dtype: torch.dtype | None = None
        self.counts_tokens = False
        """Known after the first call: what a batch is weighed by, unmasked tokens or samples."""
        self.classifies = False
        """Known after the first call: the model gives logits, so its predictions can be right or wrong."""

    def __call__(self, model: nn.Module, data: Mapping[str, Tensor], valid: Tensor, valid_rows: int) -> LossParts:
        """`valid` marks the rows that count, the first `valid_rows` of them; a padded row adds nothing."""
        if valid_rows < len(valid) and self._own_loss is not False:
            # A loss of its own cannot be masked row by row: it never sees the padding.
            data, valid = {k: v[: max(valid_rows, 1)] for k, v in data.items()}, valid[: max(valid_rows, 1)]
        output = self._call(model, data)
        loss, logits = loss_or_logits(output)
        self._own_loss = loss is not None
        if loss is not None:
            return LossParts(loss * valid_rows, None)
        assert logits is not None
        self.counts_tokens, self.classifies = data["targets"].dim() > 1, True
        return cross_entropy_parts(logits, data["targets"], valid)

    def _call(self, model: nn.Module, data: Mapping[str, Tensor]) -> Any:
        extra = {
            k: self._cast(model, v)
            for k, v in data.items()
            if k != "inputs" and (k in self._accepts or (self._accepts_all and k != "targets"))
        }
        return model(self._cast(model, data["inputs"]), **extra)

    def _cast(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Numbers as the parameters are kept: FSDP casts inputs only where it computes in another dtype."""
        if self._dtype is None:
            # At the first call, when no group is gathered yet in the dtype that is computed in.
            self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def loss_or_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """A scalar is a loss; an object or mapping with `loss` set gives it; else `logits`, or the tensor itself."""
    if isinstance(output, Tensor):
        return (output, None) if output.dim() == 0 else (None, output)
    get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    loss, logits = get("loss"), get("logits")
    if loss is not None:
        return loss, None
    if logits is not None:
        return None, logits
    if isinstance(output, (tuple, list)) and output:
        return loss_or_logits(output[0])
    raise TypeError(f"the model returned {type(output).__name__}: neither a tensor, nor a loss, nor logits")


def cross_entropy_parts(logits: Tensor, targets: Tensor, valid: Tensor) -> LossParts:
    """Summed in at least fp32 over rows that are valid and targets that are not masked."""
    shape = [len(valid)] + [1] * (targets.dim() - 1)
    targets = torch.where(valid.view(shape), targets, IGNORED)
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    loss_sum = F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED)
    # A pass over all logits: training does not ask for it.
    correct = None if torch.is_grad_enabled() else (flat.argmax(-1) == wanted).sum()
    return LossParts(loss_sum, correct)


def count_tokens(data: Mapping[str, Tensor], valid: Tensor) -> int:
    """Targets that are not masked, counted on the host before they go to a device; 0 where there are no tokens."""
    targets = data.get("targets")
    if targets is None or targets.dim() < 2 or targets.is_floating_point():
        return 0
    return int((targets[valid] != IGNORED).sum())

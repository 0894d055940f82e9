"""A loss of the user, `--train.loss package.module:function`:

    function(output, batch) → losses, or (losses, weights)

`output` is what the model returned, `batch` the data of these rows ("inputs", "targets", …). `losses` has one
number for each sample, or for each token of each sample: its first dimension is that of the batch. `weights`,
of the same shape, are bools or numbers from 0; without them each number counts once. The loss of a step is
Σ losses · weights / Σ weights over the global batch, however it is divided. Not here: the division by the sum
of all weights (fsdp/run/step.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.factory import blame, load_attribute

FLAG = "--train.loss"
EXAMPLE = "cross_entropy(output, batch['targets'], reduction='none')"


@dataclass(frozen=True)
class CustomLoss:
    """The function that the flag names, and the checks of what it returns."""

    path: str
    function: Callable[..., Any]

    def weighted(self, output: Any, batch: Mapping[str, Tensor], valid: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted losses, in at least fp32, and the weights; 0 in rows that are not valid."""
        losses, weights = self._read(self.function(output, batch), len(valid))
        weights = torch.where(valid.view(-1, *[1] * (losses.dim() - 1)), weights.detach(), 0)
        losses = losses if losses.dtype == torch.float64 else losses.float()
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise ConfigError(
                f"{FLAG} {self.path} returned losses without a gradient.",
                "compute them from the output, without .detach(), .item() or torch.no_grad()",
            )
        # Not a product alone: 0 times an infinity is NaN.
        return torch.where(weights != 0, losses, 0) * weights, weights

    def trial(self, output: Any, batch: Mapping[str, Tensor], valid: Tensor) -> None:
        """As `weighted`, before the first step: an error of the function becomes one line that names it."""
        try:
            self.weighted(output, batch, valid)
        except (ConfigError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{FLAG} {self.path} failed: {blame(error)}.",
                f"it is called with (output, batch); output is {_described(output)}, batch has "
                f"{', '.join(batch)}",
            ) from error

    def _read(self, found: Any, rows: int) -> tuple[Tensor, Tensor]:
        losses, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            raise self._wrong(f"returned {_described(found)}")
        if not losses.dim() or len(losses) != rows:
            raise self._wrong(f"returned losses of the shape {tuple(losses.shape)} for {rows} samples")
        if weights is None:
            return losses, torch.ones_like(losses, requires_grad=False)
        if not isinstance(weights, Tensor) or weights.shape != losses.shape:
            shown = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise self._wrong(f"returned losses of the shape {tuple(losses.shape)} and weights of {shown}")
        return losses, weights.to(losses.dtype if losses.dtype == torch.float64 else torch.float32)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(
            f"{FLAG} {self.path} {what}.", f"return a loss for each sample or token: {EXAMPLE}"
        )


def load_loss(path: str) -> CustomLoss | None:
    """The function that --train.loss names; None without one. Raises ConfigError."""
    if not path:
        return None
    function = load_attribute(path, FLAG)
    try:
        inspect.signature(function).bind("output", {})
    except TypeError as error:
        raise ConfigError(f"{FLAG} {path}: {error}.", "it is called with (output, batch)") from None
    except ValueError:  # a builtin without a signature
        pass
    _check_untrained(path, function)
    return CustomLoss(path, function)


def _check_untrained(path: str, function: Any) -> None:
    """Refuses a module with parameters, as metric learning has them: no optimizer would update them."""
    named = function.named_parameters() if isinstance(function, nn.Module) else iter(())
    if (found := next(named, None)) is not None:
        raise ConfigError(
            f"{FLAG} {path} has a parameter of its own, {found[0]}, which is no part of the model and would "
            "not be trained.",
            "make it a part of the model, whose forward takes targets and returns the loss",
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"

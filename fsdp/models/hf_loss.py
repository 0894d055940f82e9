"""transformers' own cross entropy: which models compute it, and their forward without it.

A model's `loss_function` gets logits and labels, and forward adds to it what else the configuration asks for,
such as the loss of a mixture's router. Not here: the cross entropy that is trained in its place (loss.py).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError

_SHIFTS = {
    "ForCausalLMLoss": True,
    "ForMaskedLMLoss": False,
    "ForTokenClassification": False,
    "ForSequenceClassificationLoss": False,
}
"""transformers' functions that are the mean cross entropy of logits; whether each predicts the next label."""
_CHANGES = ("shift_labels", "ignore_index")
"""Arguments that make it another one."""


class HfEntropy:
    """The cross entropy of one model. `shifted`: its logits predict the next label."""

    def __init__(self, model: nn.Module, *, shifted: bool) -> None:
        self._model, self.shifted = model, shifted
        self.routes = bool(getattr(_text_config(model), "output_router_logits", False))
        """Whether the configuration asks for a router's loss."""
        self._plain = self._calls = 0
        self._stand_in = self._nothing  # one object: compiled code has a guard on it

    def _nothing(self, *args: Any, **more: Any) -> Tensor:
        self._calls += 1
        self._plain += all(more.get(name) is None for name in _CHANGES)
        logits = next(x for x in (*args, *more.values()) if isinstance(x, Tensor) and x.is_floating_point())
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=wide, device=logits.device)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of one forward with labels, whose loss is what the model adds to its cross entropy."""
        self._plain = self._calls = 0
        self._model._loss_function = self._stand_in  # type: ignore[assignment]
        try:
            yield
        finally:
            del self._model._loss_function
        if (self._calls, self._plain) != (1, 1):
            raise ConfigError(
                f"{type(self._model).__name__} does not compute one cross entropy of its logits and labels.",
                "--train.loss mine:function computes the losses from its output: docs/training.md",
            )


def maybe_entropy(model: nn.Module) -> HfEntropy | None:
    """None for other classes, a loss or a forward that was replaced, and a decoder, which reads labels."""
    config, code = (
        getattr(model, "config", None),
        getattr(inspect.unwrap(type(model).forward), "__code__", None),
    )
    if not type(model).__module__.startswith("transformers.") or code is None or config is None:
        return None
    replaced = "forward" in vars(model) or hasattr(model, "_loss_function")
    if replaced or "loss_function" not in code.co_names or "shift_labels" in code.co_varnames:
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    losses = sys.modules["transformers.loss.loss_utils"]
    function = losses.LOSS_MAPPING.get(getattr(model, "loss_type", None), losses.ForCausalLMLoss)
    shifted = _SHIFTS.get(function.__name__) if function.__module__ == losses.__name__ else None
    classes = function is not losses.ForSequenceClassificationLoss or (
        config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    )
    return HfEntropy(model, shifted=shifted) if classes and shifted is not None else None


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def remarks(model: nn.Module) -> Iterator[str]:
    """Lines on configurations of transformers whose loss is not what one may expect."""
    config, text = getattr(model, "config", None), _text_config(model)
    weight = getattr(text, "router_aux_loss_coef", 0.0)
    if weight and not getattr(text, "output_router_logits", True):
        yield (
            f"config.json has router_aux_loss_coef {weight:g} and output_router_logits false: the router's "
            "loss is not trained. HINT: --model.args.output_router_logits true"
        )
    if "ForCTC" in type(model).__name__ and getattr(config, "ctc_loss_reduction", "") == "sum":
        yield (
            "config.json has ctc_loss_reduction sum: the loss of a micro-batch is the sum over its rows, so "
            "that it grows with --train.micro_batch. HINT: --model.args.ctc_loss_reduction mean"
        )

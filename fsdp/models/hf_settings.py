"""What a run reads and changes in a model of transformers: its cross entropy, the kernel of its experts,
key-value caches.

Such a model computes its cross entropy by `loss_function`, and forward adds to it what else the configuration
asks for, such as the loss of a mixture's router. transformers is not imported: a model is any module with
`set_experts_implementation`, a configuration what a module has as `config`. Not here: which loss is trained
(loss.py), the choice of --model.args.experts_implementation (hf.py).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError

log = logging.getLogger(__name__)

IGNORED = -100
"""A label that counts nowhere, as in torch."""
GROUPED, LOOP = "grouped_mm", "eager"
ALIGNMENT = 16
"""Bytes: each row of a grouped product's operands, and of their gradients, is a multiple of them."""


def text_config(model: nn.Module) -> Any:
    """The configuration of a model, of several parts that of its decoder of text; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# ---------------------------------------------------------------- cross entropy

_SHIFTS = {
    "ForCausalLMLoss": True,
    "ForMaskedLMLoss": False,
    "ForTokenClassification": False,
    "ForSequenceClassificationLoss": False,
}
"""transformers' functions that are the mean cross entropy of logits; whether each predicts the next label."""


class HfEntropy:
    """The cross entropy of one model. `shifted`: its logits predict the next label."""

    def __init__(self, model: nn.Module, *, shifted: bool) -> None:
        self._model, self.shifted = model, shifted
        self._calls: list[bool] = []
        """For each call of a forward, whether it is the plain cross entropy."""
        self._stand_in = self._nothing  # one object: compiled code has a guard on it

    def _nothing(self, *args: Any, **more: Any) -> Tensor:
        self._calls.append(more.get("shift_labels") is None and more.get("ignore_index") is None)
        logits = next(x for x in (*args, *more.values()) if isinstance(x, Tensor) and x.is_floating_point())
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=wide, device=logits.device)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of one forward with labels, whose loss is what the model adds to its cross entropy."""
        self._calls.clear()
        self._model._loss_function = self._stand_in  # type: ignore[assignment]
        try:
            yield
        finally:
            del self._model._loss_function
        if self._calls != [True]:
            raise ConfigError(
                f"{type(self._model).__name__} does not compute one cross entropy of its logits and labels.",
                "--train.loss mine:function computes the losses from its output: docs/training.md",
            )


def maybe_entropy(model: nn.Module) -> HfEntropy | None:
    """None for other classes, a loss or a forward that was replaced, and a decoder, which reads labels."""
    config: Any = getattr(model, "config", None)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
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


def remarks(model: nn.Module) -> Iterator[str]:
    """Lines on configurations of transformers whose loss is not what one may expect."""
    config, text = getattr(model, "config", None), text_config(model)
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


# ---------------------------------------------------------------- experts


def select_experts_kernel(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces grouped products, transformers' default, where they cannot be computed in `dtype`:
    torch.nn.functional.grouped_mm takes float32, bfloat16 and float16, and rows of multiples of 16 bytes.
    """
    for name, weight in _stacked_weights(model, GROUPED):
        unaligned = any(size * dtype.itemsize % ALIGNMENT for size in weight.shape[1:])
        if dtype == torch.float64 or unaligned:
            if dtype != torch.float64:
                log.info(
                    "experts are computed one after another: rows of %s have no multiple of 16 bytes", name
                )
            _select(model, LOOP)
            return


def group_experts(model: nn.Module) -> None:
    """Grouped products in place of the loop, which reads how many tokens an expert has, for fake tensors."""
    if any(_stacked_weights(model, LOOP)):
        _select(model, GROUPED)


def _select(model: nn.Module, kernel: str) -> None:
    for module in model.modules():
        select: Any = getattr(module, "set_experts_implementation", None)
        if callable(select):
            select(kernel)


def _stacked_weights(model: nn.Module, kernel: str) -> list[tuple[str, nn.Parameter]]:
    """The stacked matrices of experts that are multiplied by this kernel. A model of several parts has a
    configuration for each.
    """
    return [
        (name, parameter)
        for path, module in model.named_modules()
        if hasattr(module, "num_experts")
        and getattr(getattr(module, "config", None), "_experts_implementation", None) == kernel
        for name, parameter in module.named_parameters(path, recurse=False)
        if parameter.dim() == 3
    ]


# ---------------------------------------------------------------- key-value caches


def turn_caches_off(model: nn.Module) -> None:
    """Sets `use_cache` to False in every module's configuration.

    Recomputation calls a block twice: with a cache the second call would append the same keys again.
    """
    for module in model.modules():  # an encoder and a decoder have copies
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def make_contiguous(model: nn.Module) -> None:
    """Makes parameters contiguous, as FSDP needs them; values and names stay the same."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()

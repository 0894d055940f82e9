"""Cross entropies: the sum of a micro-batch's and what it is weighted by, and transformers' own.

Sum and weight stay apart: a global batch is weighted by its samples or tokens, not by micro-batch. Also loss
and logits in what a model returns: the output decides, not a base class. A model of transformers computes its
cross entropy by `loss_function`, and forward adds to it what else the configuration asks for, such as the
loss of a mixture's router. Not here: calling the model, and which loss is trained (loss.py).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.checks import IGNORED
from fsdp.models.hf_settings import text_config

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
    indices = torch.arange(len(targets), device=targets.device), targets.clamp(min=0)
    normalizers = logits[indices] - scores[indices]
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
    training = torch.is_grad_enabled()
    if training and not per_row:
        return LossParts((summed or summed_entropy)(logits, targets, z_loss), None)
    flat, wanted = flat_logits(logits), targets.reshape(-1)
    # A pass over all logits, skipped in training.
    correct = None if training else (flat.argmax(-1) == wanted).sum()
    if not per_row:
        return LossParts(summed_entropy(logits, targets), correct)
    # One log-softmax for both terms: backward keeps it.
    scores = F.log_softmax(flat, dim=-1)
    losses = F.nll_loss(scores, wanted, reduction="none", ignore_index=IGNORED).view(targets.shape)
    loss_sum = losses.sum()
    if z_loss and training:
        loss_sum = loss_sum + z_loss * squared_normalizers(flat, scores, wanted)
    return LossParts(loss_sum, correct, rows=(row_sums(losses), row_sums(targets != IGNORED)))


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
    named = {name: data[name] for name in ("targets", "labels") if name in data}
    return {
        name: TokenCounts(int(marks.sum()), int(marks[:, 1:].sum()))
        for name, labels in named.items()
        if labels.dim() >= 2 and not labels.is_floating_point()
        for marks in [labels[valid] != IGNORED]
    }


# ---------------------------------------------------------------- what a model returns


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
                f"the model returned a {type(needed).__name__} as {name}.", f"{name} as a tensor"
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


# ---------------------------------------------------------------- transformers' own

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
        self.routes = bool(getattr(text_config(model), "output_router_logits", False))
        """Whether the configuration asks for a router's loss, in which no row can be masked."""
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

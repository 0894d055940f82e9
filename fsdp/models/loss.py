"""Calls the model on a micro-batch, and returns what is trained: the objective of a run, by one rule.

1. `--train.loss FUNCTION`: that function's losses and weights (`CustomLoss`).
2. A class of transformers whose forward calls transformers' own cross entropy (`HfEntropy`): that cross
   entropy from the logits, the mean over the global batch's labels. What forward adds to it, such as a
   router's loss, is that of each micro-batch, weighed by rows.
3. Any other model that returns a loss: that loss. A forward that takes `num_items_in_batch` gets the number
   of the global batch's labels (of its rows, where labels are no tokens), and the losses of micro-batches
   add up. Otherwise they are averaged, weighed by labels where the model returns logits for each, and else
   by rows.
4. A model that returns logits and no loss: their cross entropy with the data's targets, the mean as in 2.

Nothing is tried or compared: class, signature and shapes decide, alike at each call. A label of -100 counts
nowhere. Rows that fill up a short batch reach the built-in models, which return logits for each row, and
models with BatchNorm that get no labels: one row has no variance.
An evaluation has the same loss, in 2 the cross entropy alone. Sum and weight stay apart: a global batch is
weighed by its samples or tokens, not by micro-batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.devices import widest_floating
from fsdp.base.errors import ConfigError
from fsdp.models.registry import IGNORED, ROW_POSITIONS, CustomLoss, at_least_fp32
from fsdp.models.units import BATCH_NORMS

if TYPE_CHECKING:
    from fsdp.models.chunked_loss import ChunkedHead
    from fsdp.models.hf import HfEntropy

SAME_LOSSES = "return the same ones at each call, as 0 * x.sum() what a batch has no part in"
LABELS = ("labels", "targets")
ITEMS = "num_items_in_batch"
PART = "loss/"
"""In records, before the name of one of a model's losses, or of a source of a mixture."""
SummedEntropy = Callable[[Tensor, Tensor, float], Tensor]

DividedEntropy = Callable[[Tensor, Tensor, bool, float], "LossParts"]
"""The cross entropy of logits of which each rank has some classes (fsdp/shard/tensor.py)."""


@dataclass(frozen=True)
class LossParts:
    """loss_sum over the weight of the global batch is the mean. `correct` is counted in evaluation.

    `weight` is this micro-batch's part of that weight if a user's loss returned it; None if it is known from
    the data. `rows`, if LossFunction.per_row is set and the model gives them: each row's part of the sum
    and of the weight. `auxiliary`: what the model adds to its cross entropy, times the micro-batch's rows;
    its weight is the global batch's rows. `parts`: the losses of a model that returns several, by name, with
    the weight of their sum.
    """

    loss_sum: Tensor
    correct: Tensor | None
    weight: Tensor | None = None
    rows: tuple[Tensor, Tensor] | None = None
    auxiliary: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class TokenCounts(NamedTuple):
    """Unmasked tokens of one micro-batch: all, and those after each row's first (causal targets)."""

    all: int
    after_first: int


def count_tokens(data: Mapping[str, Tensor], valid: Tensor) -> dict[str, TokenCounts]:
    """Counts unmasked targets and labels on the host, before the copy to a device; empty without tokens."""
    marks = {n: data[n][valid] != IGNORED for n in LABELS if n in data and _are_tokens(data[n])}
    return {name: TokenCounts(int(m.sum()), int(m[:, 1:].sum())) for name, m in marks.items()}


def _are_tokens(labels: Tensor) -> bool:
    return labels.dim() > 1 and not labels.is_floating_point()


# ---------------------------------------------------------------- cross entropy


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
    summed: SummedEntropy,
    per_row: bool,
    z_loss: float,
    vocabulary: DividedEntropy | None = None,
) -> LossParts:
    """Sums in at least fp32 over valid rows and unmasked targets. `summed` is `summed_entropy`, compiled.
    `z_loss` is added in training alone, and is in no row.
    """
    logits, targets = classes_last(logits, targets), mask_padding(targets, valid)
    training = torch.is_grad_enabled()
    if vocabulary is not None:
        return vocabulary(logits, targets, per_row, z_loss if training else 0.0)
    if training and not per_row:
        return LossParts(summed(logits, targets, z_loss), None)
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
    dimension = class_dimension(logits, targets)
    if dimension is None and not targets.is_floating_point():  # torch refuses those itself: misfit
        raise ConfigError(
            f"the model returned logits of the shape {tuple(logits.shape)} for targets of "
            f"{tuple(targets.shape)}: no dimension of them can be that of the classes.",
            "return logits of (rows, …, classes) or (rows, classes, …) for targets of (rows, …), or the loss "
            "as one number: loss.mean()",
        )
    return logits.movedim(1, -1) if dimension == 1 else logits


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row in float64, without a gradient."""
    return values.detach().reshape(len(values), -1).sum(1, dtype=torch.float64)


def mask_padding(targets: Tensor, valid: Tensor) -> Tensor:
    """Masks the targets of padding rows."""
    return torch.where(valid.view(-1, *[1] * (targets.dim() - 1)), targets, IGNORED)


def flat_logits(logits: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()


# ---------------------------------------------------------------- what a model returns


class Output(NamedTuple):
    """The parts of a model's output that determine the loss."""

    loss: Tensor | None
    logits: Tensor | None
    parts: Mapping[str, Tensor] = {}
    """Of a mapping: its 0-dim tensors beside the loss. Without a loss and logits, the loss is their sum."""


def read_output(output: Any, *, labelled: bool = False) -> Output:
    """Reads loss and logits: a scalar is a loss, another tensor logits; an object or mapping names them, or
    a mapping has losses of any names; a tuple has them in this order. A model that was given labels
    (`labelled`) may have them the other way round, as nanoGPT's.
    """
    if isinstance(output, Tensor):
        return Output(None, output) if output.dim() else Output(output, None)
    if isinstance(output, (tuple, list)) and output and not hasattr(output, "logits"):
        first = read_output(output[0])
        second = output[1] if len(output) > 1 and isinstance(output[1], Tensor) else None
        if first.loss is not None and second is not None and second.dim() > 1:
            return Output(first.loss, second)
        if first.loss is not None and second is not None and second.requires_grad and not second.dim():
            raise ConfigError("the model returned several losses in a tuple.", "a dict of them, or their sum")
        if labelled and first.loss is None and second is not None and second.dim() == 0:
            return Output(second, first.logits)
        return first
    get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    loss, logits = get("loss"), get("logits")
    fields = output.items() if isinstance(output, Mapping) else ()
    parts = {k: v for k, v in sorted(fields) if isinstance(v, Tensor) and not v.dim() and k != "loss"}
    if parts and loss is None and logits is None:
        if rows := [k for k, v in fields if isinstance(v, Tensor) and v.dim() == 1 and v.requires_grad]:
            raise ConfigError(f"{rows[0]}, a loss of the model, is not one number.", f"{rows[0]}.mean()")
        loss = functools.reduce(torch.add, parts.values())
    if isinstance(loss, Tensor) or (loss is None and isinstance(logits, Tensor)):
        return Output(loss, logits if isinstance(logits, Tensor) else None, parts)
    raise ConfigError(
        f"the model returned a {type(output).__name__} without a tensor as loss or logits.",
        "return logits, a loss, an object or dictionary with either, or a dictionary of losses; --train.loss "
        "computes the loss from any output",
    )


# ---------------------------------------------------------------- the rule

TRAINED = {
    "custom": "--train.loss {}, the mean over its weights",
    "logits": "the cross entropy of the logits, the mean over the global batch's {}",
    "more": "the cross entropy of the logits, the mean over the global batch's {}. The model adds to it what "
    "aux_loss shows (a router's loss), for each rank's micro-batch, weighed by rows: it depends on the "
    "number of ranks and on --train.micro_batch",
    "own": "the loss that the model returns for each rank's micro-batch, {}. One that compares rows (as "
    "CLIP's) or is no mean depends on the number of ranks and on --train.micro_batch: docs/models.md",
}


class LossFunction:
    """Calls a model with the arguments of its forward. Created before sharding, which replaces forward."""

    def __init__(
        self,
        model: nn.Module,
        custom: CustomLoss | None = None,
        head: ChunkedHead | None = None,
        *,
        summed: SummedEntropy = summed_entropy,
        z_loss: float = 0.0,
    ) -> None:
        """`custom` replaces the cross entropy and the model's own loss; `head`, the model's output layer,
        computes the cross entropy in chunks. `summed`: the cross entropy of logits in training; compiled it
        keeps neither their fp32 copy nor their log-softmax for backward.
        `z_loss`: --train.z_loss, which `head` knows too.
        """
        self._summed, self.custom = summed, custom
        self._head, self._z_loss = head, z_loss
        parameters = inspect.signature(model.forward).parameters
        self._accepts = set(parameters)
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._dtype: torch.dtype | None = None
        self._entropy: HfEntropy | None = None
        if custom is None and "transformers" in sys.modules:
            from fsdp.models.hf import maybe_entropy

            self._entropy = maybe_entropy(model)
        built_in = type(model).__module__.startswith("fsdp.models.")
        self._cuts_padding = not (built_in or any(isinstance(m, BATCH_NORMS) for m in model.modules()))
        self._withheld: set[str] = set()
        """Labels that the model need not receive: a user's loss replaces the one that it would compute."""
        if custom is not None and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            optional = {name for name, p in parameters.items() if p.default is not p.empty}
            self._withheld = set(LABELS) & (optional | {"labels"} - self._accepts)
        self.vocabulary: DividedEntropy | None = None
        """Set where tensor ranks have some classes of the logits each."""
        self.per_row = False
        """Set by a run that needs the loss of each row: that of a mixture."""
        self.counts_tokens = False
        """Of the last call: whether a batch is weighed by unmasked tokens, not by samples."""
        self.classifies = False
        """Of the last call: whether the model returns logits, so that accuracy is defined."""
        self.adds = False
        """Of the last call in training: whether the model adds to its cross entropy (see 2 above)."""
        self.parts: dict[bool, tuple[str, ...]] = {}
        """The names of the losses of a model that returns several, in training (True) and in evaluation."""
        self.compared = False
        """Whether the ranks' names of losses were compared."""
        self._how = ""

    @property
    def is_token_entropy(self) -> bool:
        """Of the last call in an evaluation: whether the loss is the cross entropy of tokens."""
        return self.custom is None and self.counts_tokens and self.classifies

    @property
    def objective(self) -> str:
        """What is trained, in words. Known after the first call in training."""
        if self.custom is not None:
            return f"trained: {TRAINED['custom'].format(self.custom.path)}."
        kind = "own" if self._how else "more" if self.adds else "logits"
        named = ", ".join(PART + name for name in self.parts.get(True, ()))
        how = (self._how or self.unit) + (f", recorded beside {named}" if named else "")
        return f"trained: {TRAINED[kind].format(how)}."

    @property
    def unit(self) -> str:
        """What a loss is a mean over, in the names of metrics."""
        if self.custom is not None:
            return "weights"
        return "tokens" if self.counts_tokens else "samples"

    def __call__(
        self,
        model: nn.Module,
        data: Mapping[str, Tensor],
        valid: Tensor,
        valid_rows: int,
        items: Callable[[], float] | None = None,
    ) -> LossParts:
        """`valid` marks the first `valid_rows` rows. The others are padding and add nothing. `items`: the
        weight of the global batch, in training.
        """
        if self.custom is not None:
            losses, weights = self.custom.weighted(self._call(model, data), data, valid)
            rows = (row_sums(losses), row_sums(weights)) if self.per_row else None
            return LossParts(losses.sum(), None, weights.sum(dtype=torch.float64), rows)
        passed = self.gives_labels(data)
        rows_kept = max(valid_rows, 1)  # one row without weight, where there is no other
        if self._cuts_padding or (passed and self._entropy is None):
            data, valid = {name: value[:rows_kept] for name, value in data.items()}, valid[:rows_kept]
        if self._entropy is not None:
            name = self._label_name(data)
            if name and not data[name].is_floating_point():
                return self._of_transformers(self._entropy, model, data, name, valid)
        if self._head is not None:
            if passed:
                raise self._head.refusal(f"the model computes a loss of its own from {passed}")
            return self._from_logits(model, data, _targets(data), valid)[0]
        labels = data[passed] if passed else None
        self.counts_tokens = labels is not None and _are_tokens(labels)
        total: Tensor | None = None
        if ITEMS in self._accepts:
            # The weight of the global batch; of this one outside of training.
            total = self._weight(labels, valid).clamp(min=1)
            total = total if items is None else torch.full((), int(items()), device=valid.device)
        output = read_output(self._call(model, data, total), labelled=bool(passed))
        if output.loss is None:
            return self._parts(output, _targets(data), valid)
        if len(valid) > rows_kept:
            fault = "the model's own loss has rows in it that fill up a short batch, as its BatchNorm needs."
            raise ConfigError(fault, "return logits, or a --train.global_batch that the ranks divide evenly")
        return self._own(output, output.loss, labels, valid, total)

    def _of_transformers(
        self, entropy: HfEntropy, model: nn.Module, data: Mapping[str, Tensor], name: str, valid: Tensor
    ) -> LossParts:
        labels = data[name]
        # Shifting labels copies less than slicing logits.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if self.shifts(data) else labels
        with entropy.left_out():
            parts, output = self._from_logits(model, {**data, "labels": labels}, targets, valid)
        # Without a gradient it is the 0 that stands for the cross entropy.
        if output.loss is None or not output.loss.requires_grad:
            return parts
        self.adds = True
        return replace(parts, auxiliary=output.loss * valid.sum())

    def _from_logits(
        self, model: nn.Module, data: Mapping[str, Tensor], targets: Tensor, valid: Tensor
    ) -> tuple[LossParts, Output]:
        if self._head is None:
            output = read_output(self._call(model, data))
            return self._parts(output, targets, valid), output
        masked = mask_padding(targets, valid)
        with self._head.summing(masked, per_target=self.per_row):
            output = read_output(self._call(model, data))
        self.counts_tokens, self.classifies = targets.dim() > 1, True
        sums = self._head.take(output.loss, output.logits)
        rows = None if sums.losses is None else (row_sums(sums.losses), row_sums(masked != IGNORED))
        return LossParts(sums.loss_sum, sums.correct, rows=rows), output

    def _parts(self, output: Output, targets: Tensor, valid: Tensor) -> LossParts:
        assert output.logits is not None
        self.counts_tokens, self.classifies = targets.dim() > 1, True
        how = self._summed, self.per_row, self._z_loss, self.vocabulary
        return cross_entropy_parts(output.logits, targets, valid, *how)

    def _own(
        self, output: Output, loss: Tensor, labels: Tensor | None, valid: Tensor, total: Tensor | None
    ) -> LossParts:
        fault = f"has the shape {tuple(loss.shape)}, not that of one number" if loss.dim() else ""
        if fault or self._z_loss:
            fault = fault or f"is trained as it is: --train.z_loss {self._z_loss:g} needs logits"
            hint = "return loss.mean()" if loss.dim() else "--train.z_loss 0"
            raise ConfigError(f"the model's own loss {fault}.", hint)
        dimension = None
        if labels is not None and output.logits is not None and not labels.is_floating_point():
            dimension = class_dimension(output.logits, labels)
        if total is None:
            self.counts_tokens = self.counts_tokens and dimension is not None
            weight = self._weight(labels, valid)
            self._how = f"weighed by {'labels' if self.counts_tokens else 'rows'}"
        else:
            weight, self._how = valid.any() * total, f"divided by {ITEMS}, added up"
        correct = None
        if labels is not None and output.logits is not None and dimension is not None and labels.dim() == 1:
            self.classifies = True
            if not torch.is_grad_enabled():
                correct = ((output.logits.argmax(dimension) == labels) & valid).sum()
        # Not a product alone: the mean over no label is NaN.
        loss, *parts = (
            torch.where(weight != 0, at_least_fp32(v), 0) * weight for v in (loss, *output.parts.values())
        )
        names = self.parts.setdefault(torch.is_grad_enabled(), (*output.parts,))
        if names != (*output.parts,):
            before, now = (", ".join(some) for some in (names, output.parts))
            fault = f"the model returned {now} as losses, and {before} before."
            raise ConfigError(fault, SAME_LOSSES, scope="rank")
        return LossParts(loss, correct, parts={n: v.detach() for n, v in zip(names, parts, strict=True)})

    def _weight(self, labels: Tensor | None, valid: Tensor) -> Tensor:
        if labels is None or not self.counts_tokens:
            return valid.sum()
        # Not labels[valid]: the host would wait for a device to learn how many rows are valid.
        return (mask_padding(labels, valid) != IGNORED).sum()

    def gives_labels(self, data: Mapping[str, object]) -> str:
        """Returns the name under which the model receives its labels; empty if it receives none."""
        if "labels" in data and (self._accepts_all or "labels" in self._accepts):
            return "labels"
        return "targets" if "targets" in data and "targets" in self._accepts else ""

    def _label_name(self, data: Mapping[str, object]) -> str:
        """The data that a loss is weighed by."""
        order = LABELS if self._entropy is not None else (self.gives_labels(data), "targets", "labels")
        for name in order:
            if name in data:
                return name
        return ""

    def shifts(self, data: Mapping[str, object]) -> bool:
        """Whether the first label of each row is unused."""
        return "labels" in data and self._entropy is not None and self._entropy.shifted

    def tokens(self, counted: Mapping[str, TokenCounts]) -> int:
        """Returns the weight of a micro-batch, from the tokens counted on the host."""
        counts = counted.get(self._label_name(counted), TokenCounts(0, 0))
        return counts.after_first if self.shifts(counted) else counts.all

    def _call(self, model: nn.Module, data: Mapping[str, Tensor], total: Tensor | None = None) -> Any:
        if self._dtype is None:
            # At the first call, before any group is gathered in the dtype of computation. FSDP casts inputs
            # only if it computes in another dtype than is stored; of frozen parameters in bf16 the widest is.
            self._dtype = widest_floating(p.dtype for p in model.parameters())
        passed = {} if total is None else {ITEMS: total}
        for name, value in data.items():
            accepted = name in self._accepts or (self._accepts_all and name != "targets")
            if name in ("inputs", ROW_POSITIONS) or (accepted and name not in self._withheld):
                passed[name] = value.to(self._dtype) if value.is_floating_point() else value
        return model(passed.pop("inputs"), **passed)


def _targets(data: Mapping[str, Tensor]) -> Tensor:
    if "targets" not in data:
        fault = f"the model returns logits and no loss, and the data have no targets, but {', '.join(data)}."
        raise ConfigError(fault, 'targets in the data, or a loss beside logits: {"loss": a, "logits": b}')
    return data["targets"]

"""Computes the sum of a batch's losses: calls the model, and weights what it returns.

A model returns logits (cross entropy is computed) or its own loss; the output decides which, not a base
class. The sum and its weight are kept separate: a global batch is weighted by its samples or tokens, not by
micro-batch.

A model that receives labels, as those of transformers do, returns a mean over one micro-batch's unmasked
labels. Means of micro-batches do not add up to the mean of the global batch, so `learn` compares that loss
with the cross entropy of the logits. If the two agree, the sum is computed from the logits, and its weight is
the number of labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.models.checks import IGNORED, check_one_number
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.custom_loss import CustomLoss

LABELS = ("labels", "targets")

BY_SAMPLES = (
    "The model's own loss is weighted by samples: it is not the cross entropy of returned logits. If it is "
    "a mean over unmasked tokens, the result depends on the number of ranks and micro-batches. "
    "HINT: return the logits alone, or return {'loss': loss, 'logits': logits}."
)
AUXILIARY = (
    "The model adds an auxiliary loss, computed over each micro-batch; their mean is weighted by labels. "
    "It depends on the number of ranks and micro-batches. HINT: --train.micro_batch sets its batch size."
)


@dataclass(frozen=True)
class LossParts:
    """loss_sum over the weight of the global batch is the mean. `correct` is counted in evaluation.

    `weight` is this micro-batch's part of that weight if a user's loss returned it; None if it is known from
    the data. `rows`, if LossFunction.per_row is set and the model gives them: each row's part of the sum
    (without an auxiliary loss) and of the weight.
    """

    loss_sum: Tensor
    correct: Tensor | None
    weight: Tensor | None = None
    rows: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class TokenCounts:
    """Unmasked tokens of one micro-batch: all, and those after each row's first (causal targets)."""

    all: int
    after_first: int


@dataclass(frozen=True)
class Output:
    """The parts of a model's output that determine the loss."""

    loss: Tensor | None
    logits: Tensor | None
    auxiliary: Tensor | None = None


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


class LossFunction:
    """Calls a model with the arguments of its forward. Created before sharding, which replaces forward."""

    def __init__(
        self,
        model: nn.Module,
        custom: CustomLoss | None = None,
        head: ChunkedHead | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """`custom` replaces the cross entropy and the model's own loss; `head`, the model's output layer,
        computes the cross entropy in chunks. `compiled`: in training the cross entropy of logits is one
        compiled function, which keeps neither their fp32 copy nor their log-softmax for backward.
        """
        self._summed: SummedEntropy = torch.compile(summed_entropy) if compiled else summed_entropy
        self.custom = custom
        self._head = head
        parameters = inspect.signature(model.forward).parameters
        self._accepts = set(parameters)
        self._optional = {name for name, one in parameters.items() if one.default is not one.empty}
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._own_loss: bool | None = True if "targets" in parameters else None
        self._own: OwnLoss | None = None
        self._dtype: torch.dtype | None = None
        self._decodes_labels = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._auxiliary_weight = _auxiliary_weight(model)
        self.may_own = self._accepts_all or not self._accepts.isdisjoint(LABELS)
        """The model accepts labels: with data that have them it returns its own loss; see `learn`."""
        self.counts_tokens = False
        """Known after the first call: whether a batch is weighted by unmasked tokens, not by samples."""
        self.per_row = False
        """Set by a run that needs the loss of each row: that of a mixture."""
        self.classifies = False
        """Known after the first call: whether the model returns logits, so that accuracy is defined."""

    @property
    def unit(self) -> str:
        """What a loss is a mean over, in the names of metrics."""
        if self.custom is not None:
            return "weights"
        return "tokens" if self.counts_tokens else "samples"

    def __call__(
        self, model: nn.Module, data: Mapping[str, Tensor], valid: Tensor, valid_rows: int
    ) -> LossParts:
        """`valid` marks the first `valid_rows` rows; the others are padding and add nothing."""
        if self.custom is not None:
            output = self._call(model, data, withheld=self._unread)
            losses, weights = self.custom.weighted(output, data, valid)
            rows = (row_sums(losses), row_sums(weights)) if self.per_row else None
            return LossParts(losses.sum(), None, weights.sum(dtype=torch.float64), rows)
        if valid_rows < len(valid) and self._cuts_padding:
            # The model's own loss cannot be masked by row: it is called without the padding.
            data, valid = {k: v[: max(valid_rows, 1)] for k, v in data.items()}, valid[: max(valid_rows, 1)]
        if self._head is not None:
            return self._chunked(self._head, model, data, valid)
        unread = {self._own.labels} if self._own and self._own.withheld else set()
        output = read_output(self._call(model, data, withheld=unread))
        if self._own is not None:
            # Without the model's loss: the memory of its graph is freed before this loss is computed.
            alone = Output(None, output.logits, output.auxiliary)
            return own_parts(self._own, alone, data, valid, per_row=self.per_row, summed=self._summed)
        self._own_loss = output.loss is not None
        if output.loss is not None:
            return LossParts(output.loss * valid_rows, None)
        assert output.logits is not None
        self.counts_tokens, self.classifies = data["targets"].dim() > 1, True
        return cross_entropy_parts(
            output.logits, data["targets"], valid, per_row=self.per_row, summed=self._summed
        )

    def learn(self, model: nn.Module, data: Mapping[str, Tensor]) -> str:
        """Determines the model's own loss from one forward of these samples, without gradients and in eval
        mode; the same samples on every rank. Returns a warning for the user, or "".
        """
        if self.custom is not None:
            rows = torch.ones(len(data["inputs"]), dtype=torch.bool, device=data["inputs"].device)
            self.custom.trial(self._call(model, data, withheld=self._unread), data, rows)
            return ""
        name = self.gives_labels(data)
        data = _with_labels(data, name)
        output = read_output(self._call(model, data))
        self._own_loss = output.loss is not None
        if output.loss is not None:
            check_one_number(output.loss)
        if output.loss is None or output.logits is None or not name or data[name].is_floating_point():
            return BY_SAMPLES if self._own_loss and not (name and _by_samples(data[name])) else ""
        weight = self._auxiliary_weight if output.auxiliary is not None else 0.0
        shifted = matching_shift(output, data[name], weight)
        if shifted is None:
            return BY_SAMPLES if not _by_samples(data[name]) else ""
        withheld = (
            name == "labels"
            and not self._decodes_labels
            and self._same_without(model, data, name, output.logits)
        )
        self._own = OwnLoss(name, shifted, weight, withheld)
        self.counts_tokens, self.classifies = data[name].dim() > 1, True
        return AUXILIARY if weight else ""

    def _chunked(
        self, head: ChunkedHead, model: nn.Module, data: Mapping[str, Tensor], valid: Tensor
    ) -> LossParts:
        """The parts with the cross entropy from the output layer itself: no logits are returned."""
        own = self._own_of_chunks(head, data)
        labels = _targets(own, data)
        targets = _masked(labels, valid)
        with head.summing(targets, per_target=self.per_row):
            output = read_output(self._call(model, data, withheld={own.labels} if own else set()))
        sums = head.take(output.loss, output.logits)
        self._own_loss, self.counts_tokens, self.classifies = False, labels.dim() > 1, True
        rows = None if sums.losses is None else (row_sums(sums.losses), row_sums(targets != IGNORED))
        parts = LossParts(sums.loss_sum, sums.correct, rows=rows)
        return _with_auxiliary(parts, own, output, labels, valid)

    def _own_of_chunks(self, head: ChunkedHead, data: Mapping[str, Tensor]) -> OwnLoss | None:
        """What `learn` or `presume` found."""
        name = self.gives_labels(data)
        if name and (self._own is None or not self._own.withheld):
            raise head.refusal(f"the model computes a loss of its own from {name}")
        return self._own

    def presume(self, model: nn.Module, data: Mapping[str, Tensor]) -> None:
        """As `learn`, for tensors without values: a loss beside logits of the labels' shape is taken as the
        cross entropy of both.
        """
        name = self.gives_labels(data)
        if self.custom is not None or not name:
            return
        output, labels = read_output(self._call(model, data)), data[name]
        if output.loss is None or output.logits is None or output.logits.shape[:-1] != labels.shape:
            return
        weight = self._auxiliary_weight if output.auxiliary is not None else 0.0
        withheld = name == "labels" and not self._decodes_labels
        self._own = OwnLoss(name, labels.dim() > 1, weight, withheld)
        self.counts_tokens, self.classifies = labels.dim() > 1, True

    def gives_labels(self, data: Mapping[str, object]) -> str:
        """Returns the name under which the model receives its labels; empty if it receives none."""
        return next((name for name in LABELS if name in data and self._passes(name)), "")

    @property
    def _unread(self) -> set[str]:
        """Labels that the model need not receive: a user's loss replaces the one that it would compute."""
        return set() if self._decodes_labels else set(LABELS) & (self._optional | {"labels"} - self._accepts)

    @property
    def shifts(self) -> bool:
        """Whether the first label of each row is unused."""
        return self._own is not None and self._own.shifted

    def tokens(self, counted: Mapping[str, TokenCounts]) -> int:
        """Returns the weight of a micro-batch, from the tokens counted on the host."""
        names = [self._own.labels] if self._own is not None else ["targets", "labels"]
        found = next((counted[name] for name in names if name in counted), TokenCounts(0, 0))
        return found.after_first if self.shifts else found.all

    @property
    def _cuts_padding(self) -> bool:
        if self._own is not None:
            return bool(self._own.auxiliary)
        return self._own_loss is not False

    def _passes(self, name: str) -> bool:
        return name in self._accepts or (self._accepts_all and name != "targets")

    def _call(self, model: nn.Module, data: Mapping[str, Tensor], withheld: Collection[str] = ()) -> Any:
        extra = {
            k: self._cast(model, v)
            for k, v in data.items()
            if k != "inputs" and k not in withheld and self._passes(k)
        }
        return model(self._cast(model, data["inputs"]), **extra)

    def _same_without(self, model: nn.Module, data: Mapping[str, Tensor], name: str, logits: Tensor) -> bool:
        alone = read_output(self._call(model, data, withheld={name})).logits
        return (
            alone is not None
            and alone.shape == logits.shape
            and torch.allclose(alone, logits, rtol=1e-3, atol=1e-3)
        )

    def _cast(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Casts to the parameters' stored dtype: FSDP casts inputs only if it computes in another dtype."""
        if self._dtype is None:
            # At the first call, before any group is gathered in the dtype of computation.
            # The widest: frozen parameters may be stored in bf16, and computed with in fp32.
            found = {p.dtype for p in model.parameters() if p.is_floating_point()}
            self._dtype = max(found, key=lambda dtype: dtype.itemsize, default=torch.float32)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


# ---------------------------------------------------------------- what a model returns


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


# ---------------------------------------------------------------- a loss of its own


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
            _flat(logits), (_next(labels) if shifted else labels).reshape(-1), ignore_index=IGNORED
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
) -> LossParts:
    labels = _targets(own, data)
    assert output.logits is not None
    parts = cross_entropy_parts(output.logits, labels, valid, per_row=per_row, summed=summed)
    return _with_auxiliary(parts, own, output, labels, valid)


def _targets(own: OwnLoss | None, data: Mapping[str, Tensor]) -> Tensor:
    """Returns the class that each position's logits predict."""
    if own is None:
        return data["targets"]
    return _next(data[own.labels]) if own.shifted else data[own.labels]


def _with_auxiliary(
    parts: LossParts, own: OwnLoss | None, output: Output, labels: Tensor, valid: Tensor
) -> LossParts:
    if own is None or not own.auxiliary or output.auxiliary is None:
        return parts
    # Not labels[valid]: the host would wait for a device to learn how many rows are valid.
    counted = (_masked(labels, valid) != IGNORED).sum()
    return replace(parts, loss_sum=parts.loss_sum + own.auxiliary * output.auxiliary * counted)


def _auxiliary_weight(model: nn.Module) -> float:
    """Returns the factor of a mixture of experts' router loss, by the names that transformers uses."""
    config = getattr(model, "config", None)
    for place in (model, config, getattr(config, "text_config", None)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(found := getattr(place, name, None), (int, float)):
                return float(found)
    return 0.0


def _with_labels(data: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
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


def _by_samples(labels: Tensor) -> bool:
    """Whether a mean over labels is a mean over samples: each has one label, or an equal count of numbers."""
    return labels.dim() < 2 or labels.is_floating_point()


def _next(labels: Tensor) -> Tensor:
    """Returns each position's next label. Shifting labels copies less than slicing logits."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


# ---------------------------------------------------------------- cross entropy


SummedEntropy = Callable[[Tensor, Tensor], Tensor]


def summed_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of unmasked targets, in at least fp32."""
    return F.cross_entropy(_flat(logits), targets.reshape(-1), reduction="sum", ignore_index=IGNORED)


def cross_entropy_parts(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor,
    *,
    per_row: bool = False,
    summed: SummedEntropy | None = None,
) -> LossParts:
    """Sums in at least fp32 over valid rows and unmasked targets. `summed` is `summed_entropy`, compiled."""
    targets = _masked(targets, valid)
    rows = None
    if torch.is_grad_enabled() and not per_row:
        return LossParts((summed or summed_entropy)(logits, targets), None)
    flat, wanted = _flat(logits), targets.reshape(-1)
    if per_row:
        losses = F.cross_entropy(flat, wanted, reduction="none", ignore_index=IGNORED).view(targets.shape)
        loss_sum, rows = losses.sum(), (row_sums(losses), row_sums(targets != IGNORED))
    else:
        loss_sum = F.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED)
    # A pass over all logits, skipped in training.
    correct = None if torch.is_grad_enabled() else (flat.argmax(-1) == wanted).sum()
    return LossParts(loss_sum, correct, rows=rows)


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row in float64, without a gradient."""
    return values.detach().reshape(len(values), -1).sum(1, dtype=torch.float64)


def _masked(targets: Tensor, valid: Tensor) -> Tensor:
    """Masks the targets of padding rows."""
    return torch.where(valid.view(-1, *[1] * (targets.dim() - 1)), targets, IGNORED)


def _flat(logits: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()


def count_tokens(data: Mapping[str, Tensor], valid: Tensor) -> dict[str, TokenCounts]:
    """Counts unmasked targets and labels on the host, before the copy to a device; empty without tokens."""
    found = {name: data[name] for name in ("targets", "labels") if name in data}
    return {
        name: TokenCounts(int(marks.sum()), int(marks[:, 1:].sum()))
        for name, labels in found.items()
        if labels.dim() >= 2 and not labels.is_floating_point()
        for marks in [labels[valid] != IGNORED]
    }

"""Calls the model on a micro-batch, and returns the sum of its losses.

A model returns logits (cross entropy is computed) or its own loss. `learn` compares an own loss with the
cross entropy of the logits once. If the two agree, the sum is computed from the logits, and its weight is the
number of labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.dtypes import widest_floating
from fsdp.base.errors import ConfigError
from fsdp.models.checks import IGNORED, check_one_number
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.cross_entropy import (
    LossParts,
    SummedEntropy,
    TokenCounts,
    cross_entropy_parts,
    mask_padding,
    row_sums,
    summed_entropy,
)
from fsdp.models.custom_loss import CustomLoss
from fsdp.models.model_output import Output, read_output
from fsdp.models.own_loss import (
    OwnLoss,
    auxiliary_weight_of,
    matching_shift,
    own_parts,
    targets_of,
    weighted_by_samples,
    with_auxiliary,
    with_labels,
)

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


class LossFunction:
    """Calls a model with the arguments of its forward. Created before sharding, which replaces forward."""

    def __init__(
        self,
        model: nn.Module,
        custom: CustomLoss | None = None,
        head: ChunkedHead | None = None,
        *,
        compiled: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        """`custom` replaces the cross entropy and the model's own loss; `head`, the model's output layer,
        computes the cross entropy in chunks. `compiled`: in training the cross entropy of logits is one
        compiled function, which keeps neither their fp32 copy nor their log-softmax for backward.
        `z_loss`: --train.z_loss, which `head` knows too.
        """
        self._summed: SummedEntropy = torch.compile(summed_entropy) if compiled else summed_entropy
        self.custom = custom
        self._head, self._z_loss = head, z_loss
        parameters = inspect.signature(model.forward).parameters
        self._accepts = set(parameters)
        self._optional = {name for name, one in parameters.items() if one.default is not one.empty}
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        listed = list(parameters.values())
        first, after_inputs = (listed[0] if listed else None), listed[1:]
        self._keyword = first.name if first is not None and first.kind is first.KEYWORD_ONLY else ""
        self._needed = [p.name for p in after_inputs if p.kind in named and p.default is p.empty]
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._own_loss: bool | None = True if "targets" in parameters else None
        self._own: OwnLoss | None = None
        self._dtype: torch.dtype | None = None
        self._decodes_labels = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._auxiliary_weight = auxiliary_weight_of(model)
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
        labelled = not unread and bool(self.gives_labels(data))
        output = read_output(self._call(model, data, withheld=unread), labelled=labelled)
        if self._own is not None:
            # Without the model's loss: the memory of its graph is freed before this loss is computed.
            alone = Output(None, output.logits, output.auxiliary)
            return own_parts(
                self._own, alone, data, valid, per_row=self.per_row, summed=self._summed, z_loss=self._z_loss
            )
        self._own_loss = output.loss is not None
        if output.loss is not None:
            if self._z_loss:
                raise ConfigError(
                    f"--train.z_loss {self._z_loss:g} needs logits: the model returns a loss of its own, "
                    "which is not the cross entropy of returned logits.",
                    "--train.z_loss 0",
                )
            return LossParts(output.loss * valid_rows, None)
        assert output.logits is not None
        targets = targets_of(None, data)
        self.counts_tokens, self.classifies = targets.dim() > 1, True
        return cross_entropy_parts(
            output.logits,
            targets,
            valid,
            per_row=self.per_row,
            summed=self._summed,
            z_loss=self._z_loss,
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
        data = with_labels(data, name)
        output = read_output(self._call(model, data), labelled=bool(name))
        self._own_loss = output.loss is not None
        if output.loss is not None:
            check_one_number(output.loss)
        if output.loss is None or output.logits is None or not name or data[name].is_floating_point():
            return BY_SAMPLES if self._own_loss and not (name and weighted_by_samples(data[name])) else ""
        weight = self._auxiliary_weight if output.auxiliary is not None else 0.0
        shifted = matching_shift(output, data[name], weight)
        if shifted is None:
            return BY_SAMPLES if not weighted_by_samples(data[name]) else ""
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
        labels = targets_of(own, data)
        targets = mask_padding(labels, valid)
        with head.summing(targets, per_target=self.per_row):
            output = read_output(self._call(model, data, withheld={own.labels} if own else set()))
        sums = head.take(output.loss, output.logits)
        self._own_loss, self.counts_tokens, self.classifies = False, labels.dim() > 1, True
        rows = None if sums.losses is None else (row_sums(sums.losses), row_sums(targets != IGNORED))
        parts = LossParts(sums.loss_sum, sums.correct, rows=rows)
        return with_auxiliary(parts, own, output, labels, valid)

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
        output, labels = read_output(self._call(model, data), labelled=True), data[name]
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
        found = next((counted[name] for name in self._label_names if name in counted), TokenCounts(0, 0))
        return found.after_first if self.shifts else found.all

    def has_one_label_a_sample(self, data: Mapping[str, Tensor]) -> bool:
        return all(data[name].dim() < 2 for name in self._label_names if name in data)

    @property
    def _label_names(self) -> tuple[str, ...]:
        return ("targets", "labels") if self._own is None else (self._own.labels,)

    @property
    def _cuts_padding(self) -> bool:
        if self._own is not None:
            return bool(self._own.auxiliary)
        return self._own_loss is not False

    def _passes(self, name: str) -> bool:
        return name in self._accepts or (self._accepts_all and name != "targets")

    def _call(self, model: nn.Module, data: Mapping[str, Tensor], withheld: Collection[str] = ()) -> Any:
        if self._dtype is None:
            self._check_needed(data)
            # At the first call, before any group is gathered in the dtype of computation.
            self._dtype = _stored_dtype(model)
        extra = {
            name: self._cast(value)
            for name, value in data.items()
            if name not in ("inputs", self._keyword) and name not in withheld and self._passes(name)
        }
        inputs = self._cast(data["inputs"])
        return model(**{self._keyword: inputs}, **extra) if self._keyword else model(inputs, **extra)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _check_needed(self, data: Mapping[str, Tensor]) -> None:
        missing = next((name for name in self._needed if name not in data), None)
        if missing is not None:
            raise ConfigError(
                f"the model's forward needs {missing}, and the data have only {', '.join(data)}.",
                f"give {missing} a default in forward, or return it from the data set: docs/data.md",
            )

    def _same_without(self, model: nn.Module, data: Mapping[str, Tensor], name: str, logits: Tensor) -> bool:
        alone = read_output(self._call(model, data, withheld={name})).logits
        return (
            alone is not None
            and alone.shape == logits.shape
            and torch.allclose(alone, logits, rtol=1e-3, atol=1e-3)
        )


def _stored_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of floating-point inputs: FSDP casts them only if it computes in another dtype. The widest of
    the parameters: frozen ones may be stored in bf16, and computed with in fp32.
    """
    return widest_floating(p.dtype for p in model.parameters())

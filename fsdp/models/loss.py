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

Nothing is tried or compared: class, signature and shapes decide, alike at each start. A label of -100 counts
nowhere. An evaluation has the same loss, in 2 the cross entropy alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.base.digest import widest_floating
from fsdp.base.errors import ConfigError
from fsdp.models.checks import IGNORED, check_one_number
from fsdp.models.cross_entropy import (
    HfEntropy,
    LossParts,
    Output,
    SummedEntropy,
    TokenCounts,
    class_dimension,
    cross_entropy_parts,
    mask_padding,
    maybe_entropy,
    next_labels,
    read_output,
    row_sums,
    summed_entropy,
)
from fsdp.models.factory import blame, load_attribute

if TYPE_CHECKING:
    from fsdp.models.chunked_loss import ChunkedHead

FLAG = "--train.loss"
EXAMPLE = "cross_entropy(output, batch['targets'], reduction='none')"
LABELS = ("labels", "targets")
ITEMS = "num_items_in_batch"


@dataclass(frozen=True)
class CustomLoss:
    """A loss of the user, `--train.loss package.module:function`, and the checks of what it returns:

        function(output, batch) → losses, or (losses, weights)

    `output` is what the model returned, `batch` the data of these rows ("inputs", "targets", …). `losses` has
    one number for each sample, or for each token of each sample: its first dimension is that of the batch.
    `weights`, of the same shape, are bools or numbers from 0; without them each number counts once. The loss
    of a step is Σ losses · weights / Σ weights over the global batch, however it is divided.
    """

    path: str
    function: Callable[..., Any]

    def weighted(self, output: Any, batch: Mapping[str, Tensor], valid: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted losses, in at least fp32, and the weights; 0 in rows that are not valid."""
        try:
            returned = self.function(output, batch)
        except (ConfigError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{FLAG} {self.path} failed: {blame(error)}.",
                f"it is called with (output, batch); output is {_described(output)}, batch has "
                f"{', '.join(batch)}",
            ) from error
        losses, weights = self._checked(returned, len(valid))
        weights = torch.where(valid.view(-1, *[1] * (losses.dim() - 1)), weights.detach(), 0)
        losses = losses if losses.dtype == torch.float64 else losses.float()
        # Not a product alone: 0 times an infinity is NaN.
        return torch.where(weights != 0, losses, 0) * weights, weights

    def _checked(self, returned: Any, rows: int) -> tuple[Tensor, Tensor]:
        pair = isinstance(returned, tuple) and len(returned) == 2
        losses, weights = returned if pair else (returned, None)
        fault = ""
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            fault = f"returned {_described(returned)}"
        elif not losses.dim() or len(losses) != rows:
            fault = f"returned losses of the shape {tuple(losses.shape)} for {rows} samples"
        elif weights is not None and getattr(weights, "shape", None) != losses.shape:
            fault = f"returned losses of the shape {tuple(losses.shape)} and {_described(weights)} as weights"
        elif torch.is_grad_enabled() and not losses.requires_grad:
            fault = "returned losses without a gradient"
        if fault:
            hint = f"return a loss for each sample or token, with its gradient: {EXAMPLE}"
            raise ConfigError(f"{FLAG} {self.path} {fault}.", hint)
        if weights is None:
            return losses, torch.ones_like(losses, requires_grad=False)
        return losses, weights.to(losses.dtype if losses.dtype == torch.float64 else torch.float32)


def load_loss(path: str) -> CustomLoss | None:
    """The function that --train.loss names; None without one. Raises ConfigError."""
    if not path:
        return None
    function: Any = load_attribute(path, FLAG)
    parameters = function.named_parameters() if isinstance(function, nn.Module) else iter(())
    if (parameter := next(parameters, None)) is not None:  # as metric learning has them
        raise ConfigError(
            f"{FLAG} {path} has a parameter of its own, {parameter[0]}, which is no part of the model and "
            "would not be trained.",
            "make it a part of the model, whose forward takes targets and returns the loss",
        )
    return CustomLoss(path, function)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


# ---------------------------------------------------------------- the rule


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
        self._signature = inspect.signature(model.forward)
        parameters = self._signature.parameters
        self._accepts = set(parameters)
        self._optional = {name for name, p in parameters.items() if p.default is not p.empty}
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._dtype: torch.dtype | None = None
        self._decodes_labels = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._entropy = None if custom is not None else maybe_entropy(model)
        self._of_all_rows: dict[bool, bool] = {}
        """In training and in evaluation, from the first call: whether the output has a loss of all rows that
        neither class nor signature announce."""
        self.counts_tokens = False
        """Known after the first call: whether a batch is weighted by unmasked tokens, not by samples."""
        self.per_row = False
        """Set by a run that needs the loss of each row: that of a mixture."""
        self.classifies = False
        """Known after the first call: whether the model returns logits, so that accuracy is defined."""
        self.adds = False
        """Known after the first call: whether the model adds to its cross entropy (see 2 above)."""
        self._trained = "" if custom is None else f"--train.loss {custom.path}, the mean over its weights"

    @property
    def objective(self) -> str:
        """What is trained, in words. Known after the first call in training."""
        more = ""
        if self.adds:
            more = (
                ". The model adds to it what aux_loss shows (a router's loss), for each rank's micro-batch, "
                "weighed by rows: it depends on the number of ranks and on --train.micro_batch"
            )
        return f"trained: {self._trained}{more}."

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
        """`valid` marks the first `valid_rows` rows. The others are padding and add nothing: their targets
        are masked, or they are cut off where the model computes a loss of its own or adds one. `items`: the
        weight of the global batch, in training.
        """
        if self.custom is not None:
            output = self._call(model, data, withheld=self._unread)
            losses, weights = self.custom.weighted(output, data, valid)
            rows = (row_sums(losses), row_sums(weights)) if self.per_row else None
            return LossParts(losses.sum(), None, weights.sum(dtype=torch.float64), rows)
        received, training = self.gives_labels(data), torch.is_grad_enabled()
        announced = "targets" not in data or bool(received) if self._entropy is None else self._entropy.routes
        if announced or self._of_all_rows.get(training):
            rows_kept = max(valid_rows, 1)  # one row without weight, where there is no other
            data, valid = {name: value[:rows_kept] for name, value in data.items()}, valid[:rows_kept]
            return self._once(model, data, valid, received, items)[0]
        first = training not in self._of_all_rows
        streams = _random_streams(valid.device) if first else None
        parts, of_all_rows = self._once(model, data, valid, received, items)
        self._of_all_rows[training] = of_all_rows
        if first and of_all_rows:
            # On every rank, with padding or without: each forward gathers. Its draws are the first one's, as
            # in a run whose first call was earlier.
            assert streams is not None
            _set_random_streams(valid.device, streams)
            return self(model, data, valid, valid_rows, items)
        return parts

    def _once(
        self,
        model: nn.Module,
        data: Mapping[str, Tensor],
        valid: Tensor,
        received: str,
        items: Callable[[], float] | None,
    ) -> tuple[LossParts, bool]:
        """One forward; whether its loss is of all rows, those that are masked too."""
        name = self._label_name(data)
        if self._entropy is not None and name and not data[name].is_floating_point():
            parts = self._of_transformers(self._entropy, model, data, name, valid)
            return parts, parts.auxiliary is not None
        if self._head is not None:
            if received:
                raise self._head.refusal(f"the model computes a loss of its own from {received}")
            return self._from_logits(model, data, _targets(data), valid)[0], False
        labels = data[received] if received else None
        self.counts_tokens = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
        whole = self._items(labels, valid, items) if ITEMS in self._accepts else None
        output = read_output(self._call(model, data, whole), labelled=bool(received))
        if output.loss is not None:
            return self._own(output, output.loss, labels, valid, whole), True
        return self._parts(output, _targets(data), valid), False

    def _of_transformers(
        self, entropy: HfEntropy, model: nn.Module, data: Mapping[str, Tensor], name: str, valid: Tensor
    ) -> LossParts:
        labels = data[name]
        targets = next_labels(labels) if self.shifts(data) else labels
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
        self._note_logits(targets, "classes last")
        sums = self._head.take(output.loss, output.logits)
        rows = None if sums.losses is None else (row_sums(sums.losses), row_sums(masked != IGNORED))
        return LossParts(sums.loss_sum, sums.correct, rows=rows), output

    def _parts(self, output: Output, targets: Tensor, valid: Tensor) -> LossParts:
        assert output.logits is not None
        second = class_dimension(output.logits, targets) == 1
        self._note_logits(targets, f"classes {'in dimension 1' if second else 'last'}")
        more: Any = {"per_row": self.per_row, "summed": self._summed, "z_loss": self._z_loss}
        return cross_entropy_parts(output.logits, targets, valid, **more)

    def _note_logits(self, targets: Tensor, where: str) -> None:
        self.counts_tokens, self.classifies = targets.dim() > 1, True
        mean = f"the mean over the global batch's {self.unit}"
        self._trained = f"the cross entropy of the logits ({where}), {mean}"

    def _own(
        self, output: Output, loss: Tensor, labels: Tensor | None, valid: Tensor, whole: Tensor | None
    ) -> LossParts:
        check_one_number(loss)
        if self._z_loss:
            raise ConfigError(
                f"--train.z_loss {self._z_loss:g} needs logits: the model returns a loss of its own, "
                "which is trained as it is.",
                "--train.z_loss 0",
            )
        where = None
        if labels is not None and output.logits is not None and not labels.is_floating_point():
            where = class_dimension(output.logits, labels)
        if whole is None:
            self.counts_tokens = self.counts_tokens and where is not None
            weight = self._weight(labels, valid)
            how = f"weighed by {'labels' if self.counts_tokens else 'rows'}"
        else:
            weight, how = valid.any() * whole, f"divided by {ITEMS}, added up"
        self._trained = (
            f"the loss that the model returns for each rank's micro-batch, {how}. One that compares rows (as "
            "CLIP's) or is no mean depends on the number of ranks and on --train.micro_batch: docs/models.md"
        )
        correct = None
        if labels is not None and output.logits is not None and where is not None and labels.dim() == 1:
            self.classifies = True
            if not torch.is_grad_enabled():
                correct = ((output.logits.argmax(where) == labels) & valid).sum()
        loss = loss if loss.dtype == torch.float64 else loss.float()
        # Not a product alone: the mean over no label is NaN.
        return LossParts(torch.where(weight != 0, loss, 0) * weight, correct)

    def _items(self, labels: Tensor | None, valid: Tensor, items: Callable[[], float] | None) -> Tensor:
        """num_items_in_batch: the weight of the global batch, or of this one outside of training."""
        if items is not None:
            return torch.full((), int(items()), device=valid.device)
        return self._weight(labels, valid).clamp(min=1)

    def _weight(self, labels: Tensor | None, valid: Tensor) -> Tensor:
        if labels is None or not self.counts_tokens:
            return valid.sum()
        # Not labels[valid]: the host would wait for a device to learn how many rows are valid.
        return (mask_padding(labels, valid) != IGNORED).sum()

    def gives_labels(self, data: Mapping[str, object]) -> str:
        """Returns the name under which the model receives its labels; empty if it receives none."""
        return next((name for name in LABELS if name in data and self._passes(name)), "")

    @property
    def _unread(self) -> set[str]:
        """Labels that the model need not receive: a user's loss replaces the one that it would compute."""
        return set() if self._decodes_labels else set(LABELS) & (self._optional | {"labels"} - self._accepts)

    def _label_name(self, data: Mapping[str, object]) -> str:
        """The data that a loss is weighed by."""
        if self._entropy is not None:
            return next((name for name in LABELS if name in data), "")
        return self.gives_labels(data) or next((n for n in ("targets", "labels") if n in data), "")

    def shifts(self, data: Mapping[str, object]) -> bool:
        """Whether the first label of each row is unused."""
        return "labels" in data and self._entropy is not None and self._entropy.shifted

    def tokens(self, counted: Mapping[str, TokenCounts]) -> int:
        """Returns the weight of a micro-batch, from the tokens counted on the host."""
        counts = counted.get(self._label_name(counted), TokenCounts(0, 0))
        return counts.after_first if self.shifts(counted) else counts.all

    def _passes(self, name: str) -> bool:
        return name in self._accepts or (self._accepts_all and name != "targets")

    def _call(
        self,
        model: nn.Module,
        data: Mapping[str, Tensor],
        whole: Tensor | None = None,
        withheld: Collection[str] = (),
    ) -> Any:
        known = self._dtype is not None
        if not known:
            # At the first call, before any group is gathered in the dtype of computation. FSDP casts inputs
            # only if it computes in another dtype than is stored; of frozen parameters in bf16 the widest is.
            self._dtype = widest_floating(p.dtype for p in model.parameters())
        cast = {n: x.to(self._dtype) if x.is_floating_point() else x for n, x in data.items()}
        extra = {n: x for n, x in cast.items() if n != "inputs" and n not in withheld and self._passes(n)}
        extra |= {} if whole is None else {ITEMS: whole}
        if not known:
            try:
                self._signature.bind(cast["inputs"], **extra)
            except TypeError as error:
                raise ConfigError(
                    f"the model's forward: {error}, and the data have only {', '.join(data)}.",
                    "give it a default in forward, or return it from the data set: docs/data.md",
                ) from None
        return model(cast["inputs"], **extra)


def _random_streams(device: torch.device) -> list[Tensor]:
    streams = [torch.get_rng_state()]
    return [*streams, torch.cuda.get_rng_state(device)] if device.type == "cuda" else streams


def _set_random_streams(device: torch.device, streams: list[Tensor]) -> None:
    torch.set_rng_state(streams[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(streams[1], device)


def _targets(data: Mapping[str, Tensor]) -> Tensor:
    if "targets" not in data:
        raise ConfigError(
            "the model returns logits and no loss, and the data have no targets: they have "
            f"{', '.join(data)}.",
            "targets, the token after each of inputs; labels are for a model whose forward takes them",
        )
    return data["targets"]

"""The plain loop to which every mesh is compared: one process, the unsharded model, torch's own optimizer.

Initial weights and samples come from fsdp/, no computation does: the loss and its weights, clipping,
parameter groups and learning rate are implemented here a second time. torch is imported within functions: a
wrong flag is reported before torch is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp.parity.options import Comparison, ParityOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdp.config import OptimSection, TrainSection
    from fsdp.run.job import Job

MASKED = -100


@dataclass
class TrainingRecord:
    """Parameters before and after a training, and the loss and gradient norm of each step."""

    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class PlainLoop:
    """The whole model in one process."""

    def __init__(self, options: ParityOptions, job: Job, device: Any) -> None:
        import torch

        from fsdp.models import build_real
        from fsdp.models.hf_settings import select_experts_kernel
        from fsdp.models.lora import freeze
        from fsdp.run import weights

        config = options.config(None, "")
        self._options, self._job, self._device = options, job, device
        self.model = build_real(job.spec, config.run.seed, device)
        if weights.reads_folder(config, job.spec):
            self.model.load_state_dict(dict(weights.open_folder(config, job.spec)))
        elif (state := weights.maybe_state(config)) is not None:
            self.model.load_state_dict(dict(state))
        if config.model.frozen:
            freeze(self.model, config.model.frozen)
        kept, computed = (
            (torch.float64,) * 2 if options.dtype == "fp64" else (torch.float32, _lower(options.dtype))
        )
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(kept)
        select_experts_kernel(self.model, computed)
        self._start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.loss = Loss(self.model, computed, self._samples(0), config.train)
        self.rounds = (
            lower_precision_inside(self.model, lambda: self.loss.forward(self._samples(0)))
            if computed == kept
            else ""
        )

    def _samples(self, step: int) -> dict[str, Tensor]:
        found = self._job.data.train.batch(self._job.cursor.indices(step))
        return {name: value.to(self._device) for name, value in found.items()}

    def train(self, training: Comparison, accumulation: int) -> TrainingRecord:
        """The batch is split as on the ranks: a loss of the model's own depends on it."""
        import numpy as np
        import torch

        config = self._options.config(None, "", training)
        self.model.load_state_dict(self._start)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        optimizer = _optimizer(config.optim, named, self.model)
        ratios = [float(group["lr"]) / config.optim.lr for group in optimizer.param_groups]
        done = TrainingRecord(_parameters(self.model), {})
        for step in range(config.train.steps):
            whole = self._samples(step)
            shares = np.array_split(np.arange(len(whole["inputs"])), self._options.ranks)
            pieces = [
                piece for share in shares for piece in np.array_split(share, accumulation) if len(piece)
            ]
            optimizer.zero_grad()
            loss = 0.0
            for part, reported in self.loss.parts(whole, pieces):
                part.backward()
                loss += reported
            done.losses.append(loss)
            done.norms.append(
                float(torch.nn.utils.clip_grad_norm_(trained, config.train.clip_grad_norm or math.inf))
            )
            rate = _rate(config.optim, step + 1, config.train.steps)
            for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
                group["lr"] = rate * ratio
            optimizer.step()
        done.parameters = _parameters(self.model)
        return done


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def _lower(dtype: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


# ---------------------------------------------------------------- the loss


class Loss:
    """The mean loss over a global batch, as a sum of parts, one of each micro-batch of a rank.

    The objective is that of fsdp/models/loss.py, computed a second time: from logits, or by the model itself.
    """

    def __init__(
        self, model: nn.Module, computed: Any, first: Mapping[str, Tensor], train: TrainSection
    ) -> None:
        self._model, self._computed = model, computed
        accepted = inspect.signature(model.forward).parameters
        more = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._passed = {
            name for name in first if name != "inputs" and (name in accepted or (more and name != "targets"))
        }
        self._takes_items = "num_items_in_batch" in accepted
        self._labels = next((name for name in ("labels", "targets") if name in self._passed), "")
        self._custom, self._z_loss = _custom_loss(train.loss), train.z_loss
        self._entropy = None if self._custom is not None else _entropy_of(model, first)
        self.own = False
        """Known after the first part: the model's own loss is trained."""
        if self._custom is not None:
            optional = {name for name, one in accepted.items() if one.default is not one.empty}
            decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            unread = set() if decodes else {"labels", "targets"} & (optional | {"labels"} - set(accepted))
            self._passed -= unread

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's output, to look at its precision."""
        return self._raw(batch, self._given(batch, len(batch["inputs"])))

    def _given(self, batch: Mapping[str, Tensor], items: int) -> dict[str, Tensor]:
        import torch

        more = {"num_items_in_batch": torch.tensor(items)} if self._takes_items else {}
        return {name: batch[name] for name in self._passed} | more

    def parts(self, whole: Mapping[str, Tensor], pieces: list[Any]) -> Any:
        """Each piece's share of the mean, one at a time, and of the loss that is reported."""
        if self._custom is not None:
            for part in self._custom_parts(whole, pieces):
                yield part, float(part.detach())
            return
        labels = whole[self._labels] if self._labels else None
        tokens = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
        items = _counted(labels, False) if labels is not None and tokens else len(whole["inputs"])
        for rows in pieces:
            batch = {name: value[rows] for name, value in whole.items()}
            share = len(rows) / len(whole["inputs"])
            if self._entropy is not None:
                yield self._with_entropy(self._entropy, batch, whole, share)
                continue
            output = self._raw(batch, self._given(batch, items))
            loss, logits = _unpacked(output, labelled=bool(self._labels))
            if loss is None:
                count = (
                    _counted(whole["targets"], False) if whole["targets"].dim() > 1 else len(whole["inputs"])
                )
                total, _ = _cross_entropy(logits, batch["targets"], False, self._z_loss)
                loss = total / max(1, count)
            else:
                self.own = True
                if tokens and logits is not None and _one_each(logits, batch[self._labels]):
                    share = _counted(batch[self._labels], False) / max(1, items)
                if not self._takes_items:
                    loss = loss * share if share else loss.nan_to_num() * 0
            yield loss, float(loss.detach())

    def _with_entropy(
        self, shifts: bool, batch: Mapping[str, Tensor], whole: Mapping[str, Tensor], share: float
    ) -> tuple[Any, float]:
        """transformers adds to its cross entropy what the configuration asks for, here weighed by rows."""
        name = "labels" if "labels" in whole else "targets"
        shifts = shifts and name == "labels"
        count = _counted(whole[name], shifts) if whole[name].dim() > 1 else len(whole[name])
        found: list[Any] = []

        def entropy(*args: Any, **more: Any) -> Any:
            tensors = (*args, *more.values())
            logits = next(one for one in tensors if hasattr(one, "dim") and one.is_floating_point())
            found.append(_cross_entropy(logits, batch[name], shifts, self._z_loss)[0] / max(1, count))
            return found[0] / share

        model: Any = self._model
        model.loss_function = entropy
        try:
            given = {one: batch[one] for one in self._passed} | {"labels": batch[name]}
            loss = self._raw(batch, given).loss * share
        finally:
            del model._loss_function
        return loss, float(found[0].detach())

    def _custom_parts(self, whole: Mapping[str, Tensor], pieces: list[Any]) -> Any:
        """The weights of the whole batch come from a first pass over the pieces."""
        import torch

        assert self._custom is not None
        cut = [{name: value[rows] for name, value in whole.items()} for rows in pieces]
        with torch.no_grad():
            count = sum(float(self._custom(self.forward(piece), piece)[1]) for piece in cut)
        for piece in cut:
            yield self._custom(self.forward(piece), piece)[0] / (count or 1)

    def _raw(self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Any:
        """Parameters are cast for the computation; their gradients are in the dtype they are kept in."""
        import torch

        dtype = self._computed
        cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in given.items()}
        inputs = batch["inputs"].to(dtype) if batch["inputs"].is_floating_point() else batch["inputs"]
        lower = {n: p.to(dtype) if p.dim() else p for n, p in self._model.named_parameters()}
        return torch.func.functional_call(self._model, lower, (inputs,), cast)


def _entropy_of(model: nn.Module, batch: Mapping[str, Tensor]) -> bool | None:
    """Whether transformers' own cross entropy predicts the next label; None for another loss. Which classes
    have it is the run's rule: not a matter of parity.
    """
    from fsdp.models.cross_entropy import maybe_entropy

    labels = next((batch[name] for name in ("labels", "targets") if name in batch), None)
    found = maybe_entropy(model)
    return None if found is None or labels is None or labels.is_floating_point() else found.shifted


def _one_each(logits: Tensor, labels: Tensor) -> bool:
    return labels.shape in (logits.shape[:-1], logits.shape[:1] + logits.shape[2:])


def _unpacked(output: Any, labelled: bool) -> tuple[Any, Any]:
    if hasattr(output, "dim"):
        return (output, None) if output.dim() == 0 else (None, output)
    if isinstance(output, (tuple, list)):
        loss, logits = _unpacked(output[0], labelled)
        second = output[1] if len(output) > 1 and hasattr(output[1], "dim") else None
        if loss is None:
            return (
                (second, logits) if labelled and second is not None and not second.dim() else (None, logits)
            )
        return loss, second if second is not None and second.dim() > 1 else None
    values = output if isinstance(output, Mapping) else vars(output)
    return values.get("loss"), values.get("logits")


def _custom_loss(path: str) -> Callable[[Any, Any], tuple[Any, Any]] | None:
    """The user's function as (sum of weighted losses, sum of weights)."""
    if not path:
        return None
    from fsdp.models import load_attribute

    function = load_attribute(path, "--train.loss")

    def sums(output: Any, batch: Any) -> tuple[Any, Any]:
        losses = function(output, batch)
        losses, weights = losses if isinstance(losses, tuple) else (losses, losses.detach() * 0 + 1)
        used = weights.nonzero(as_tuple=True)
        losses = losses[used] if losses.element_size() == 8 else losses[used].float()
        return (losses * weights[used]).sum(), weights.double().sum()

    return sums


def _counted(targets: Tensor, shifts: bool) -> int:
    return int(((targets[:, 1:] if shifts else targets) != MASKED).sum())


def _cross_entropy(logits: Tensor, targets: Tensor, shifts: bool, z_loss: float = 0.0) -> tuple[Tensor, int]:
    """(sum over the unmasked targets, their number)"""
    import torch

    second = logits.shape[:1] + logits.shape[2:] == targets.shape
    if second and (logits.dim() > 3 or logits.shape[:-1] != targets.shape):
        logits = logits.movedim(1, -1)
    targets = targets.reshape(logits.shape[:-1])
    if shifts:
        logits, targets = logits[:, :-1], targets[:, 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores, kept = logits.log_softmax(-1), targets != MASKED
    chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = -chosen[kept]
    if z_loss:
        losses = losses + z_loss * logits[kept].logsumexp(-1) ** 2
    return losses.sum(), int(kept.sum())


# ---------------------------------------------------------------- the update


def _optimizer(section: OptimSection, named: list[tuple[str, Any]], model: nn.Module | None = None) -> Any:
    import torch

    if ":" in section.name:
        return _user_optimizer(section, named)
    if section.name == "muon":
        assert model is not None
        return _muon(section, named, model)
    trained = [parameter for _, parameter in named]
    decay = section.weight_decay if section.name == "adamw" else 0.0
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[section.name]
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)


class _Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers: Any) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def zero_grad(self) -> None:
        for one in self._optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self._optimizers:
            one.step()


def _muon(section: OptimSection, named: list[tuple[str, Any]], model: nn.Module) -> _Together:
    """torch's Muon beside its AdamW. Which matrices it updates is the run's rule: not a matter of parity."""
    import torch

    from fsdp.optim.muon import hidden_matrices

    matrices = hidden_matrices(model, section.muon_parameters)
    ids = {id(matrix) for matrix in matrices}
    muon = torch.optim.Muon(
        matrices,
        lr=section.muon_lr or section.lr,
        weight_decay=section.weight_decay,
        momentum=section.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [parameter for _, parameter in named if id(parameter) not in ids]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    return _Together(muon, torch.optim.AdamW(groups, lr=section.lr, betas=betas, eps=section.eps))


def _user_optimizer(section: OptimSection, named: list[tuple[str, Any]]) -> Any:
    from fsdp.models import load_attribute

    factory = load_attribute(section.name, "--optim.name")
    accepted = inspect.signature(factory).parameters
    usual = {"lr": section.lr, "betas": (section.beta1, section.beta2), "weight_decay": section.weight_decay}
    if any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
        given = usual
    else:
        given = {name: value for name, value in usual.items() if name in accepted}
    others = {"eps": section.eps, "momentum": section.momentum}
    return factory(named, **given, **{name: value for name, value in others.items() if name in accepted})


def _rate(section: OptimSection, step: int, steps: int) -> float:
    """Linear warmup to the peak, then the schedule down to min_lr_ratio of it; steps count from 1."""
    if ":" in section.schedule:
        from fsdp.models import load_attribute

        return section.lr * float(load_attribute(section.schedule, "--optim.schedule")(step, steps, section))
    warm = steps // 20 if section.warmup_steps < 0 else section.warmup_steps
    if step <= warm:
        return section.lr * step / warm
    if section.schedule == "wsd":
        warm = max(warm, steps - round(section.decay_share * steps))
    left = 1.0 - min(1.0, max(0, step - warm) / max(1, steps - warm))
    cosine = (1 - math.cos(math.pi * left)) / 2
    shape = {"constant": 1.0, "linear": left, "wsd": left, "cosine": cosine}[section.schedule]
    low = 1.0 if section.schedule == "constant" else section.min_lr_ratio
    return section.lr * (low + (1 - low) * shape)


# ---------------------------------------------------------------- models that are not exact in float64


def lower_precision_inside(model: nn.Module, forward: Callable[[], Any]) -> str:
    """The first module class that computes below the model's float64, and the dtype; empty if none."""
    import torch
    from torch.overrides import TorchFunctionMode

    inside: list[str] = []
    found: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tracked = isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point()
            if tracked and result.dtype != torch.float64:
                found.append(
                    f"{inside[-1] if inside else type(model).__name__} computes in {str(result.dtype)[6:]}"
                )
            return result

    def enter(module: nn.Module, _: Any) -> None:
        inside.append(type(module).__name__)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        inside.pop()

    handles = [m.register_forward_pre_hook(enter) for m in model.modules()]
    handles += [m.register_forward_hook(leave, always_call=True) for m in model.modules()]
    try:
        if next(model.parameters()).dtype == torch.float64:
            with Watching():
                forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""

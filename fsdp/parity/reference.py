"""The plain loop to which every mesh is compared: one process, the unsharded model, torch's own optimizer.

From fsdp/ come the initial weights, the samples, the learning rate, and which classes of transformers have a
plain cross entropy. The loss with its weights, clipping and the update are computed here a second time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from fsdp.base.torch_private import UNUSED
from fsdp.config import Config, OptimSection, TrainSection
from fsdp.models import build_real, load_attribute
from fsdp.models.hf import maybe_entropy, select_experts_kernel, turn_caches_off
from fsdp.models.lora import freeze
from fsdp.models.loss import class_dimension, read_output
from fsdp.models.units import find_units
from fsdp.optim.muon import hidden_matrices
from fsdp.optim.optimizer import Schedule, build_custom
from fsdp.run.build import maybe_folder, maybe_state

if TYPE_CHECKING:
    from fsdp.run.job import Job

Batch = Mapping[str, Tensor]
MASKED = -100
COMPUTED = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainingRecord:
    """Parameters before and after a training, and the loss and gradient norm of each step."""

    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class PlainLoop:
    """The whole model in one process."""

    def __init__(self, config: Config, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device
        self.model = build_real(job.spec, config.run.seed, device)
        if (weights := maybe_folder(config, job.spec) or maybe_state(config)) is not None:
            self.model.load_state_dict(dict(weights()))
        if config.model.frozen:
            freeze(self.model, config.model.frozen)
        computed = COMPUTED[config.precision.param]
        master = torch.promote_types(computed, torch.float32)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(master)
        turn_caches_off(self.model)  # with one, transformers makes no mask of packed rows
        select_experts_kernel(self.model, computed)
        self._start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.objective = Objective(self.model, computed, self._samples(0), config.train)
        self.rounds = computed == torch.float64 and computes_lower(
            lambda: self.objective.forward(self._samples(0))
        )
        """Whether the model computes in float32 although its parameters are in float64."""

    def _samples(self, step: int) -> Batch:
        samples = self._job.data.train.batch(self._job.cursor.indices(step))
        return {name: value.to(self._device) for name, value in samples.items()}

    def train(self, config: Config, data_ranks: int, accumulation: int) -> TrainingRecord:
        """The batch is split as on the ranks: a loss of the model's own depends on it."""
        self.model.load_state_dict(self._start)
        optimizers = build_optimizers(config.optim, self.model)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        ratios = [float(group["lr"]) / config.optim.lr for group in groups]
        schedule = Schedule(config.optim, config.train.steps)
        record = TrainingRecord(self._parameters(), {})
        # as FSDP reduces what no loss depends on, in a model of one's own, outside of its units
        reduces_zeros = self._job.spec.takes is not None and hasattr(FSDPModule, f"set_{UNUSED}")
        within = {
            p for unit in find_units(self.model, config.mesh.wrap) for m in unit for p in m.parameters()
        }
        for step in range(config.train.steps):
            batch = self._samples(step)
            shares = np.array_split(np.arange(len(batch["inputs"])), data_ranks)
            pieces = [rows for share in shares for rows in np.array_split(share, accumulation) if len(rows)]
            self.model.zero_grad()
            record.losses.append(0.0)
            for loss, recorded in self.objective.parts(batch, pieces):
                loss.backward()
                record.losses[-1] += recorded
            trained = [p for p in self.model.parameters() if p.requires_grad]
            for parameter in trained:
                if parameter.grad is None and reduces_zeros and parameter not in within:
                    parameter.grad = torch.zeros_like(parameter)
            clipped = nn.utils.clip_grad_norm_(trained, config.train.clip_grad_norm or math.inf)
            record.norms.append(float(clipped))
            for group, ratio in zip(groups, ratios, strict=True):
                group["lr"] = schedule.lr(step + 1) * ratio
            for optimizer in optimizers:
                optimizer.step()
        record.parameters = self._parameters()
        return record

    def _parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}


class Objective:
    """The mean loss over a global batch, as a sum of parts, one of each micro-batch of a rank.

    It is that of fsdp/models/loss.py, computed a second time: a function of the user, cross entropy from
    logits, or what the model returns in train mode.
    """

    def __init__(self, model: nn.Module, computed: torch.dtype, first: Batch, train: TrainSection) -> None:
        self._model, self._computed, self._z_loss = model, computed, train.z_loss
        accepted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._passed = {n for n in first if n in accepted or (takes_all and n != "targets")} - {"inputs"}
        self._takes_items = "num_items_in_batch" in accepted
        self._custom = load_attribute(train.loss, "--train.loss") if train.loss else None
        labels = next((name for name in ("labels", "targets") if name in first), "")
        countable = self._custom is None and labels and not first[labels].is_floating_point()
        self._entropy = maybe_entropy(model) if countable else None
        passed = next((name for name in ("labels", "targets") if name in self._passed), "")
        self._labels = labels if self._entropy else passed
        self.is_own = False
        """Known after the first part: the model's own loss is trained."""
        if self._custom and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            # A user's loss stands for the one that the model would compute from them.
            optional = {name for name, p in accepted.items() if p.default is not p.empty}
            self._passed -= {"labels", "targets"} & (optional | {"labels"} - set(accepted))

    def forward(self, batch: Batch, items: int = 1, **more: Tensor) -> Any:
        """Parameters are cast for the computation; their gradients are in the dtype they are kept in."""
        keywords = {name: self._cast(batch[name]) for name in self._passed} | more
        if self._takes_items:
            keywords["num_items_in_batch"] = torch.tensor(items)
        lower = {n: p.to(self._computed) if p.dim() else p for n, p in self._model.named_parameters()}
        return torch.func.functional_call(self._model, lower, (self._cast(batch["inputs"]),), keywords)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._computed) if tensor.is_floating_point() else tensor

    def parts(self, whole: Batch, pieces: list[Any]) -> Iterator[tuple[Tensor, float]]:
        """Each piece's share of the mean, one at a time, and of the loss that is recorded."""
        batches = [{name: value[rows] for name, value in whole.items()} for rows in pieces]
        with torch.no_grad():
            weight = sum(float(self._weighted(batch)[1]) for batch in batches) if self._custom else 0.0
        for batch in batches:
            rows = len(batch["inputs"]) / len(whole["inputs"])
            added = 0.0  # what the model adds, such as a router's loss: recorded apart
            if self._custom is not None:
                loss = self._weighted(batch)[0] / (weight or 1)
            elif self._entropy is not None:
                with self._entropy.left_out():
                    output = self.forward(batch, labels=batch[self._labels])
                shifts = self._entropy.shifted and self._labels == "labels"
                loss = self._cross_entropy(output.logits, batch, whole, self._labels, shifts)
                added = output.loss * rows if output.loss.requires_grad else 0.0
            else:
                loss = self._from_model(batch, whole, rows)
            yield loss + added, float(loss.detach())

    def _from_model(self, batch: Batch, whole: Batch, rows: float) -> Tensor:
        labels = whole.get(self._labels)
        tokens = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
        items = _count(labels) if labels is not None and tokens else len(whole["inputs"])
        output = read_output(self.forward(batch, items), labelled=bool(self._labels))
        if output.loss is None:
            assert output.logits is not None
            return self._cross_entropy(output.logits, batch, whole, "targets", shifts=False)
        self.is_own = True
        if self._takes_items:
            return output.loss
        share = rows
        if tokens and output.logits is not None and class_dimension(output.logits, batch[self._labels]):
            share = _count(batch[self._labels]) / max(1, items)
        return output.loss * share if share else output.loss.nan_to_num() * 0

    def _cross_entropy(self, logits: Tensor, batch: Batch, whole: Batch, name: str, shifts: bool) -> Tensor:
        """The sum over the piece's unmasked targets, divided by their number in the global batch."""
        targets, every = batch[name], whole[name]
        logits = logits.movedim(1, -1) if class_dimension(logits, targets) == 1 else logits
        if shifts:
            logits, targets, every = logits[:, :-1], targets[:, 1:], every[:, 1:]
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        total = F.cross_entropy(flat, wanted, reduction="sum", ignore_index=MASKED)
        if self._z_loss:
            total = total + self._z_loss * flat[wanted != MASKED].logsumexp(-1).square().sum()
        return total / max(1, _count(every) if every.dim() > 1 else len(every))

    def _weighted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The user's function as (sum of weighted losses, sum of weights)."""
        assert self._custom is not None
        losses = self._custom(self.forward(batch), batch)
        losses, weight = losses if isinstance(losses, tuple) else (losses, torch.ones_like(losses))
        used = weight.nonzero(as_tuple=True)  # not a product alone: 0 times an infinity is NaN
        losses = losses[used].to(torch.promote_types(losses.dtype, torch.float32))
        return (losses * weight[used]).sum(), weight.double().sum()


def _count(targets: Tensor) -> int:
    return int((targets != MASKED).sum())


def computes_lower(forward: Callable[[], Any]) -> bool:
    """Whether anything with a gradient is computed below float64."""
    dtypes: set[torch.dtype] = set()

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.requires_grad:
                dtypes.add(result.dtype)
            return result

    with Watching():
        forward()
    return bool(dtypes - {torch.float64})


def build_optimizers(section: OptimSection, model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own. Which matrices Muon updates is the run's rule, and not a matter of parity."""
    if ":" in section.name:
        return [build_custom(section, model)]
    matrices = hidden_matrices(model, section.muon_parameters) if section.name == "muon" else []
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not m for m in matrices)]
    decay = section.weight_decay if section.name in ("adamw", "muon") else 0.0
    groups: Any = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if section.name == "sgd":
        return [torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)]
    kind = torch.optim.Adam if section.name == "adam" else torch.optim.AdamW
    adam = kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    muon: dict[str, Any] = {"momentum": section.muon_momentum, "adjust_lr_fn": "match_rms_adamw"}
    lr = section.muon_lr or section.lr
    return [*([torch.optim.Muon(matrices, lr=lr, weight_decay=decay, **muon)] if matrices else []), adam]

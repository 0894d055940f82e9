"""The hooks of a run in its steps: token count, loss sum, checks of replicas and of branches, verdict on the
numbers, protection of a save that still reads.

Not here: the step (step.py), and what happens between steps (loop.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp.base.phases import Phases
from fsdp.checkpoint import Checkpointer
from fsdp.data import StepBatch
from fsdp.data.types import DataInfo
from fsdp.dist import collectives
from fsdp.dist.stop import Stopper
from fsdp.models.loss import LABELS, LossFunction
from fsdp.optim.custom_optimizer import StateCheck
from fsdp.optim.ema import Ema
from fsdp.optim.nonfinite import Verdicts
from fsdp.parallel.float8 import Scales
from fsdp.run.source_losses import SourceLosses
from fsdp.run.step import StepHooks
from fsdp.watch.branch_check import BranchCheck


class TokenSum:
    """A step's unmasked tokens over all ranks; the sum travels while the first forward computes."""

    def __init__(self, count: int, over_ranks: bool = False) -> None:
        self._sum = collectives.Sum(torch.tensor(count, dtype=torch.int64)) if over_ranks else None
        self._count = count

    def __call__(self) -> int:
        if self._sum is not None:
            self._count, self._sum = int(self._sum.wait()), None
        return self._count


def token_sum(loss_function: LossFunction, info: DataInfo, batch: StepBatch) -> TokenSum:
    data = batch.micro[0].data
    classes = bool(info.class_names) and all(data[name].dim() < 2 for name in LABELS if name in data)
    if not loss_function.shifts(data) and (classes or not info.masks_targets):
        return TokenSum(batch.samples * info.tokens_per_sample)
    return TokenSum(sum(loss_function.tokens(micro.counted) for micro in batch.micro), over_ranks=True)


@dataclass(kw_only=True)
class RunHooks(StepHooks):
    """The hooks of a run. `start` comes before each step."""

    loss_function: LossFunction
    info: DataInfo
    phases: Phases
    stopper: Stopper
    branches: BranchCheck
    verdicts: Verdicts
    checkpointer: Checkpointer
    scales: Scales | None
    states: StateCheck | None
    ema: Ema | None
    labels: tuple[str, ...] = ()
    """Of the sources of a mixture."""

    def start(self, step: int, batch: StepBatch) -> None:
        """Starts the sum of the step's tokens."""
        self._step, self._samples = step, batch.samples
        self._count = token_sum(self.loss_function, self.info, batch)

    @property
    def loss(self) -> Tensor:
        """The global batch's mean loss, after the step. May still be on its way."""
        return self._loss

    @property
    def source_losses(self) -> SourceLosses | None:
        """Each source's sums, after the step; None without a mixture, or if the model gives none."""
        first, count = self._first_of_sources, 2 * len(self.labels)
        if not count or self._numbers == first:
            return None
        return SourceLosses(self.labels, self._loss_sum.wait()[first : first + count])

    @property
    def _first_of_sources(self) -> int:
        return 1 + (self.loss_function.custom is not None) + self.loss_function.adds

    @property
    def auxiliary(self) -> Tensor | None:
        """The global batch's mean of what the model adds to its cross entropy, after the step."""
        return self._loss_sum.wait()[1:2] / self._samples if self.loss_function.adds else None

    @property
    def tokens(self) -> int:
        return self._count()

    def enter(self, phase: str) -> None:
        self.phases.enter(phase)

    def weight(self) -> float:
        tokens = self._count()
        counted = tokens if self.loss_function.counts_tokens else self._samples
        if self.loss_function.custom is not None:
            counted = max(tokens, self._samples)  # until all weights are known: see correction
        self._weight = float(max(1, counted))
        return self._weight

    def rows(self) -> int:
        return self._samples

    def correction(self) -> Tensor | None:
        if self.loss_function.custom is None:
            return None
        weight = self._loss_sum.wait()[1]
        return self._weight / torch.where(weight != 0, weight, 1)

    def reduce_loss(self, total: Tensor, scaled: Tensor) -> None:
        self.verdicts.own_loss = total.view(-1)[0].clone()  # names the rank, should the sum not be finite
        self._numbers = total.numel()
        self._loss_sum = self.stopper.sum_with(total, scaled, self.branches.signature)

    def may_update(self, norm: Tensor) -> bool:
        factor = self.correction()
        self._loss = self._loss_sum.wait()[0] / self._weight
        if factor is not None:
            self._loss = self._loss * factor
        if self.stopper.on_host:
            self.branches.check(self._step, self.stopper.signatures())
        return self.verdicts.may_update(self._step, self._loss, norm)

    def before_update(self) -> None:
        self.checkpointer.before_update()

    def refresh_scales(self) -> None:
        """After each change of the parameters."""
        if self.scales is not None:
            self.scales.refresh()

    def after_update(self) -> None:
        if self.ema is not None:
            self.ema.update()
        self.refresh_scales()
        if self.states is not None:
            self.states.after_update()

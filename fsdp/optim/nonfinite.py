"""Are a step's loss and gradients numbers? If not, its update is left out and the run stops, or goes on
(--train.nonfinite).

On the host the answer is known before the update. On CUDA to ask would make the host wait for the device in
every step: there the fused optimizer reads the answer itself and leaves parameters and states as they are,
and the host hears when it looks at the numbers anyway: at a printed line, before an evaluation, before a
save. So no spoiled state is ever printed or saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp.base.errors import NotFiniteError, TrainingError
from fsdp.config import TrainSection
from fsdp.dist import collectives
from fsdp.optim.gradients import Gradients
from fsdp.optim.loss_scale import LossScaler

log = logging.getLogger(__name__)

DEVICES_THAT_DECIDE = ("cuda",)


@dataclass(frozen=True)
class _PendingStep:
    """A step whose numbers may still be on their way; norms of this rank's parts say where, should they be
    none.
    """

    step: int
    loss: Tensor
    norm: Tensor
    finite: Tensor
    holders: list[nn.Parameter]
    norms: Tensor
    own_loss: Tensor


class Verdicts:
    """Loss and norm are sums over all ranks, so every rank comes to the same verdict, at the same step."""

    def __init__(
        self,
        section: TrainSection,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        root: nn.Module,
        *,
        scaler: LossScaler | None,
        whole_update: bool,
    ) -> None:
        self._section, self._gradients, self._optimizer, self._root = section, gradients, optimizer, root
        self._scaler = scaler
        self._pending: list[_PendingStep] = []
        self._skipped = 0
        self.own_loss = torch.zeros(())
        """This rank's share of the loss: one that is not finite spoils the sum, and after it every rank's
        gradients.
        """
        # fp16's scale is the host's, and it must hear of an overflow before the next step.
        self.device_decides = scaler is None and whole_update and _reads_verdicts(optimizer, root)

    def may_update(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Whether to call the optimizer. Where the device decides it always is: its kernel does nothing if it
        must not.
        """
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self.device_decides:
            self._pending.append(
                _PendingStep(step, loss, norm, finite, *self._gradients.parts(), self.own_loss)
            )
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            return True
        if bool(finite):
            self._good()
            return True
        first = self._gradients.first_nonfinite
        self._bad(step, loss, norm, self.own_loss, lambda: first(self._root.named_parameters()))
        return False

    def settle(self) -> None:
        """Hear what the device decided since last asked. Collective where something was wrong, and all ranks
        ask alike.
        """
        asked, self._pending = self._pending, []
        if not asked:
            return
        for one, finite in zip(asked, torch.stack([one.finite for one in asked]).tolist(), strict=True):
            if finite:
                self._good()
            else:
                self._bad(one.step, one.loss, one.norm, one.own_loss, lambda one=one: self._where(one))  # type: ignore[misc]

    def _good(self) -> None:
        self._skipped = 0
        if self._scaler is not None:
            self._scaler.good()

    def _bad(
        self, step: int, loss: Tensor, norm: Tensor, own: Tensor, where: Callable[[], str | None]
    ) -> None:
        """Said and borne, or raised."""
        self._skipped += 1
        overflow = self._scaler is not None and self._scaler.overflow()
        skips = self._section.nonfinite == "skip" and self._skipped <= self._section.max_skipped
        if not overflow and not skips:
            raise self._error(step, float(loss), float(norm), bool(own.isfinite()), where())
        log.warning(
            "step %d: loss %s, gradient norm %s: the update is left out", step, float(loss), float(norm)
        )

    def _where(self, asked: _PendingStep) -> str | None:
        names = {parameter: name for name, parameter in self._root.named_parameters()}
        wrong = (~asked.norms.isfinite()).nonzero().flatten().tolist()
        return min((names[asked.holders[at]] for at in wrong), key=list(names.values()).index, default=None)

    def _error(self, step: int, loss: float, norm: float, own: bool, where: str | None) -> TrainingError:
        told = collectives.everyones((where, own))
        ranks = [(rank, name) for rank, (name, _) in enumerate(told) if name]
        losses = [rank for rank, (_, finite) in enumerate(told) if not finite]
        place = (
            f", first in {ranks[0][1]} on rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(str(r) for r, _ in ranks[:8])}"
            if ranks
            else ""
        )
        again = f" {self._skipped} times in a row" if self._skipped > 1 else ""
        place += (
            f", from the loss of rank{'s' * (len(losses) > 1)} {', '.join(map(str, losses[:8]))}"
            if losses
            else ""
        )
        error = NotFiniteError(
            f"step {step}: loss {loss}, gradient norm {norm}{place}: not finite{again}.",
            "--optim.lr lower, --train.clip_grad_norm 1, or --train.nonfinite skip to leave such updates out",
        )
        error.ranks = tuple(losses or (rank for rank, _ in ranks))
        return error


def _reads_verdicts(optimizer: torch.optim.Optimizer, root: nn.Module) -> bool:
    """torch's fused Adam alone: SGD's first skipped update would leave its momentum as memory was."""
    device = next(root.parameters()).device
    return (
        device.type in DEVICES_THAT_DECIDE
        and isinstance(optimizer, torch.optim.Adam)
        and all(group.get("fused") for group in optimizer.param_groups)
    )

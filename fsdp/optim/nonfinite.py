"""Steps whose loss or gradients are not finite: the update is skipped, and the run stops or continues
(--train.nonfinite).

On the host the verdict is known before the update. On CUDA reading it would make the host wait for the device
in every step: there the fused optimizer reads the verdict and leaves parameters and states unchanged, and the
host reads it when it reads the numbers anyway: at a printed line, before an evaluation, before a save. So no
spoiled state is printed or saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fsdp.base.errors import NotFiniteError, TrainingError
from fsdp.base.text import named_ranks
from fsdp.config import TrainSection
from fsdp.dist import collectives
from fsdp.optim.gradients import Gradients
from fsdp.optim.loss_scale import LossScaler

log = logging.getLogger(__name__)

DEVICES_THAT_SKIP = ("cuda",)


@dataclass(frozen=True)
class _PendingStep:
    """A step whose numbers may still be computing; the norms of this rank's parts name the parameter if one
    is not finite.
    """

    step: int
    loss: Tensor | None
    norm: Tensor
    finite: Tensor
    holders: list[nn.Parameter]
    norms: Tensor
    own_loss: Tensor


class Verdicts:
    """Verdicts on steps. Loss and norm are sums over all ranks, so every rank has the same verdict at the
    same step. In a loop of one's own the loss is not known.
    """

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
        """This rank's share of the loss: if it is not finite, so are the sum and every rank's gradients."""
        # fp16's scale is on the host, which must read an overflow before the next step.
        self.device_decides = scaler is None and whole_update and _reads_verdicts(optimizer, root)

    def may_update(self, step: int, loss: Tensor | None, norm: Tensor) -> bool:
        """Whether to call the optimizer. Always true where the device decides: its kernel skips updates."""
        finite = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & torch.isfinite(loss)
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
        """Reads the device's verdicts since the last call. Collective if one is bad, and every rank calls it
        at the same step.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        for one, finite in zip(pending, torch.stack([one.finite for one in pending]).tolist(), strict=True):
            if finite:
                self._good()
            else:
                self._bad(one.step, one.loss, one.norm, one.own_loss, partial(self._where, one))

    def _good(self) -> None:
        self._skipped = 0
        if self._scaler is not None:
            self._scaler.good()

    def _bad(
        self, step: int, loss: Tensor | None, norm: Tensor, own: Tensor, where: Callable[[], str | None]
    ) -> None:
        """Logs a skipped update, or raises."""
        self._skipped += 1
        overflow = self._scaler is not None and self._scaler.overflow()
        skips = self._section.nonfinite == "skip" and self._skipped <= self._section.max_skipped
        if not overflow and not skips:
            raise self._error(step, loss, norm, bool(own.isfinite()), where())
        log.warning("step %d: %s: the update is skipped", step, _said(loss, norm))

    def _where(self, pending: _PendingStep) -> str | None:
        names = {parameter: name for name, parameter in self._root.named_parameters()}
        wrong = (~pending.norms.isfinite()).nonzero().flatten().tolist()
        return min((names[pending.holders[at]] for at in wrong), key=list(names.values()).index, default=None)

    def _error(
        self, step: int, loss: Tensor | None, norm: Tensor, own: bool, where: str | None
    ) -> TrainingError:
        gathered = collectives.all_gather_objects((where, own))
        ranks = [(rank, name) for rank, (name, _) in enumerate(gathered) if name]
        losses = [rank for rank, (_, finite) in enumerate(gathered) if not finite]
        place = f", first in {ranks[0][1]} on {named_ranks([rank for rank, _ in ranks])}" if ranks else ""
        again = f" {self._skipped} times in a row" if self._skipped > 1 else ""
        place += f", from the loss of {named_ranks(losses)}" if losses else ""
        lower = "a lower rate of the optimizer" if loss is None else "--optim.lr lower"
        return NotFiniteError(
            f"step {step}: {_said(loss, norm)}{place}: not finite{again}.",
            f"{lower}, --train.clip_grad_norm 1, or --train.nonfinite skip to skip such updates",
            ranks=tuple(losses or (rank for rank, _ in ranks)),
        )


def _said(loss: Tensor | None, norm: Tensor) -> str:
    return ("" if loss is None else f"loss {float(loss)}, ") + f"gradient norm {float(norm)}"


def _reads_verdicts(optimizer: torch.optim.Optimizer, root: nn.Module) -> bool:
    """Whether the optimizer's kernel can skip an update: torch's fused Adam only. SGD's first skipped update
    would leave its momentum uninitialised; a subclass of a user may have another step.
    """
    device = next(root.parameters()).device
    return (
        device.type in DEVICES_THAT_SKIP
        and isinstance(optimizer, torch.optim.Adam)
        and type(optimizer).__module__.startswith(("torch.optim", "fsdp."))
        and all(group.get("fused") for group in optimizer.param_groups)
    )

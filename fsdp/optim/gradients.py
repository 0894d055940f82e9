"""The gradient norm of the whole, unsharded model on any mesh, and clipping by it.

Each rank norms the shards it holds, one sum goes over dp_shard alone (replicas hold the same gradient), and
gradients that are not sharded are added once. A NaN or an infinity on any rank shows in the norm of every
rank. torch's own clip_grad_norm_ takes one mesh at a time, never DTensors beside plain tensors, and pays a
DTensor dispatch for each parameter. Here too: fp16's loss scale, and the verdict on numbers that are not
finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.errors import NotFiniteError, TrainingError
from fsdp.base.text import named_ranks
from fsdp.base.torch_private import foreach_multiply_, foreach_norm
from fsdp.config import TrainSection
from fsdp.distributed import collectives
from fsdp.distributed.boxes import counts_here
from fsdp.optim.optimizer import TrainState

log = logging.getLogger(__name__)

GROWS_AFTER = 2000
"""Good steps after which the loss scale doubles."""
DEVICES_THAT_SKIP = ("cuda",)
LARGEST = 2.0**24
"""Loss scale."""
InTurn = Callable[[list[Tensor]], Iterable[list[Tensor]]]


class Gradients:
    """The trained parameters of one sharded model, collected once."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        shard_group: dist.ProcessGroup | None,
        in_turn: InTurn | None = None,
        tensor_rank: int = 0,
    ) -> None:
        """`in_turn` yields tensors a few at a time, for gradients that must not all be in memory at once.
        Of a shard that several ranks of a copy of the weights hold, the first one's adds to the norm.
        """
        listed = list(parameters)
        trained = [p for p in listed if p.requires_grad]
        self._frozen = [p for p in listed if not p.requires_grad]
        self._sharded: list[nn.Parameter] = [p for p in trained if isinstance(p, DTensor)]
        self._plain = [p for p in trained if not isinstance(p, DTensor)]
        self._group, self._in_turn = shard_group, in_turn
        self._uncounted = {p for p in self._sharded if not counts_here(p, tensor_rank)}
        self.norms: list[Tensor] = []
        """Of the last `norm`: that of this rank's part of each of `held`."""
        self.held: list[nn.Parameter] = []

    def changed(self) -> nn.Parameter | None:
        """A parameter whose requires_grad is no longer what it was when they were collected."""
        for some, trained in ((self._frozen, False), (self._sharded, True), (self._plain, True)):
            for parameter in some:
                if parameter.requires_grad is not trained:
                    return parameter
        return None

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The global 2-norm, the same on every rank. Collective."""
        self.norms, self.held = [], []
        square = self._square_sum(self._sharded)
        # Without a trained shard on any rank, as of a lone temperature, there is nothing to sum.
        if self._sharded and self._group is not None and self._group.size() > 1:
            if square is None:
                first = self._sharded[0]
                wide = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
                square = torch.zeros((), dtype=wide, device=first.device)
            dist.all_reduce(square, group=self._group)
        plain = self._square_sum(self._plain) if self._plain else None
        total = plain if square is None else square if plain is None else square + plain
        return torch.zeros(()) if total is None else total.sqrt()

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        grads = self._locals(self._sharded + self._plain)
        for some in [grads] if self._in_turn is None else self._in_turn(grads):
            if some:  # gradients may be offloaded to the host, where no factor of a device is taken
                here = factor.to(some[0].device) if isinstance(factor, Tensor) else factor
                foreach_multiply_(some, here)

    def clip(self, max_norm: float, norm: Tensor, kernel: Any = None) -> None:
        """Always multiplies: a branch would wait for the device. `kernel` is a fused optimizer, which divides
        the gradients as it reads them, by a number in fp32.
        """
        if kernel is not None and norm.dtype == torch.float32:
            kernel.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
        else:
            self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _locals(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        local = []
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                local.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        return local

    def _square_sum(self, parameters: list[nn.Parameter]) -> Tensor | None:
        grads, norms = self._locals(parameters), list[Tensor]()
        if not grads:
            return None
        for parameter in parameters:
            if parameter.grad is not None:
                self.held.append(parameter)
        for some in [grads] if self._in_turn is None else self._in_turn(grads):
            norms += foreach_norm(some)
        self.norms += norms
        if self._uncounted:
            named = zip(self.held[-len(norms) :], norms, strict=True)
            norms = [norm for parameter, norm in named if parameter not in self._uncounted]
        return torch.linalg.vector_norm(torch.stack(norms)).square() if norms else None


class LossScaler:
    """Halves on overflow, doubles after 2000 good steps; its numbers are in TrainState, so they resume."""

    def __init__(self, state: TrainState, ranks: int = 1) -> None:
        """`ranks` are those whose gradients are summed: each has as large a loss as if they were averaged."""
        self._state, self._ranks = state, ranks

    @property
    def scale(self) -> float:
        return self._state.loss_scale

    @property
    def factor(self) -> float:
        """Of a rank's loss."""
        return self.scale * self._ranks

    def unscale(self, gradients: Gradients, norm: Tensor) -> Tensor:
        gradients.scale(1.0 / self.factor)
        return norm / self.factor

    def good(self) -> None:
        self._state.good_steps += 1
        if self._state.good_steps >= GROWS_AFTER and self.scale < LARGEST:
            self._state.loss_scale *= 2
            self._state.good_steps = 0

    def overflow(self) -> bool:
        """Halves the scale; returns whether a smaller scale may help: below 1 the numbers themselves
        overflow.
        """
        self._state.loss_scale /= 2
        self._state.good_steps = 0
        return self.scale >= 1


@dataclass(frozen=True)
class _Numbers:
    """Those of a step, which may still be computing; the norms of this rank's parts name a parameter."""

    step: int
    loss: Tensor | None
    norm: Tensor
    finite: Tensor
    holders: list[nn.Parameter]
    norms: list[Tensor]
    own_loss: Tensor

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss {float(self.loss)}, "
        return f"{loss}gradient norm {float(self.norm)}"


class Verdicts:
    """Verdicts on the numbers of steps: an update that is not finite is skipped, or the run ends
    (--train.nonfinite). Loss and norm are sums over all ranks, so every rank has the same verdict at the same
    step. In a loop of one's own the loss is not known.

    On the host the verdict is known before the update. On CUDA reading it would make the host wait for the
    device in every step: there the fused optimizer reads the verdict and leaves parameters and states
    unchanged, and the host reads it when it reads the numbers anyway (`settle`). So no spoiled state is
    printed or saved.
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
        self._section, self._gradients, self._optimizer = section, gradients, optimizer
        self._scaler, self._root = scaler, root
        self._pending: list[_Numbers] = []
        self._skipped = 0
        self.bad_sample: Callable[[int], str] = lambda step: ""
        """Which of this rank's samples of a step has a number that is not finite."""
        self.own_loss = torch.zeros(())
        """This rank's share of the loss: if it is not finite, so are the sum and every rank's gradients."""
        # fp16's scale is on the host, which must read an overflow before the next step.
        self.device_decides = scaler is None and whole_update and _reads_verdicts(optimizer, root)

    def may_update(self, step: int, loss: Tensor | None, norm: Tensor) -> bool:
        """Whether to call the optimizer. Always true where the device decides: its kernel skips updates."""
        finite = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & torch.isfinite(loss)
        numbers = _Numbers(
            step, loss, norm, finite, self._gradients.held, self._gradients.norms, self.own_loss
        )
        if self.device_decides:
            self._pending.append(numbers)
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            return True
        return self._judge(numbers, bool(finite))

    def settle(self) -> None:
        """Reads the device's verdicts since the last call. Collective if one is bad, and every rank calls it
        at the same step.
        """
        pending, self._pending = self._pending, []
        if pending:
            verdicts = torch.stack([numbers.finite for numbers in pending]).tolist()
            for numbers, finite in zip(pending, verdicts, strict=True):
                self._judge(numbers, finite)

    def _judge(self, numbers: _Numbers, finite: bool) -> bool:
        """Whether the numbers are finite; logs a skipped update, or raises."""
        if finite:
            self._skipped = 0
            if self._scaler is not None:
                self._scaler.good()
            return True
        self._skipped += 1
        overflow = self._scaler is not None and self._scaler.overflow()
        skips = self._section.nonfinite == "skip" and self._skipped <= self._section.max_skipped
        if not overflow and not skips:
            raise self._error(numbers)
        log.warning("step %d: %s: the update is skipped", numbers.step, numbers)
        return False

    def _error(self, numbers: _Numbers) -> TrainingError:
        """Names the first parameter, of any rank, and the ranks whose loss is not finite. Collective."""
        bad = {p for p, norm in zip(numbers.holders, numbers.norms, strict=True) if not norm.isfinite()}
        first = next((name for name, p in self._root.named_parameters() if p in bad), None)
        finite = bool(numbers.own_loss.isfinite())
        sample = "" if finite else self.bad_sample(numbers.step)
        gathered = collectives.all_gather_objects((first, finite, sample))
        ranks = [(rank, name) for rank, (name, *_) in enumerate(gathered) if name]
        losses = [rank for rank, (_, finite, _) in enumerate(gathered) if not finite]
        samples = [f"{sample} on rank {rank}" for rank, (*_, sample) in enumerate(gathered) if sample]
        origin = f", first in {ranks[0][1]} on {named_ranks([rank for rank, _ in ranks])}" if ranks else ""
        origin += f", from the loss of {named_ranks(losses)}" if losses else ""
        again = f" {self._skipped} times in a row" if self._skipped > 1 else ""
        lower = "a lower rate of the optimizer" if numbers.loss is None else "a lower --optim.lr"
        hint = f"{lower}, --train.clip_grad_norm 1, or --train.nonfinite skip to skip such updates"
        if samples:
            origin += f"; the data are not: {samples[0]}"
            hint = "mend that sample or leave it out, or --train.nonfinite skip to skip such updates"
        return NotFiniteError(
            f"step {numbers.step}: {numbers}{origin}: not finite{again}.",
            hint,
            ranks=tuple(losses or (rank for rank, _ in ranks)),
        )


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

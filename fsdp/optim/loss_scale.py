"""fp16's loss scale. The gradient norm is one number of all ranks, so every rank finds the same overflow."""

from __future__ import annotations

from torch import Tensor

from fsdp.optim.gradients import Gradients
from fsdp.optim.train_state import TrainState

GROWS_AFTER = 2000
LARGEST = 2.0**24


class LossScaler:
    """Halves on overflow, doubles after 2000 good steps; its numbers are in TrainState, so they resume."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    @property
    def scale(self) -> float:
        return self._state.loss_scale

    def unscale(self, gradients: Gradients, norm: Tensor) -> Tensor:
        gradients.scale(1.0 / self.scale)
        return norm / self.scale

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

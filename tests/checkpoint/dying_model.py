"""A model whose ranks kill themselves in a step, as on a machine that is lost."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from tests.support.user_code import Uneven

VARIABLE = "TEST_DIES_IN_STEP"


class Dying(Uneven):
    """Each rank ends by SIGKILL in the training step that the environment names."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == int(os.environ.get(VARIABLE, "0")) > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

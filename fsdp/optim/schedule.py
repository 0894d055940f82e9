"""The learning rate as a pure function of the step: nothing of it is saved, and a resumed run continues it.

Built-in schedules, and a function of the user (`--optim.schedule package.module:function`), which is imported
and tried before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection
from fsdp.models import load_attribute
from fsdp.models.factory import blame

TRIED = 1000
"""Steps at which a user's function is called before the run."""

Factor = Callable[[int, int, OptimSection], float]


class Schedule:
    """The rate of each optimizer step of a run of `total_steps`."""

    def __init__(self, section: OptimSection, total_steps: int) -> None:
        self._section, self._total = section, total_steps
        self._factor: Factor | None = None
        if ":" in section.schedule:
            self._factor = load_attribute(section.schedule, "--optim.schedule")
            for step in range(1, total_steps + 1, max(1, total_steps // TRIED)):
                self.lr(step)
            self.lr(max(1, total_steps))

    def lr(self, step: int) -> float:
        """The rate of step `step`, counted from 1."""
        if self._factor is None:
            return _rate(self._section, step, self._total)
        try:
            factor = self._factor(step, self._total, self._section)
        except Exception as error:
            raise ConfigError(
                f"--optim.schedule {self._section.schedule} failed at step {step}: {blame(error)}.",
                "it is called with (step, total_steps, settings)",
            ) from error
        try:
            number = float(factor)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ConfigError(
                f"--optim.schedule {self._section.schedule} returned {factor!r} at step {step} of "
                f"{self._total}, which is not a finite number from 0.",
                "return the factor of --optim.lr, such as step / total_steps",
            )
        return self._section.lr * number


def _rate(section: OptimSection, step: int, total_steps: int) -> float:
    """The built-in schedules: linear warm-up to the peak, then down to min_lr_ratio of it."""
    warmup = section.warmup_steps if section.warmup_steps >= 0 else total_steps // 20
    if step <= warmup:
        return section.lr * step / max(1, warmup)
    if section.schedule == "constant":
        return section.lr
    floor = section.min_lr_ratio
    done = _passed(warmup, step, total_steps)
    if section.schedule == "cosine":
        return section.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    if section.schedule == "wsd":
        done = _passed(max(warmup, total_steps - round(section.decay_share * total_steps)), step, total_steps)
    if section.schedule in ("linear", "wsd"):
        return section.lr * (floor + (1 - floor) * (1 - done))
    raise KeyError(section.schedule)


def _passed(start: int, step: int, end: int) -> float:
    """The part of start … end that lies before `step`, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))

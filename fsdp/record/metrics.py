"""StepMetrics, the numbers of one step, and Reporter, which passes them to a launcher.

Ray's Reporter is launch/ray_worker.py. The loop measures the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step; equal on every rank except max_mem_gib and the times."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    step_time_s: float
    data_wait_s: float = 0.0
    max_mem_gib: float = 0.0
    epoch: float | None = None
    """Epochs complete after this step, with their fraction; None for a stream."""
    extra: Mapping[str, float] = field(default_factory=dict)


class Reporter(Protocol):
    """Called on every rank after each logged step, each evaluation and each sealed checkpoint."""

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None: ...

    def should_stop(self) -> str | None:
        """The launcher's reason to stop (a preemption notice), if any. Called once a step; must not block."""
        ...


class NoReporter:
    """For a launcher that takes no reports."""

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        return None

    def should_stop(self) -> str | None:
        return None

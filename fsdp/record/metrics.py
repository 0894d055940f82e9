"""What a step says of itself, and who hears it.

StepMetrics is the record, Reporter the seam to a launcher (Ray's lives under launch/). The console, JSON
lines and TensorBoard writers of rank 0 are here; how a number is measured is the loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step, the same on every rank but for max_mem_gib and the times."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    step_time_s: float
    data_wait_s: float = 0.0
    max_mem_gib: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)


class Reporter(Protocol):
    """Called on every rank, every time: after each logged step, each evaluation and each sealed checkpoint."""

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None: ...

    def should_stop(self) -> str | None:
        """A reason to stop that only the launcher knows (a preemption notice); looked at once a step, must
        not block.
        """
        ...


class NoReporter:
    """No launcher wants to hear."""

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        return None

    def should_stop(self) -> str | None:
        return None

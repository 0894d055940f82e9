"""A plan's figures beside the run's own, collected step by step on rank 0, logged and recorded at the end.

Not here: the plan (fsdp/plan), which wrote its figures into the run's recipe.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fsdp.base.torch_private.names import OPTIMIZER_IMPORT
from fsdp.config import PlanSection
from fsdp.memory.account import process_bytes

WARM_UP = 2
"""First steps, in which kernels are compiled and memory is allocated; left out if later ones ran."""


@dataclass(frozen=True)
class Compared:
    """Figures of rank 0. A peak on CPU is the process's above its size at the start, saves included."""

    planned_peak_gib: float
    peak_gib: float
    planned_step_s: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"planned {self.planned_peak_gib:.3f} GiB and {self.planned_step_s:.4g} s a step; measured "
            f"{self.peak_gib:.3f} GiB "
            f"({self.peak_gib / self.planned_peak_gib - 1:+.1%}) and {self.step_s:.4g} s "
            f"({self.step_s / self.planned_step_s - 1:+.1%})"
        )

    def record(self) -> dict[str, float]:
        return asdict(self)


class Planned:
    """A sink of the recorder. Created before the model, while the process is idle."""

    def __init__(self, plan: PlanSection, device: str) -> None:
        self._plan = plan
        if device == "cpu":
            importlib.import_module(OPTIMIZER_IMPORT)
        self._idle = process_bytes().get("rss", 0) / 2**30 if device == "cpu" else 0.0
        self._times: list[float] = []
        self._peak = 0.0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "train/step_time_s" in values:
            self._times.append(values["train/step_time_s"])
            self._peak = max(self._peak, values["train/max_mem_gib"])

    def close(self) -> None:
        return None

    def compared(self) -> Compared | None:
        """None before any step."""
        if not self._times:
            return None
        step_s = statistics.median(self._times[WARM_UP:] or self._times)
        return Compared(
            self._plan.predicted_peak_gib, self._peak - self._idle, self._plan.predicted_step_s, step_s
        )


def maybe_planned(plan: PlanSection, device: str) -> Planned | None:
    """None for a run without a plan, or with a plan for another kind of device."""
    if not plan.predicted_step_s or not plan.predicted_peak_gib or (plan.gpu == "cpu") != (device == "cpu"):
        return None
    return Planned(plan, device)

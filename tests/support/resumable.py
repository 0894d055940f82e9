"""When a test may kill a run and still bound its loss: a checkpoint is sealed in the background, some time
after its step.
"""

from __future__ import annotations

from pathlib import Path

from fsdp.checkpoint.manifest import parse_name
from fsdp.rundir import history
from fsdp.rundir.history import RunDir


def resumable_at(run: Path, step: int, every: int) -> int:
    """The run's step, if it is `step` or later and at most an interval after the newest sealed checkpoint;
    else 0.
    """
    reached = max(
        (int(record["step"]) for record in history.read_records(RunDir(run).metrics) if "loss" in record),
        default=0,
    )
    return reached if reached >= step and reached - newest_sealed(run) <= every else 0


def newest_sealed(run: Path) -> int:
    """The step from which the next start continues; 0 without a checkpoint."""
    found = (parse_name(folder.name) for folder in (run / "checkpoints").glob("step-*"))
    return max((name.step for name in found if name is not None and name.kind == "final"), default=0)

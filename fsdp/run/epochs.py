"""Epochs of a run: the epoch after each step, the steps at which an epoch's interval ends, an imported epoch.

The epoch after a step is a fraction of whole numbers that follows from the data's order alone
(`epoch(step)` of fsdp/data/cursor.py): exact, and the same on any number of ranks and after a resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from fsdp.base.errors import ConfigError
from fsdp.checkpoint.restore import Restored
from fsdp.config import Config
from fsdp.data import Cursor, DataSet, MixCursor
from fsdp.data.stream import StreamCursor
from fsdp.optim.train_state import TrainState


def check_epochs(config: Config, data: DataSet) -> None:
    """Refuses intervals in epochs for data without a length."""
    if data.stream is None:
        return
    flags = {
        "checkpoint.every_epochs": config.checkpoint.every_epochs,
        "train.eval_every_epochs": config.train.eval_every_epochs,
    }
    for name, value in flags.items():
        if value:
            raise ConfigError(
                f"--{name} {value:g}: --data.name {config.data.name} is a stream, which has no epochs.",
                f"--{name} 0 --{name.replace('epochs', 'steps')} 100",
            )


@dataclass(frozen=True)
class Epochs:
    """The epochs of one order of samples."""

    cursor: Cursor | MixCursor | StreamCursor

    def at(self, step: int) -> float | None:
        """Epochs complete after `step`, with their fraction; None for a stream."""
        exact = self.cursor.epoch(step)
        return None if exact is None else float(exact)

    def fields(self, step: int) -> dict[str, float]:
        """The epoch as a field of a record; empty for a stream."""
        now = self.at(step)
        return {} if now is None else {"epoch": now}

    def due(self, step: int, every: float) -> bool:
        """Whether `step` is the first at which a further multiple of `every` epochs is complete."""
        if not every:
            return False
        now, before = self.cursor.epoch(step), self.cursor.epoch(step - 1)
        if now is None or before is None:
            return False
        length = Fraction(str(every))  # 0.1 as it was written, a tenth
        return math.floor(now / length) > math.floor(before / length)


def with_imported_epoch(
    restored: Restored | None, state: TrainState, cursor: Cursor | MixCursor | StreamCursor, total_steps: int
) -> Restored | None:
    """Moves `state` behind the complete epoch of another program's checkpoint, or notes why not."""
    if restored is None or restored.epoch is None:
        return restored
    begins = restored.epoch + 1
    named = f"its epoch {restored.epoch} (counted from 0)"
    if not isinstance(cursor, Cursor):
        kind = "a mixture" if isinstance(cursor, MixCursor) else "a stream"
        return _noted(restored, f"{named} is dropped: the data are {kind}; training begins at step 0")
    step = begins * cursor.steps_per_epoch
    if step >= total_steps:
        return _noted(
            restored,
            f"{named} is dropped: this run ends at step {total_steps}, within epoch "
            f"{(total_steps - 1) // cursor.steps_per_epoch}; training begins at step 0. "
            f"HINT: --train.epochs {begins + 1} to continue after it",
        )
    state.step, state.samples = step, begins * cursor.samples
    note = f"{named} is complete: epoch {begins} begins at step {step}; tokens are counted from here"
    return replace(_noted(restored, note), step=step)


def _noted(restored: Restored, note: str) -> Restored:
    return replace(restored, notes=(*restored.notes, note))

"""The last words of a run: how good it is, where it lies, and what is worth typing next."""

from __future__ import annotations

import os

from fsdp.config import Config
from fsdp.loop import Outcome


def summary(outcome: Outcome, config: Config) -> str:
    where = os.path.relpath(outcome.run_dir)
    shown = str(outcome.run_dir) if where.startswith("..") else where
    lines = []
    if outcome.evaluation is not None and outcome.evaluation.accuracy is not None:
        lines.append(f"held-out accuracy {outcome.evaluation.accuracy:.2%}  loss {outcome.evaluation.loss:.4f}")
    how = f"stopped by {outcome.stopped}" if outcome.stopped else "finished"
    lines += [f"{how} at step {outcome.step}: {shown}", "next:"]
    resume = f"python train.py --config {shown}/config.toml --run.dir {shown}"
    if outcome.stopped:
        lines.append(f"  {resume}   # goes on from here" + (" --train.stop_after 0" if config.train.stop_after else ""))
    else:
        lines.append(f"  python -m fsdp.predict {shown}")
        lines.append(f"  {resume} --train.steps {outcome.step * 2} --train.epochs 0   # trains on")
    lines.append(f"  python -m fsdp.checkpoints {shown}")
    return "\n".join(lines)

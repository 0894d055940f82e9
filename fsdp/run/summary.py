"""The closing lines of a run: its accuracy, its directory, and the commands that may follow."""

from __future__ import annotations

import os
import shlex

from fsdp.base.text import as_typed, from_here
from fsdp.config import Config
from fsdp.run.training_loop import Outcome


def summary(outcome: Outcome, config: Config, command: str) -> str:
    """`command` starts a run under the same launcher; its flags follow."""
    shown = _shown(outcome)
    if config.train.evaluate_only and not outcome.stopped:
        return _evaluated(outcome, config, shown)
    lines = []
    if outcome.evaluation is not None and outcome.evaluation.accuracy is not None:
        lines.append(
            f"held-out accuracy {outcome.evaluation.accuracy:.2%}  loss {outcome.evaluation.loss:.4f}"
        )
    how = f"stopped by {outcome.stopped}" if outcome.stopped else "finished"
    lines += [f"{how} at step {outcome.step}: {shown}", "next:"]
    run = shlex.quote(shown)
    names = (config.model.name, *config.data.names)
    named = [name for name in names if ":" in name and "://" not in name]
    target = " ".join([run, *(f"--trust-code {shlex.quote(name)}" for name in dict.fromkeys(named))])
    resume = f"{command} --config {shlex.quote(shown + '/config.toml')} --run.dir {run}"
    if outcome.stopped:
        lines.append(
            f"  {resume}{' --train.stop_after 0' if config.train.stop_after else ''}   # resumes here"
        )
    else:
        if config.checkpoint.export:
            lines.append(f"  python -m fsdp.predict {target}")
        lines.append(f"  {resume} --train.steps {outcome.step * 2} --train.epochs 0   # trains further")
    lines += [f"  python -m fsdp.report {target}", f"  python -m fsdp.checkpoint {run}"]
    return from_here(as_typed("\n".join(lines)))


def _shown(outcome: Outcome) -> str:
    """The run directory as a path that is short from here."""
    try:
        where = os.path.relpath(outcome.run_dir)
    except FileNotFoundError:  # the working directory has been removed meanwhile
        return str(outcome.run_dir)
    return str(outcome.run_dir) if where.startswith("..") else where


def _evaluated(outcome: Outcome, config: Config, shown: str) -> str:
    """The closing lines of an evaluation alone."""
    found = {} if outcome.evaluation is None else outcome.evaluation.values()
    numbers = "  ".join(f"{name} {value:.6g}" for name, value in found.items())
    source = config.checkpoint.resume if config.checkpoint.resume != "auto" else config.model.weights
    return f"evaluated step {outcome.step} of {source}: {numbers}\n{shown}/metrics.jsonl has every digit"

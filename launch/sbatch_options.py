"""Options of sbatch that launch.submit passes on: --dependency, --mail-type, --reservation, --gpus-per-task …

Their names are those of the installed `sbatch --help`; Slurm checks the values. Not here: the options that
launch.submit has itself (slurm_request.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from fsdp.base.errors import ConfigError

Options = Mapping[str, str | bool]
"""By name without dashes in front; True for an option without a value."""

_LOGS = "leave it out: the log of each rank is RUN/logs/JOBID_RANK_log.out"
_PRINTED = "leave it out: launch.submit prints the job, its run directory and its log"
REPLACED = {
    "ntasks-per-node": "--tasks-per-node {}", "job-name": "--name {}", "signal": "--signal-s 120",
    "ntasks": "--nodes 1 --tasks-per-node {}", "wait": "--follow",
    "requeue": "leave it out: jobs are requeued",
    "output": _LOGS, "error": _LOGS, "input": "leave it out: ranks read no input",
    "parsable": _PRINTED, "quiet": _PRINTED, "verbose": _PRINTED, "usage": "sbatch --usage",
    "test-only": "--dry-run", "version": "sbatch --version",
    "wrap": "slurm/fsdp.sbatch is a job script of shell: docs/slurm.md",
}  # fmt: skip
"""Options of sbatch that launch.submit sets itself, with what to type instead."""
GPUS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket")
"""Requests for GPUs that do not determine the number of ranks."""


def known() -> frozenset[str]:
    """The long options of the installed sbatch; empty if it prints none."""
    try:
        text = subprocess.run(["sbatch", "--help"], capture_output=True, text=True).stdout
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"^ +(?:-\w,? +)?--([a-z][a-z-]*)", text, re.MULTILINE))


def read(words: Sequence[str], names: frozenset[str]) -> tuple[Options, list[str]]:
    """The options among these words whose names are sbatch's, and the other words."""
    options: dict[str, str | bool] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.removeprefix("--") not in names or not name.startswith("--"):
            others.append(name + equals + value)
            continue
        if not equals and rest and not rest[0].startswith("-"):
            equals, value = "=", rest.pop(0)
        options[_checked(name.removeprefix("--"), value)] = value if equals else True
    return options, others


def _checked(name: str, value: str) -> str:
    if name in REPLACED:
        raise ConfigError(f"--{name} is set by launch.submit.", REPLACED[name].format(value or "N"))
    return name


def check_gpus(options: Options, tasks_per_node: int) -> None:
    """One rank would train on the first of several GPUs."""
    asked = [f"--{name}={value}" for name, value in options.items() if name in GPUS]
    gpus = [one for one in asked if "gpu" in one]
    if gpus and not tasks_per_node:
        raise ConfigError(
            f"{gpus[0]} does not say how many ranks a node has.",
            "--tasks-per-node 8, or --gpus-per-node 8 in its place",
        )

"""The resources of a job: nodes, GPUs and time, in Slurm's notation, as submitit's parameters.

Options of sbatch that launch.submit does not have itself pass on: --partition, --mem, --dependency …
Slurm checks their names and values. Not here: the run, whose flags are train.py's, and the submission
(submit.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp.base.errors import ConfigError, LaunchError

Options = Mapping[str, str | bool]
"""By name without dashes in front; True for an option without a value."""
REPLACED = {
    "ntasks-per-node": "--tasks-per-node 8",
    "ntasks": "--tasks-per-node 8",
    "job-name": "--name NAME",
    "signal": "--signal-s 120",
    "wait": "--follow",
    "test-only": "--dry-run",
    **dict.fromkeys(("output", "error"), "leave it out: the log of each rank is RUN/logs/JOBID_RANK_log.out"),
    "wrap": "slurm/fsdp.sbatch is a job script of shell: docs/slurm.md",
}
"""Options of sbatch that launch.submit sets itself, with what to type instead."""
GPUS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket")
"""Requests for GPUs that do not determine the number of ranks."""


def flag(default: int | str, help: str) -> Any:
    """A field with its text for --help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Request:
    """The resources of a job. Zero and empty mean the cluster's own default."""

    nodes: int = flag(1, "number of nodes")
    gpus_per_node: str = flag("", "GPUs per node, as 8, or as TYPE:8 where nodes have several types")
    tasks_per_node: int = flag(0, "ranks per node; 0 means one per GPU, or one")
    time: str = flag("1:00:00", "time limit in Slurm's notation; the job is requeued until the run is done")
    name: str = flag("shardrun", "job name")
    signal_s: int = flag(
        120,
        "seconds before the time limit at which the ranks receive a signal; more than a step and a save take",
    )
    array_parallelism: int = flag(0, "jobs of an array that run at a time; 0 means all")
    cluster: str = flag("slurm", "slurm, local (this machine, the same way), or debug (this process)")
    sbatch: Options = field(default_factory=dict)
    """Further options of sbatch, as typed."""

    @property
    def gpus(self) -> int:
        """GPUs per node, without their type."""
        return int(self.gpus_per_node.rpartition(":")[2] or 0)

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus or 1

    def parameters(self) -> dict[str, Any]:
        """The parameters of submitit's AutoExecutor."""
        common = {
            "name": self.name,
            "timeout_min": minutes(self.time),
            "nodes": self.nodes,
            "tasks_per_node": self.ranks_per_node,
            "gpus_per_node": self.gpus or None,
            "stderr_to_stdout": True,
        }
        typed = {"gpus_per_node": self.gpus_per_node} if ":" in self.gpus_per_node else {}
        requeue = {} if "no-requeue" in self.sbatch else {"requeue": True}
        slurm = {
            "slurm_signal_delay_s": self.signal_s,
            "slurm_array_parallelism": self.array_parallelism or None,
            "slurm_additional_parameters": {**requeue, **typed, **self.sbatch},
        }
        return {name: value for name, value in {**common, **slurm}.items() if value is not None}


def minutes(text: str) -> int:
    """Minutes of a time in Slurm's notation; 0 sets no limit.

    minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ConfigError(
            f"--time {text} is not a time.", "--time 4:00:00, --time 90 (minutes), or --time 1-12"
        )
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    leading = 0 if dash or len(parts) == 3 else 1  # without days, one or two numbers start with the minutes
    units = (3600, 60, 1)[leading : leading + len(parts)]
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=True))
    return -(-seconds // 60)


def check(request: Request) -> None:
    """Check what needs neither submitit nor sbatch."""
    if request.cluster not in ("slurm", "local", "debug"):
        raise ConfigError(f"--cluster {request.cluster} is not slurm, local or debug.", "--cluster slurm")
    if not re.fullmatch(r"([\w.-]+:)?\d+|", request.gpus_per_node):
        raise ConfigError(
            f"--gpus-per-node {request.gpus_per_node} is not a number of GPUs, or TYPE:NUMBER.",
            "--gpus-per-node 8",
        )
    elsewhere, limit = request.cluster != "slurm", minutes(request.time)
    if elsewhere and (request.sbatch or request.nodes > 1 or not limit):
        others = [f"--{name}" for name in request.sbatch]
        no_limit = [f"--time {request.time}"] * (not limit)
        name = (others or no_limit or [f"--nodes {request.nodes}"])[0]
        raise ConfigError(f"{name} is for Slurm, and not for --cluster {request.cluster}.", "--cluster slurm")
    if request.cluster == "debug" and request.ranks_per_node > 1:
        raise ConfigError(f"--cluster debug is one rank, not {request.ranks_per_node}.", "--cluster local")
    if not elsewhere and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "--cluster local runs it on this machine")
    for name, value in request.sbatch.items():
        if name in REPLACED:
            raise ConfigError(f"--{name} is set by launch.submit.", REPLACED[name])
        # one rank would train on the first of several GPUs
        if name in GPUS and "gpu" in f"{name}={value}" and not request.tasks_per_node:
            hint = "--tasks-per-node 8, or --gpus-per-node 8 in its place"
            raise ConfigError(f"--{name}={value} does not say how many ranks a node has.", hint)


def read_options(words: Sequence[str]) -> Options:
    """Options of sbatch, with and without values. A flag of train.py, or another word, is an error."""
    options: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name == "config" or "." in name:
            raise ConfigError(f"{word} is no option of sbatch.", f"train.py's flags follow `--`: -- {word} …")
        if not equals and rest and not rest[0].startswith("-"):
            equals, value = "=", rest.pop(0)
        options[name] = value if equals else True
    return options

"""The resources of a job: nodes, GPUs, time and memory, in Slurm's notation, as submitit's parameters.

Not here: the run itself, whose flags are train.py's, and the submission (submit.py).
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass, field
from typing import Any

from fsdp.base.errors import ConfigError, LaunchError
from launch.sbatch_options import Options, check_gpus

LONGEST_S = 2**31 - 1
"""The seconds of Slurm's longest time limit."""


def flag(default: int | str, help: str) -> Any:
    """A field with its text for --help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Request:
    """The resources of a job. Zero and empty mean the cluster's own default."""

    nodes: int = flag(1, "number of nodes")
    gpus_per_node: str = flag("", "GPUs per node, as 8, or as TYPE:8 where nodes have several types")
    tasks_per_node: int = flag(0, "ranks per node; 0 means one per GPU, or one")
    cpus_per_task: int = flag(0, "CPUs per rank")
    time: str = flag("1:00:00", "time limit in Slurm's notation; the job is requeued until the run is done")
    mem: str = flag("", "memory per node, e.g. 64G")
    partition: str = flag("", "Slurm partition")
    account: str = flag("", "Slurm account")
    qos: str = flag("", "quality of service")
    constraint: str = flag("", "required node features")
    exclude: str = flag("", "nodes to exclude")
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
            "cpus_per_task": self.cpus_per_task or None,
            "mem_gb": gibibytes(self.mem) if self.mem else None,
            "stderr_to_stdout": True,
        }
        names = ("partition", "account", "qos", "constraint", "exclude")
        slurm = {f"slurm_{name}": getattr(self, name) or None for name in names}
        slurm |= {
            "slurm_signal_delay_s": self.signal_s,
            "slurm_array_parallelism": self.array_parallelism or None,
            "slurm_additional_parameters": self._further(),
        }
        return {name: value for name, value in {**common, **slurm}.items() if value is not None}

    def _further(self) -> Options:
        typed = {"gpus_per_node": self.gpus_per_node} if ":" in self.gpus_per_node else {}
        requeue = {} if "no-requeue" in self.sbatch else {"requeue": True}
        return {**requeue, **typed, **self.sbatch}


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
    if seconds > LONGEST_S:
        longest = LONGEST_S // 86400
        raise ConfigError(
            f"--time {text} is longer than {longest} days, the longest that Slurm counts.", "--time 1-0"
        )
    return -(-seconds // 60)


def gibibytes(text: str) -> float:
    """GiB of an amount of memory in Slurm's notation: 64G, 512M, 1T; a bare number is megabytes."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if found is None:
        raise ConfigError(f"--mem {text} is not an amount of memory.", "--mem 64G")
    return int(found[1]) * {"K": 2.0**-20, "M": 2.0**-10, "": 2.0**-10, "G": 1.0, "T": 1024.0}[found[2]]


def check(request: Request) -> None:
    """Check what needs neither submitit nor sbatch."""
    if request.cluster not in ("slurm", "local", "debug"):
        raise ConfigError(f"--cluster {request.cluster} is not slurm, local or debug.", "--cluster slurm")
    for name in (
        "nodes",
        "tasks_per_node",
        "cpus_per_task",
        "signal_s",
        "array_parallelism",
    ):
        if getattr(request, name) < (name == "nodes"):
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(request, name)} is too few.",
                f"--{name.replace('_', '-')} 1",
            )
    if not re.fullmatch(r"([\w.-]+:)?\d+|", request.gpus_per_node):
        raise ConfigError(
            f"--gpus-per-node {request.gpus_per_node} is not a number of GPUs, or TYPE:NUMBER.",
            "--gpus-per-node 8",
        )
    if request.cluster != "slurm" and minutes(request.time) == 0:
        raise ConfigError(
            f"--time {request.time} is no limit, which --cluster {request.cluster} needs.", "--time 1-0"
        )
    request.parameters()
    check_gpus(request.sbatch, request.tasks_per_node)
    if request.cluster == "slurm" and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "--cluster local runs it on this machine")
    if request.cluster != "slurm" and request.nodes > 1:
        raise ConfigError(
            f"--cluster {request.cluster} is one node, not --nodes {request.nodes}.", "--nodes 1"
        )
    if request.cluster == "debug" and request.ranks_per_node > 1:
        raise ConfigError(f"--cluster debug is one rank, not {request.ranks_per_node}.", "--cluster local")

"""What is asked of the cluster: nodes, GPUs, time, memory; written as Slurm writes them, checked, named as
submitit names them.

Not here: the run itself, whose flags are train.py's, and the submission (submit.py).
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass
from typing import Any

from fsdp.base.errors import ConfigError, LaunchError


def ask(default: int | str, help: str) -> Any:
    """A field with its help: --help shows it."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the cluster; nothing about the run. Zero and empty leave a thing to the cluster's own
    default.
    """

    nodes: int = ask(1, "nodes")
    gpus_per_node: int = ask(0, "GPUs that each node gives")
    tasks_per_node: int = ask(0, "ranks a node; 0 is one a GPU, or one")
    cpus_per_task: int = ask(0, "CPUs a rank")
    time: str = ask("1:00:00", "time limit as Slurm writes it; the job is requeued until the run is done")
    mem: str = ask("", "memory a node, e.g. 64G")
    partition: str = ask("", "where to run")
    account: str = ask("", "who pays")
    qos: str = ask("", "quality of service")
    constraint: str = ask("", "features that the nodes must have")
    exclude: str = ask("", "nodes to leave out")
    name: str = ask("shardrun", "the job's name")
    signal_s: int = ask(
        120, "seconds before the limit at which the ranks are told; more than a step and a save take"
    )
    cluster: str = ask("slurm", "slurm, local (this machine, the same way), or debug (this process)")

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    def parameters(self) -> dict[str, Any]:
        """As submitit's AutoExecutor names them."""
        common = {
            "name": self.name,
            "timeout_min": minutes(self.time),
            "nodes": self.nodes,
            "tasks_per_node": self.ranks_per_node,
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus_per_task or None,
            "mem_gb": gibibytes(self.mem) if self.mem else None,
            "stderr_to_stdout": True,
        }
        names = ("partition", "account", "qos", "constraint", "exclude")
        slurm = {f"slurm_{name}": getattr(self, name) or None for name in names}
        slurm["slurm_signal_delay_s"] = self.signal_s
        return {name: value for name, value in {**common, **slurm}.items() if value is not None}


def minutes(text: str) -> int:
    """Slurm's ways to write a time: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours[:minutes[:seconds]].
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ConfigError(
            f"--time {text} is not a time.", "--time 4:00:00, --time 90 (minutes), or --time 1-12"
        )
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    leading = 0 if dash or len(parts) == 3 else 1  # without days, one or two numbers begin with the minutes
    units = (3600, 60, 1)[leading : leading + len(parts)]
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=True))
    return max(1, -(-seconds // 60))


def gibibytes(text: str) -> float:
    """Slurm's ways to write an amount of memory: 64G, 512M, 1T; a bare number is megabytes."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if found is None:
        raise ConfigError(f"--mem {text} is not an amount of memory.", "--mem 64G")
    return int(found[1]) * {"K": 2.0**-20, "M": 2.0**-10, "": 2.0**-10, "G": 1.0, "T": 1024.0}[found[2]]


def check(request: Request) -> None:
    """What can be said before submitit or sbatch are asked."""
    if request.cluster not in ("slurm", "local", "debug"):
        raise ConfigError(f"--cluster {request.cluster} is not slurm, local or debug.", "--cluster slurm")
    for name in ("nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "signal_s"):
        if getattr(request, name) < (name == "nodes"):
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(request, name)} is too few.",
                f"--{name.replace('_', '-')} 1",
            )
    request.parameters()
    if request.cluster == "slurm" and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "--cluster local runs it on this machine")
    if request.cluster != "slurm" and request.nodes > 1:
        raise ConfigError(
            f"--cluster {request.cluster} is one node, not --nodes {request.nodes}.", "--nodes 1"
        )
    if request.cluster == "debug" and request.ranks_per_node > 1:
        raise ConfigError(f"--cluster debug is one rank, not {request.ranks_per_node}.", "--cluster local")

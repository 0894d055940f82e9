"""The workers' resources, checked against those of the connected Ray before its own time-out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.base.text import counted
from fsdp.config import RaySection, worker_range
from launch.ray_cluster import await_nodes
from launch.ray_settings import threads_of


@dataclass(frozen=True)
class Workers:
    """The number of workers, and the resources of each."""

    low: int
    high: int
    cpus: float
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        """Those of one worker, as Ray names them."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    @property
    def backend(self) -> str:
        """Of the process group that Ray creates."""
        return "cpu:gloo,cuda:nccl" if self.gpus else "cpu:gloo"

    @property
    def threads(self) -> str:
        """1, as torchrun sets it, unless the variable is set or a worker has several CPUs."""
        return str(threads_of(os.environ.get("OMP_NUM_THREADS", "")) or max(1, int(self.cpus)))

    def __str__(self) -> str:
        count = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"{count} workers × {_amounts(self.cpus, self.gpus)}"


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def workers_for(section: RaySection, device: str) -> Workers:
    """The workers of the flags; LaunchError if the connected Ray has no room for them."""
    import ray

    await_nodes()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    low, high = worker_range(section.num_workers)
    gpus = 0.0 if device == "cpu" else _gpus(section.gpus_per_worker, nodes)
    if device == "cuda" and not gpus:
        raise LaunchError(
            "--run.device cuda, but the workers request no GPU of this Ray.", "--ray.gpus_per_worker 1"
        )
    places = sum(_places(node, section.cpus_per_worker, gpus) for node in nodes)
    if places < low:
        has = ", ".join(_amounts(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        raise LaunchError(
            f"{Workers(low, high, section.cpus_per_worker, gpus)} do not fit on "
            f"{counted(len(nodes), 'node')} of {has}: "
            f"room for {places}.",
            _room_hint(section, nodes, places, low, gpus),
        )
    return Workers(low, high, section.cpus_per_worker, gpus)


def _room_hint(section: RaySection, nodes: list[dict[str, float]], places: int, low: int, gpus: float) -> str:
    if section.address or gpus:
        few = "--ray.cpus_per_worker 0.5, or a larger cluster"
        return f"--ray.num_workers {places}, or add nodes" if places else few
    share = math.floor(1e4 * nodes[0].get("CPU", 0) / low) / 1e4
    return (f"--ray.num_workers {places}, or " if places else "") + f"--ray.cpus_per_worker {share:g}"


def _gpus(requested: str, nodes: list[dict[str, float]]) -> float:
    if requested == "auto":
        return 1.0 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
    if float(requested) > 0 and not any(node.get("GPU", 0) for node in nodes):
        raise ConfigError(
            f"--ray.gpus_per_worker {requested}, but no node of this Ray has a GPU.",
            "--ray.gpus_per_worker 0",
        )
    return float(requested)


def _places(node: Mapping[str, float], cpus: float, gpus: float) -> int:
    """Workers that fit on one node. Resources in use by others count as free: they may be released."""
    by_cpu = int(node.get("CPU", 0) / cpus + 1e-9)
    return min(by_cpu, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu

"""What the workers ask for, against what the Ray that is connected has: said at once, not after Ray's own
time-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config import RaySection, worker_range
from launch.ray_cluster import await_nodes


@dataclass(frozen=True)
class Workers:
    """How many, and what each asks of the cluster."""

    low: int
    high: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        count = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"{count} workers × {_amounts(self.cpus, self.gpus)}"


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def workers_for(section: RaySection, device: str) -> Workers:
    """What the flags ask of the Ray that is connected, or LaunchError with what it has."""
    import ray

    await_nodes()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    low, high = worker_range(section.num_workers)
    gpus = 0.0 if device == "cpu" else _gpus(section.gpus_per_worker, nodes)
    if device == "cuda" and not gpus:
        raise LaunchError(
            "--run.device cuda, but the workers ask this Ray for no GPU.", "--ray.gpus_per_worker 1"
        )
    places = sum(_places(node, section.cpus_per_worker, gpus) for node in nodes)
    if places < low:
        has = ", ".join(_amounts(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        flags = f"--ray.num_workers {places}" if places else "--ray.cpus_per_worker 0.5"
        raise LaunchError(
            f"{Workers(low, high, section.cpus_per_worker, gpus)} do not fit on {len(nodes)} node{'s' * (len(nodes) != 1)} "
            f"of {has}: room for {places}.",
            f"{flags}, or add nodes" if places else f"{flags}, or a larger cluster",
        )
    return Workers(low, high, section.cpus_per_worker, gpus)


def _gpus(asked: str, nodes: list[dict[str, float]]) -> float:
    if asked == "auto":
        return 1.0 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
    if float(asked) > 0 and not any(node.get("GPU", 0) for node in nodes):
        raise ConfigError(
            f"--ray.gpus_per_worker {asked}, but no node of this Ray has a GPU.", "--ray.gpus_per_worker 0"
        )
    return float(asked)


def _places(node: Mapping[str, float], cpus: float, gpus: float) -> int:
    """Workers that fit on one node; what others hold at the moment counts as free, for it may be given back."""
    by_cpu = int(node.get("CPU", 0) / cpus + 1e-9)
    return min(by_cpu, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu

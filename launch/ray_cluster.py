"""The Ray to train on, once it runs: connecting, the workers' resources, their code.

It is a local one (ray_own.py), or a cluster that is joined and left as it was.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError, LaunchError, first_line
from fsdp.base.text import counted
from fsdp.config import Config, RaySection, worker_range
from fsdp.config.trust import named_code
from launch.ray_own import OwnRay, threads_of

REPOSITORY = Path(__file__).resolve().parent.parent
CONNECT_S = 5.0
NODES = "SHARDRUN_RAY_NODES"
"""Set by a job script that starts the cluster: the number of nodes to wait for."""
NODES_S, POLL_S = 120.0, 0.2
RESIZE_S = 10.0
"""How often an elastic run checks whether it can grow; growing costs the steps since the last checkpoint."""


@contextmanager
def connected(own: OwnRay | None, config: Config) -> Iterator[str]:
    """Connect to the local Ray or the one at --ray.address for this block. Yields its version and address."""
    address = own.wait() if own is not None else config.ray.address
    import ray

    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="shardrun-code-") as folder:
        _join(address, {} if own is not None else code_of(config, Path(folder)))
        try:
            yield f"Ray {ray.__version__}{', started here' if own is not None else f' at {address}'}"
        finally:
            ray.shutdown()


def _join(address: str, runtime_env: Mapping[str, Any]) -> None:
    import ray

    _wait_for_port(address, time.monotonic() + (NODES_S if NODES in os.environ else 0))
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=dict(runtime_env)
        )
    except ImportError as error:
        raise LaunchError(
            f"--ray.address {address}: {first_line(error)}.", 'pip install "ray[client]" for ray:// addresses'
        ) from None
    except (ray.exceptions.AuthenticationError, OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"--ray.address {address}: no Ray there accepts this driver ({first_line(error)}).",
            "a Ray that found ~/.ray/auth_token when it started demands that token: "
            "export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if the token is not in this machine's file; "
            "or ray start --head there first",
        ) from None


def _wait_for_port(address: str, until: float) -> None:
    """Fail early if nothing listens there: Ray itself retries for more than a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    while host and port.isdigit():
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"--ray.address {address}: no Ray answers there ({first_line(error)}).",
                    "ray start --head on that machine first, or leave --ray.address out to start one here",
                ) from None
            time.sleep(POLL_S)


# ---------------------------------------------------------------- the code


def code_of(config: Config, folder: Path) -> dict[str, Any]:
    """A runtime_env with a folder of this code and the user's modules, which Ray copies to every node. A
    local Ray shares this process's sys.path; packages installed with pip must be on the nodes.
    """
    for package in ("fsdp", "launch"):
        _copy_tree(REPOSITORY / package, folder / package)
    for name in named_code(config):
        _copy_module(name.partition(":")[0].partition(".")[0], folder)
    return {"working_dir": str(folder)}


def _copy_module(module: str, folder: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec(module)
    if spec is None or (folder / module).exists():
        return
    for source in map(Path, spec.submodule_search_locations or ([spec.origin] if spec.origin else [])):
        if "site-packages" not in source.parts and source.is_dir():
            _copy_tree(source, folder / module)
        elif "site-packages" not in source.parts and source.suffix == ".py":
            shutil.copy(source, folder)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


# ---------------------------------------------------------------- the resources


@dataclass(frozen=True)
class Workers:
    """The number of workers, and the resources of each."""

    low: int
    high: int
    cpus: float
    gpus: float

    @property
    def environment(self) -> dict[str, str]:
        """1 thread, as torchrun sets it, unless the variable is set or a worker has several CPUs."""
        threads = threads_of(os.environ.get("OMP_NUM_THREADS", "")) or max(1, int(self.cpus))
        return {"OMP_NUM_THREADS": str(threads)}

    def configs(self, timeout_s: int) -> dict[str, Any]:
        """Arguments of a TorchTrainer: the process group that Ray creates, and the resources."""
        import ray.train.torch

        api: Any = ray.train  # its exports depend on an environment variable, which a type checker ignores
        return {
            "torch_config": api.torch.TorchConfig(
                "cpu:gloo,cuda:nccl" if self.gpus else "cpu:gloo", timeout_s=timeout_s
            ),
            "scaling_config": api.ScalingConfig(
                num_workers=self.low if self.low == self.high else (self.low, self.high),
                use_gpu=self.gpus > 0,
                resources_per_worker={"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})},
                elastic_resize_monitor_interval_s=RESIZE_S,
            ),
        }

    def __str__(self) -> str:
        count = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"{count} workers × {_amounts(self.cpus, self.gpus)}"


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


def workers_for(section: RaySection, device: str) -> Workers:
    """The workers of the flags; LaunchError if the connected Ray has no room for them."""
    nodes = _nodes()
    low, high = worker_range(section.num_workers)
    gpus = 0.0 if device == "cpu" else _gpus(section.gpus_per_worker, nodes)
    if device == "cuda" and not gpus:
        raise LaunchError(
            "--run.device cuda, but the workers request no GPU of this Ray.", "--ray.gpus_per_worker 1"
        )
    workers = Workers(low, high, section.cpus_per_worker, gpus)
    room = sum(_room(node, section.cpus_per_worker, gpus) for node in nodes)
    if room < low:
        has = ", ".join(_amounts(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        hints = [f"--ray.num_workers {room}"] if room else []
        if section.address or gpus:
            hints.append("add nodes" if room else "--ray.cpus_per_worker 0.5, or a larger cluster")
        else:
            share = math.floor(1e4 * nodes[0].get("CPU", 0) / low) / 1e4
            hints.append(f"--ray.cpus_per_worker {share:g}")
        raise LaunchError(
            f"{workers} do not fit on {counted(len(nodes), 'node')} of {has}: room for {room}.",
            ", or ".join(hints),
        )
    return workers


def _nodes() -> list[dict[str, float]]:
    """The resources of each node. Waits for those of a cluster that a job script starts."""
    import ray

    expected, deadline = int(os.environ.get(NODES, "1")), time.monotonic() + NODES_S
    while len(nodes := [node["Resources"] for node in ray.nodes() if node["Alive"]]) < expected:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{len(nodes)} of {expected} Ray nodes are up after {NODES_S:.0f} s.",
                "read the output of `ray start` on the other nodes",
            )
        time.sleep(POLL_S)
    return nodes


def _gpus(requested: str, nodes: list[dict[str, float]]) -> float:
    if requested == "auto":
        return 1.0 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
    if float(requested) > 0 and not any(node.get("GPU", 0) for node in nodes):
        raise ConfigError(
            f"--ray.gpus_per_worker {requested}, but no node of this Ray has a GPU.",
            "--ray.gpus_per_worker 0",
        )
    return float(requested)


def _room(node: Mapping[str, float], cpus: float, gpus: float) -> int:
    """Workers that fit on one node. Resources in use by others count as free: they may be released."""
    by_cpu = int(node.get("CPU", 0) / cpus + 1e-9)
    return min(by_cpu, int(node.get("GPU", 0) / gpus + 1e-9)) if gpus else by_cpu

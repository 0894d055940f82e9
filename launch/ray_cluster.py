"""The Ray to train on: a local one (ray_own.py), or a cluster that is joined and left as it was.

Not here: the workers' resources (ray_resources.py) and their code (ray_code_upload.py).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdp.base.errors import LaunchError, first_line
from fsdp.config import RaySection
from launch.ray_own import OwnRay
from launch.ray_settings import set_log_levels

CONNECT_S = 5.0
NODES = "SHARDRUN_RAY_NODES"
"""Set by a job script that starts the cluster: the number of nodes to wait for."""
NODES_S, POLL_S = 120.0, 0.2


@contextmanager
def connected(own: OwnRay | None, section: RaySection, runtime_env: Mapping[str, Any]) -> Iterator[str]:
    """Connect to the local Ray or the one at --ray.address for this block. Yields its version and address."""
    address = own.wait() if own is not None else section.address
    import ray

    set_log_levels()
    _join(address, runtime_env)
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


def await_nodes() -> None:
    """Wait for the nodes of a cluster that a job script starts."""
    import ray

    expected, deadline = int(os.environ.get(NODES, "1")), time.monotonic() + NODES_S
    while (there := sum(node["Alive"] for node in ray.nodes())) < expected:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{there} of {expected} Ray nodes are up after {NODES_S:.0f} s.",
                "read the output of `ray start` on the other nodes",
            )
        time.sleep(POLL_S)

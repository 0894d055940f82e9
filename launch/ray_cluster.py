"""The Ray to train on: this machine's own (ray_own.py), or a cluster that is joined and left as it was.

Not here: whether the workers find room on it (ray_room.py), and what code they find there (ray_code.py).
Nothing here knows what is trained.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdp.base.errors import LaunchError
from fsdp.config import RaySection
from launch.ray_own import OwnRay
from launch.ray_settings import hush

KNOCK_S = 5.0
NODES, NODES_S, LOOK_S = "SHARDRUN_RAY_NODES", 120.0, 0.2


@contextmanager
def connected(own: OwnRay | None, section: RaySection, runtime_env: Mapping[str, Any]) -> Iterator[str]:
    """Ray, until the end of the block: the one that was begun here, or the one at --ray.address. Yields what
    to call it.
    """
    if own is not None:
        yield own.wait()
        return
    import ray

    hush()
    _join(section.address, runtime_env)
    try:
        yield f"Ray {ray.__version__} at {section.address}"
    finally:
        ray.shutdown()


def _join(address: str, runtime_env: Mapping[str, Any]) -> None:
    import ray

    try:
        _knock(address, time.monotonic() + (NODES_S if NODES in os.environ else 0))
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=dict(runtime_env)
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"--ray.address {address}: no Ray answers there ({str(error).splitlines()[0]}).",
            "ray start --head on that machine first, or leave --ray.address out to start one here",
        ) from None


def _knock(address: str, until: float) -> None:
    """Ray itself tries for a minute and more where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    while host and port.isdigit():
        try:
            return socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_S)


def await_nodes() -> None:
    """A job script that brings the cluster up beside us says how many nodes are on their way."""
    import ray

    wanted, until = int(os.environ.get(NODES, "1")), time.monotonic() + NODES_S
    while (there := sum(node["Alive"] for node in ray.nodes())) < wanted:
        if time.monotonic() > until:
            raise LaunchError(
                f"{there} of {wanted} Ray nodes are up after {NODES_S:.0f} s.",
                "see what `ray start` said on the others",
            )
        time.sleep(LOOK_S)

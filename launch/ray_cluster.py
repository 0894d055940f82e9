"""A Ray to train on: one of this machine's own, started and ended here, or a cluster that is joined and left as it was.

Not here: whether the workers find room on it (ray_room.py), and what code they find there (ray_code.py). Nothing here knows
what is trained.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp.config import RaySection
from fsdp.errors import LaunchError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new way, chosen, so that Ray does not warn of the old
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # ranks write to files of their own: launch/ray_output.py
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # which would say each report there
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags mean what they mean where they were typed
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # how soon a dead worker is seen; one report is taken at each look
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}
"""Said to Ray before it is imported, where the person has not said otherwise."""

LEAN = {"prestart_worker_first_driver": False}  # idle Python processes, one a core, that no worker of ours comes from
STORE_BYTES = 128 << 20
"""Nothing of ours goes through Ray's object store: far below its default of a third of the memory."""
KNOCK_S = 5.0
NODES, NODES_S, LOOK_S = "SHARDRUN_RAY_NODES", 120.0, 0.2
HELD = "shardrun-driver"
LONGEST_TMP = 40
"""A Unix socket's path has at most 107 characters, and Ray puts 65 behind this folder."""


def quiet() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class OwnRay:
    """This machine's own Ray, coming up on a thread while the driver imports torch and checks flags: both take seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: BaseException | None = None
        self._up, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._come_up, name="ray-init", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Until it is up; what to call it."""
        self._up.wait()
        if self._error is not None:
            raise self._error
        import ray

        return f"Ray {ray.__version__}, started here"

    def end(self) -> None:
        self._up.wait()
        import ray

        ray.shutdown()
        self._over.set()
        self._thread.join()

    def _come_up(self) -> None:
        try:
            import ray

            _hush()
            ray.init(
                address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                _temp_dir=str(self._folder), _node_ip_address="127.0.0.1", object_store_memory=STORE_BYTES,
                _system_config=LEAN,
            )  # fmt: skip
        except BaseException as error:
            self._error = error
        self._up.set()
        self._over.wait()  # Ray's processes are told to end with the thread that started them


@contextmanager
def own_ray(section: RaySection) -> Iterator[OwnRay | None]:
    """Begins a Ray here unless one is to be joined; gone at the end of the block."""
    quiet()
    if section.address:
        yield None
        return
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody takes this machine's nodes away
    with _own_folder(Path(_short_tmp())) as folder:
        own = OwnRay(folder)
        try:
            yield own
        finally:
            own.end()


@contextmanager
def connected(own: OwnRay | None, section: RaySection, runtime_env: Mapping[str, Any]) -> Iterator[str]:
    """Ray, until the end of the block: the one that was begun here, or the one at --ray.address. Yields what to call it."""
    if own is not None:
        yield own.wait()
        return
    import ray

    _hush()
    _join(section.address, runtime_env)
    try:
        yield f"Ray {ray.__version__} at {section.address}"
    finally:
        ray.shutdown()


def _hush() -> None:
    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _join(address: str, runtime_env: Mapping[str, Any]) -> None:
    import ray

    try:
        _knock(address, time.monotonic() + (NODES_S if NODES in os.environ else 0))
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=dict(runtime_env))
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
                f"{there} of {wanted} Ray nodes are up after {NODES_S:.0f} s.", "see what `ray start` said on the others"
            )
        time.sleep(LOOK_S)


@contextmanager
def _own_folder(tmp: Path) -> Iterator[Path]:
    """For Ray's sockets and logs. A lock says that its driver lives: the folders of those that were killed are removed."""
    for other in tmp.glob(f"ray-*/{HELD}"):
        with contextlib.suppress(OSError), other.open() as lock:  # gone meanwhile, held, or somebody else's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other.parent)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=tmp))
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").rename(folder / HELD)  # only now, held, has it the name that others look for
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still be writing


def _short_tmp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_TMP else "/tmp"

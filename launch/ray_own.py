"""What comes before Ray is imported: its variables and flags; a local Ray for one run.

The local Ray starts during the driver's imports, ends with the driver, and its folder is removed. A failed
start is retried once, with a message: its cause is often temporary, such as a port that another process took.
After a second failure the folder with its logs stays until the next start. Not here: a joined cluster
(ray_cluster.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, LaunchError
from fsdp.base.phases import SIGNALS
from fsdp.config import Config, RaySection, worker_range
from fsdp.dist.mesh import plan_batch, resolve

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, so that Ray does not warn of the old one
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # each rank writes its own files: Follower
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it would log each report
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags stay relative to the driver's folder
    # the interval in which a dead worker is detected and one report is read
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_worker_niceness": "0",  # as torchrun's ranks; at Ray's 15 other work of the machine starves training
    # `ray job submit --working-dir` has a folder for the workers too: they get that of ray_cluster.py
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}
"""Defaults; a variable that is set already is kept."""
OWN = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a local Ray has no preemption
    # Without a token Ray leaves one in ~/.ray/auth_token, and each later `ray start --head` demands it.
    "RAY_AUTH_MODE": "token",
}
"""Defaults of a local Ray."""
VARIABLES = {"RAY_prestart_worker_first_driver": "0"}
"""No idle Python processes, one per core, which no worker here uses."""
STORE_BYTES = 128 << 20
"""Nothing here uses Ray's object store: far below its default of a third of the memory."""
STARTS = 2
HELD = "shardrun-driver"
LOG = "start.log"
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
LONGEST_TMP = 40
"""A Unix socket's path has at most 107 characters, and Ray appends 65 to this folder."""


# ---------------------------------------------------------------- variables and flags


def set_defaults() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def with_address(config: Config) -> Config:
    """The address as ray.init finds it: --ray.address, else RAY_ADDRESS. Empty for a Ray of one's own."""
    if config.ray.address.startswith("http"):
        raise ConfigError(
            f"--ray.address {config.ray.address} is the address of Ray's dashboard, which starts jobs.",
            "--ray.address HEAD:6379, or ray job submit -- python train.py --backend ray",
        )
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    # http://… is the address of `ray job submit`
    is_own = address == "local" or address.startswith("http")
    return configuration.replace(config, ray__address="" if is_own else address)


def threads_of(variable: str) -> int | None:
    """The number in OMP_NUM_THREADS: of a list for nested regions, such as 4,2, the first. None if none."""
    first = variable.partition(",")[0].strip()
    return (int(first) or None) if first.isdecimal() else None


def check_ranks(config: Config) -> None:
    """Raises ConfigError; an elastic run may have any number of ranks in its range."""
    low, high = worker_range(config.ray.num_workers)
    for ranks in range(low, high + 1):
        resolve(config.mesh, ranks)
        plan_batch(config.train, ranks)


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--backend ray needs Ray, which is not installed.", "pip install 'ray[train]'")


def refuse_ray(config: Config, launcher: str) -> None:
    """Raises ConfigError for --backend ray behind a launcher that starts the ranks itself."""
    if config.backend == "ray":
        raise ConfigError(
            f"--backend ray starts the ranks, and so does {launcher}.",
            "--backend torchrun, or python train.py --backend ray with nothing in front",
        )


# ---------------------------------------------------------------- a local Ray


class OwnRay:
    """`ray start` in a session of its own: a signal to the driver's process group (a terminal's Ctrl-C,
    `timeout`) reaches the driver alone. It starts while the driver imports torch: both take seconds.
    """

    failed = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def wait(self) -> str:
        """The address of this Ray, once it has started."""
        starts, address = 1, self._folder / "ray_current_cluster"
        while not address.exists() or not (text := address.read_text()):
            if self._process.poll() is None:
                time.sleep(POLL_S)
                continue
            lines = (self._folder / LOG).read_text(errors="replace").split("\n")
            printed = (line.strip().rstrip(".") for line in reversed(lines) if line.strip())
            reason = f"Ray did not start here{f', {STARTS} times' * (starts == STARTS)}: "
            reason += next(printed, "it printed nothing")
            if starts == STARTS:
                self.failed = True
                raise LaunchError(
                    f"{reason}.",
                    "allow more open files (`ulimit -n`), memory or processor time; "
                    f"its logs are in {self._folder} until the next start",
                )
            print(f"{reason}. Starting it again.", file=sys.stderr, flush=True)
            starts += 1
            self._start()
        return text

    def end(self) -> None:
        # SIGTERM would drain the node first; Ray's agents outlive their parents
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        prctl = ctypes.CDLL(None).prctl

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with (self._folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
                    *("start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1"),
                    *(f"--temp-dir={self._folder}", "--include-dashboard=false", "--log-color=false"),
                    f"--object-store-memory={STORE_BYTES}",
                ],
                env={**os.environ, **VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec,
            )


@contextmanager
def own_ray(section: RaySection) -> Iterator[OwnRay | None]:
    """Start a Ray here unless --ray.address names one; stop it at the end of the block. Its folder has Ray's
    sockets and logs, and is locked while its driver is alive.
    """
    set_defaults()
    if section.address:
        yield None
        return
    for name, value in OWN.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    tmp = _short_tmp()
    _remove_folders_of_killed_drivers(tmp)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=tmp))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").rename(folder / HELD)  # only a locked file has the name that drivers search
        own = OwnRay(folder)
        try:
            yield own
        finally:
            own.end()
            if not own.failed:
                shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still write


def _remove_folders_of_killed_drivers(tmp: Path) -> None:
    for held in tmp.glob(f"ray-*/{HELD}"):
        with contextlib.suppress(OSError), held.open() as lock:  # removed meanwhile, locked, another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent)


def _short_tmp() -> Path:
    """The first of the usual folders that can be written and has a short path."""
    places = ["/tmp", "/dev/shm"]
    with contextlib.suppress(FileNotFoundError):  # none of Python's can be written
        places.insert(0, tempfile.gettempdir())
    for place in places:
        if len(place) <= LONGEST_TMP and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise LaunchError(
        f"Ray's sockets need a folder that can be written, with a path of at most {LONGEST_TMP} characters: "
        f"{', '.join(places)} are none.",
        "TMPDIR=/FOLDER python train.py --backend ray",
    )

"""A local Ray for one run: started during the driver's imports, ended with the driver, its folder removed.

A failed start is retried once, with a message: its cause is often temporary, such as a port that another
process took. After a second failure the logs are kept and their path is printed. Not here: a joined cluster
(ray_cluster.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
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

from fsdp.base.errors import LaunchError
from fsdp.base.phases import SIGNALS
from fsdp.config import RaySection
from launch.ray_settings import set_defaults

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
_ERROR_LINE = re.compile(r"^\[[^]]* [ECF] [^]]*\] (?:\(\w+\) )?(?:\S+:\d+: )?(.*)$", re.MULTILINE)


class OwnRay:
    """`ray start` in a session of its own: a signal to the driver's process group (a terminal's Ctrl-C,
    `timeout`) reaches the driver alone. It starts while the driver imports torch: both take seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def wait(self) -> str:
        """The address of this Ray, once it has started."""
        starts = 1
        while not (address := self._address()):
            if self._process.poll() is None:
                time.sleep(POLL_S)
                continue
            why = _reason(self._folder)
            if starts == STARTS:
                raise LaunchError(
                    f"Ray did not start here, {STARTS} times: {why}.",
                    "allow more open files (`ulimit -n`), memory or processor time; "
                    f"{_keep_logs(self._folder)}",
                )
            print(f"Ray did not start here: {why}. Starting it again.", file=sys.stderr, flush=True)
            starts += 1
            self._start()
        return address

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

    def _address(self) -> str:
        """Empty until Ray has written it."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "ray_current_cluster").read_text()
        return ""


def _reason(folder: Path) -> str:
    """The last line that `ray start` printed, and the first error line in the logs of the newest session."""
    lines = (folder / LOG).read_text(errors="replace").split("\n")
    text = next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "it printed nothing")
    with contextlib.suppress(OSError):  # its last processes may still delete files
        for log in sorted(folder.glob("session_latest/logs/*.out")):
            if (found := _ERROR_LINE.search(log.read_text(errors="replace"))) is not None:
                return f"{text}; its {log.stem} wrote: {found[1].strip().rstrip('.')}"
    return text


def _keep_logs(folder: Path) -> str:
    """Copy the logs to a folder that outlives this driver; returns a clause about them for the error."""
    kept = folder.with_name(folder.name.replace("ray-", "ray-failed-", 1))
    try:
        shutil.copytree(folder / "session_latest" / "logs", kept / "logs")
        (kept / HELD).touch()
    except OSError:
        return "it left no logs"
    return f"its logs are in {kept / 'logs'} until the next start"


@contextmanager
def own_ray(section: RaySection) -> Iterator[OwnRay | None]:
    """Start a Ray here unless --ray.address names one; stop it at the end of the block."""
    set_defaults()
    if section.address:
        yield None
        return
    # a local Ray has no preemption
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Without a token Ray leaves one in ~/.ray/auth_token, and each later `ray start --head` demands it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    with _own_folder(Path(_short_tmp())) as folder:
        own = OwnRay(folder)
        try:
            yield own
        finally:
            own.end()


@contextmanager
def _own_folder(tmp: Path) -> Iterator[Path]:
    """A folder for Ray's sockets and logs, locked while its driver is alive.

    Folders of killed drivers are removed.
    """
    for other in tmp.glob(f"ray-*/{HELD}"):
        with (
            contextlib.suppress(OSError),
            other.open() as lock,
        ):  # removed meanwhile, locked, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other.parent)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=tmp))
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").rename(
                folder / HELD
            )  # only a locked file has the name that other drivers search
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still write


def _short_tmp() -> str:
    """The first of the usual folders that can be written and has a short path."""
    places = ["/tmp", "/dev/shm"]
    with contextlib.suppress(FileNotFoundError):  # none of Python's can be written
        places.insert(0, tempfile.gettempdir())
    for place in places:
        if len(place) <= LONGEST_TMP and os.access(place, os.W_OK | os.X_OK):
            return place
    raise LaunchError(
        f"Ray's sockets need a folder that can be written, with a path of at most {LONGEST_TMP} characters: "
        f"{', '.join(places)} are none.",
        "TMPDIR=/FOLDER python train.py --backend ray",
    )

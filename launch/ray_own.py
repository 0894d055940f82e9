"""A local Ray for one run: started during the driver's imports, stopped with the driver, its folder removed.

A failed start is retried once, with a message: its cause is often temporary, such as a port that another
process took. After a second failure the logs are kept and their path is printed. Not here: a joined cluster
(ray_cluster.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp.base.errors import LaunchError, message_line
from fsdp.config import RaySection
from launch.ray_settings import set_defaults, set_log_levels

# no idle Python processes, one per core, which no worker here uses
SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
STORE_BYTES = 128 << 20
"""Nothing here uses Ray's object store: far below its default of a third of the memory."""
STARTS = 2
HELD = "shardrun-driver"
LONGEST_TMP = 40
"""A Unix socket's path has at most 107 characters, and Ray appends 65 to this folder."""
_ERROR_LINE = re.compile(r"^\[[^]]* [ECF] [^]]*\] (?:\(\w+\) )?(?:\S+:\d+: )?(.*)$", re.MULTILINE)


class OwnRay:
    """Starts on a thread while the driver imports torch and checks flags: both take seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: BaseException | None = None
        self._up, self._over = threading.Event(), threading.Event()
        self._start(1)

    def wait(self) -> str:
        """Wait until Ray has started; returns its version for the log."""
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

    def _start(self, count: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(count,), name="ray-init", daemon=True)
        self._thread.start()

    def _run(self, count: int) -> None:
        try:
            self._init()
        except Exception as error:
            why = _reason(error, self._folder)
            if count < STARTS:
                print(f"Ray did not start here: {why}. Starting it again.", file=sys.stderr, flush=True)
                self._start(count + 1)
                return  # the processes that this thread has started end with it
            self._error = LaunchError(
                f"Ray did not start here, {STARTS} times: {why}.",
                f"allow more open files (`ulimit -n`), memory or processor time; {_keep_logs(self._folder)}",
            )
        except BaseException as error:
            self._error = error
        self._up.set()
        self._over.wait()  # Ray's processes end with the thread that started them

    def _init(self) -> None:
        import ray

        set_log_levels()
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._folder),
                _node_ip_address="127.0.0.1",
                object_store_memory=STORE_BYTES,
                _system_config=SYSTEM_CONFIG,
            )
        except BaseException:
            ray.shutdown()  # it may have started in part
            raise


def _reason(error: Exception, folder: Path) -> str:
    """Ray's error, and the first error line in the logs of the newest session."""
    text = message_line(error, 2000)
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

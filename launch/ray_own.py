"""A Ray of this machine's own, for one run: begun beside the driver's imports, ended with the driver, its
folder removed.

A start that fails is tried once more, and says so: what it failed of is often gone by then, as where another
process took a port first. Of a second failure the logs are kept and named. Not here: a cluster that is joined
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

from fsdp.base.errors import LaunchError
from fsdp.config import RaySection
from launch.ray_settings import hush, quiet

# idle Python processes, one a core, that no worker of ours comes from
LEAN = {"prestart_worker_first_driver": False}
STORE_BYTES = 128 << 20
"""Nothing of ours goes through Ray's object store: far below its default of a third of the memory."""
STARTS = 2
HELD = "shardrun-driver"
LONGEST_TMP = 40
"""A Unix socket's path has at most 107 characters, and Ray puts 65 behind this folder."""
_AN_ERROR = re.compile(r"^\[[^]]* [ECF] [^]]*\] (?:\(\w+\) )?(?:\S+:\d+: )?(.*)$", re.MULTILINE)


class OwnRay:
    """Comes up on a thread while the driver imports torch and checks flags: both take seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: BaseException | None = None
        self._up, self._over = threading.Event(), threading.Event()
        self._start(1)

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

    def _start(self, count: int) -> None:
        self._thread = threading.Thread(target=self._come_up, args=(count,), name="ray-init", daemon=True)
        self._thread.start()

    def _come_up(self, count: int) -> None:
        try:
            self._init()
        except Exception as error:
            why = _said_of(error, self._folder)
            if count < STARTS:
                print(
                    f"Ray did not come up here: {why}. It is started once more.", file=sys.stderr, flush=True
                )
                self._start(count + 1)
                return  # and with this thread end the processes that it started
            self._error = LaunchError(
                f"Ray did not come up here, {STARTS} times: {why}.",
                f"give it more open files (`ulimit -n`), memory or time of the processors; {_keep(self._folder)}",
            )
        except BaseException as error:
            self._error = error
        self._up.set()
        self._over.wait()  # Ray's processes are told to end with the thread that started them

    def _init(self) -> None:
        import ray

        hush()
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._folder),
                _node_ip_address="127.0.0.1",
                object_store_memory=STORE_BYTES,
                _system_config=LEAN,
            )
        except BaseException:
            ray.shutdown()  # it may have come half of the way
            raise


def _said_of(error: Exception, folder: Path) -> str:
    """Ray's own words, and the first error of the newest session that one of its processes wrote down."""
    words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    with contextlib.suppress(OSError):  # its last processes may still be tidying up
        for log in sorted(folder.glob("session_latest/logs/*.out")):
            if (found := _AN_ERROR.search(log.read_text(errors="replace"))) is not None:
                return f"{words}; its {log.stem} wrote: {found[1].strip().rstrip('.')}"
    return words


def _keep(folder: Path) -> str:
    """Its logs under a name that the end of this driver leaves alone; what to say of them."""
    kept = folder.with_name(folder.name.replace("ray-", "ray-failed-", 1))
    try:
        shutil.copytree(folder / "session_latest" / "logs", kept / "logs")
        (kept / HELD).touch()
    except OSError:
        return "it left no logs"
    return f"its logs are in {kept / 'logs'} until the next start"


@contextmanager
def own_ray(section: RaySection) -> Iterator[OwnRay | None]:
    """Begins a Ray here unless one is to be joined; gone at the end of the block."""
    quiet()
    if section.address:
        yield None
        return
    # nobody takes this machine's nodes away
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    with _own_folder(Path(_short_tmp())) as folder:
        own = OwnRay(folder)
        try:
            yield own
        finally:
            own.end()


@contextmanager
def _own_folder(tmp: Path) -> Iterator[Path]:
    """For Ray's sockets and logs. A lock says that its driver lives: the folders of those that were killed
    are removed.
    """
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

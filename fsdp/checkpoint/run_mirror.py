"""A run directory in an object store, --run.dir s3://bucket/prefix: its lock, and the copies of its files.

Rank 0 writes to a folder of its node, as to any run directory. A thread copies what has changed to the store
every UPLOAD_S, and the records are copied before each checkpoint is sealed: the store has the records of
every step that a start on another machine can resume. The last copy follows the end, before the lock is
released. A pass costs a PUT for each changed file (during training the metrics, TensorBoard's and the
watch's) and a GET for the object STOP, with which a user stops the run. A copy that fails is logged and
repeated, and training continues.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from fsdp.base.errors import CheckpointError, error_number
from fsdp.base.phases import ACTIVITIES
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.open_store import lock_place
from fsdp.checkpoint.run_files import RunFiles
from fsdp.checkpoint.store import Store
from fsdp.rundir.lock import Locks, hold
from fsdp.rundir.paths import RunDir

log = logging.getLogger(__name__)

FIRST_UPLOAD_S = 2.0
UPLOAD_S = 30.0


class RunMirror(Locks):
    """The locks of a run whose files a thread copies to the store until `release`."""

    def __init__(self, locks: Locks, files: RunFiles) -> None:
        super().__init__(*locks.held)
        self._files = files
        self._failed: str | None = None
        """Why the last copy failed."""
        self._busy = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="run-mirror", daemon=True)
        self._thread.start()

    def before_seal(self) -> str | None:
        """The records are in the store before the checkpoint counts."""
        why = self.lost_now()
        if why is None:
            self.upload()
        return why

    def upload(self) -> None:
        """Copies what has changed. A failure is logged when it begins and when it ends."""
        with self._busy:
            if self.lost is not None:
                return
            try:
                self._files.upload()
            except OSError as error:
                if self._failed is None:
                    log.warning("%s: the run continues, and its files stay in %s", error, self._files.folder)
                self._failed = str(error)
                return
            if self._failed is not None:
                log.warning("%s is written again", self._files.store.where)
            self._failed = None

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        try:
            if self.lost_now() is None:
                self.upload()
        except OSError as error:  # the lock could not be read
            log.warning("%s", error)
            self._failed = str(error)
        if self._failed is not None:
            message = (
                "%s lacks files of this run, which are in %s: the next start on this machine copies them"
            )
            log.warning(message, self._files.store.where, self._files.folder)
        super().release()

    def _serve(self) -> None:
        ACTIVITIES.leave_out_this_thread()
        pause = FIRST_UPLOAD_S
        while not self._over.wait(pause):
            self.upload()
            self._pass_on_stop_request()
            pause = UPLOAD_S

    def _pass_on_stop_request(self) -> None:
        with contextlib.suppress(OSError):  # the next pass looks again
            if self._files.has_stop_request():
                (self._files.folder / "STOP").touch()


def open_mirror(run: RunDir, store: Store | None, launcher: str, job: str = "") -> RunMirror:
    """Locks the run directory, and the store of its checkpoints if given; then brings the folder up to date.

    Raises RefusedError with the holder, or CheckpointError for a store that cannot be read or written.
    """
    there = ObjectStore(run.url)
    locks = hold(there, None if store is None else lock_place(store), launcher, job)
    try:
        files = RunFiles(there, run.path)
        files.take_over()
        return RunMirror(locks, files)
    except OSError as error:
        locks.release()
        hint = f"--run.dir runs/{run.path.name} --checkpoint.dir {there.where}/checkpoints"
        what = f"the files of {there.where} cannot be copied to {run.path}: {error}."
        raise CheckpointError(what, hint, error_number=error_number(error)) from None
    except BaseException:
        locks.release()
        raise


@contextlib.contextmanager
def mirrored(run: RunDir, launcher: str, job: str = "") -> Iterator[None]:
    """A launcher's own reads and writes of a run directory in a store, under its lock."""
    mirror = open_mirror(run, None, launcher, job)
    try:
        yield
    finally:
        mirror.release()


def put_file(run: RunDir, file: Path) -> None:
    """Copies one small file that is written after the lock is released. A failure is logged."""
    try:
        ObjectStore(run.url).put(file.name, [file.read_bytes()])
    except OSError as error:
        log.warning("%s", error)


def get_file(run: RunDir, name: str) -> bytes | None:
    """A small file that another node may have written; None if the store has none or is not reached."""
    try:
        found = ObjectStore(run.url).get(name)
    except OSError as error:
        log.warning("%s", error)
        return None
    return found.data if found is not None else None

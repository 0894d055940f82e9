"""The lock of a store: one live job, a run or `python -m fsdp.checkpoint RUN prune`, writes there.

A folder has the lock of a run directory (fsdp/rundir/lock.py). An object store has an object of the same name
and content. Its holder rewrites it every few seconds with a higher count; another job takes it over when the
holder's process is dead, or when it has not changed while watched. Each write is conditional on the version
before it, so of two takeovers one succeeds.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict
from os.path import realpath
from pathlib import Path
from typing import Protocol

from fsdp.base.errors import CheckpointError, RefusedError, error_number
from fsdp.base.phases import ACTIVITIES
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.object_store import ObjectStore, VersionedObject
from fsdp.checkpoint.store import Store
from fsdp.rundir.lock import FILE, STALE_S, TWO_RUNS, FolderLock, read_lock_file
from fsdp.rundir.lock_holder import (
    RELEASED,
    Holder,
    is_alive,
    is_later_start,
    read_holder,
    this_holder,
    this_place,
)

log = logging.getLogger(__name__)

OBJECT_BEAT_S = 10.0
"""Each renewal is a request that a cloud charges for."""
OBJECT_STALE_S = 60.0
"""Six renewals, and longer than a request is retried."""


class Lock(Protocol):
    """A lock of this process. Who took it over, or None: `lost` at the last renewal, `lost_now` now."""

    @property
    def lost(self) -> str | None: ...
    @property
    def took_over(self) -> str: ...
    def lost_now(self) -> str | None: ...
    def advice(self) -> str: ...
    def release(self) -> None: ...


class ObjectLock:
    """The lock object of an object store; a thread renews it until `release`."""

    def __init__(
        self,
        store: ObjectStore,
        holder: Holder,
        version: str,
        took_over: str,
        beat_s: float,
    ) -> None:
        self.holder, self.took_over = holder, took_over
        self.lost: str | None = None
        self._store, self._version, self._beat_s = store, version, beat_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store-lock", daemon=True)
        self._thread.start()

    @staticmethod
    def acquire(
        store: ObjectStore,
        launcher: str,
        job: str = "",
        *,
        beat_s: float = OBJECT_BEAT_S,
        stale_s: float = OBJECT_STALE_S,
    ) -> ObjectLock:
        """Takes the store's lock, or RefusedError with its holder. Watches a silent holder for `stale_s`."""
        holder, took_over = this_holder(launcher, job), ""
        while True:
            found = store.get(FILE)
            if found is not None:
                took_over = _clear_dead(store, found, stale_s, job)
            version = _write(store, holder, 0, None if found is None else found.version)
            if version is not None:
                if took_over:
                    log.warning(took_over)
                return ObjectLock(store, holder, version, took_over, beat_s)

    def lost_now(self) -> str | None:
        """None while this process holds the lock; else the new holder. Read before each seal and pruning."""
        found = self._store.get(FILE)
        if found is None:
            gone = f"the lock on {self._store.where} is gone: {FILE}, or the whole bucket, was deleted"
            return f"{gone}, and another job may write there"
        now = read_holder(found.data)
        if now is not None and now.token == self.holder.token:
            return None
        over = f"{self._store.where} was taken over by {now}"
        return f"{over}: this process was silent too long and must not write there"

    def advice(self) -> str:
        return TWO_RUNS

    def release(self) -> None:
        """Deletes the lock, unless another job has it by now."""
        self._over.set()
        # A request may be between retries; one that is written after the deletion would leave the lock.
        self._thread.join(OBJECT_BEAT_S)
        try:
            dropped = self._store.drop(FILE, self._version)
            if not dropped and (version := _version_of(self._store, self.holder)) is not None:
                self._store.drop(FILE, version)  # the last renewal was written, and its response lost
        except Exception as error:  # each client has its own classes
            RELEASED.add(self.holder.token)  # this process lives on, and its next start is not refused
            log.warning("the lock on %s could not be removed: %s", self._store.where, error)

    def _beat(self) -> None:
        ACTIVITIES.leave_out_this_thread()
        count = missed = 0
        while not self._over.wait(self._beat_s) and self.lost is None:
            count += 1
            try:
                version = _write(self._store, self.holder, count, self._version)
                if version is None:
                    self.lost = self.lost_now()
                self._version = version or self._version
            except OSError as error:
                missed += 1
                if missed == 1:
                    log.warning("the lock on %s could not be renewed: %s", self._store.where, error)
                continue
            if missed:
                log.warning("the lock on %s is renewed again, %d renewals failed", self._store.where, missed)
                missed = 0


def _write(store: ObjectStore, holder: Holder, count: int, version: str | None) -> str | None:
    """The new version, or None if another job has the lock.

    A write whose response was lost, this one or the one before it, has left another version with this token.
    """
    data = json.dumps(asdict(holder)).encode() + f"\n{count:020d}\n".encode()
    written = store.swap(FILE, data, version)
    return _version_of(store, holder) if written is None else written


def _version_of(store: ObjectStore, holder: Holder) -> str | None:
    """The version of the lock that this holder has; None if it does not have it."""
    found = store.get(FILE)
    now = None if found is None else read_holder(found.data)
    return found.version if found is not None and now is not None and now.token == holder.token else None


def _clear_dead(store: ObjectStore, found: VersionedObject, stale_s: float, job: str) -> str:
    """A line about the dead holder, for the log of the takeover; RefusedError if the holder lives."""
    holder = read_holder(found.data)
    how, alive = "it is dead", _known(holder, job)
    if alive is None:
        who = holder or "an unknown holder"
        log.warning(
            "%s is locked by %s: watching for %.0f s whether its holder lives", store.where, who, stale_s
        )
        how, alive = f"it gave no sign for {stale_s:g} s", _changes(store, found, stale_s)
    if alive:
        raise RefusedError(f"{store.where} is being written by {holder or 'another job'}.")
    return f"{store.where}: took over from {holder or 'a holder without a name'}: {how}"


def _known(holder: Holder | None, job: str) -> bool | None:
    """Whether a holder lives, by its job or its process; None if only watching the lock can tell."""
    if holder is None:
        return None
    if is_later_start(job, holder.job):
        return False  # the scheduler ended the earlier start
    return is_alive(holder) if holder.place and holder.place == this_place() else None


def _changes(store: ObjectStore, found: VersionedObject, stale_s: float) -> bool:
    """Whether the object changes (a renewal or a new holder) within `stale_s`; False if it is deleted."""
    deadline = time.monotonic() + stale_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, stale_s / 10))
        now = store.get(FILE)
        if now is None or now.data != found.data:
            return now is not None
    return False


class Locks:
    """Several locks held as one: lost when any of them is."""

    def __init__(self, *held: Lock) -> None:
        self._held = held
        self.took_over = " ".join(one.took_over for one in held if one.took_over)

    @property
    def lost(self) -> str | None:
        return next((one.lost for one in self._held if one.lost is not None), None)

    def lost_now(self) -> str | None:
        return next((why for one in self._held if (why := one.lost_now()) is not None), None)

    def advice(self) -> str:
        """The hint of an error about the lost one of them."""
        return next((one.advice() for one in self._held if one.lost is not None), TWO_RUNS)

    def before_seal(self) -> str | None:
        """Whether a checkpoint may be sealed now: None, or the new holder."""
        return self.lost_now()

    def release(self) -> None:
        """Releases each lock. Each logs a failure: another error may be on its way."""
        for one in reversed(self._held):
            one.release()


def hold(run_dir: Path | ObjectStore | None, store: Store, launcher: str, job: str = "") -> Locks:
    """Takes the locks of a run directory (if there is one) and its store, or RefusedError with a holder."""
    if run_dir is None or _same(store, run_dir):
        return Locks(_hold_store(store, launcher, job))
    try:
        before, began = _peek(store), time.monotonic()
    except OSError as error:  # after a minute of retries, which acquiring would repeat
        raise _unwritable_store(run_dir, store, error) from None
    run = Locks(
        FolderLock.acquire(run_dir, launcher, job)
        if isinstance(run_dir, Path)
        else hold_url(run_dir, launcher, job)
    )
    try:
        # The time that the run directory's lock was watched counts for the store's, if that did not change.
        watched = time.monotonic() - began if before is not None and _peek(store) == before else 0.0
        return Locks(run, _hold_store(store, launcher, job, watched))
    except OSError as error:
        run.release()
        raise _unwritable_store(run_dir, store, error) from None
    except BaseException:
        run.release()
        raise


def hold_url(run: ObjectStore, launcher: str, job: str = "") -> Locks:
    """Takes the lock of a run directory in an object store, or RefusedError with its holder."""
    return Locks(_hold_store(run, launcher, job, flag="--run.dir"))


def _same(store: Store, run_dir: Path | ObjectStore) -> bool:
    if isinstance(run_dir, Path):
        return isinstance(store, LocalStore) and realpath(store.root) == realpath(run_dir)
    return isinstance(store, ObjectStore) and store.where == run_dir.where


def _peek(store: Store) -> bytes | None:
    """The lock's content; None if there is none. Acquiring the lock of an unreadable folder raises."""
    if isinstance(store, ObjectStore):
        return found.data if (found := store.get(FILE)) is not None else None
    assert isinstance(store, LocalStore)
    try:
        return read_lock_file(store.root / FILE)
    except OSError:
        return None


def _hold_store(
    store: Store, launcher: str, job: str, watched_s: float = 0.0, *, flag: str = "--checkpoint.dir"
) -> Lock:
    try:
        if isinstance(store, ObjectStore):
            return ObjectLock.acquire(store, launcher, job, stale_s=max(0.0, OBJECT_STALE_S - watched_s))
        assert isinstance(store, LocalStore)
        store.make()
        return FolderLock.acquire(store.root, launcher, job, stale_s=max(0.0, STALE_S - watched_s))
    except RefusedError as error:
        held = str(error).removesuffix(f" HINT: {error.hint}")
        raise RefusedError(held, f"another {flag}, or end that job") from None
    except OSError as error:
        raise _unwritable(store.where, error, flag) from None


def _unwritable_store(run_dir: Path | ObjectStore, store: Store, error: OSError) -> CheckpointError:
    """Names the run directory where the store is in it."""
    if isinstance(run_dir, ObjectStore) and store.where.startswith(f"{run_dir.where}/"):
        return _unwritable(run_dir.where, error, "--run.dir")
    return _unwritable(store.where, error, "--checkpoint.dir")


def _unwritable(place: str, error: OSError, flag: str) -> CheckpointError:
    hint = f"{flag} FOLDER that is writable"
    return CheckpointError(f"{place} cannot be written: {error}.", hint, error_number=error_number(error))

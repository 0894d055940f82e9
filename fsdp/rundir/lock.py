"""The lock of a run directory and all in it: one live job writes there, and another job's start is refused.

A lock is a text named CLAIM in a place: a folder, or a prefix of an object store. It has its holder and a
count that the holder raises every few seconds. A dead holder on this machine is recognised by its process,
which may be suspended and is alive then; one on another machine by a count that does not change while this
process watches, so no clocks are compared. "This machine" means the same machine id, boot id and PID
namespace. Where /proc does not show these (macOS, a container that masks it) or hides the holder's process
(hidepid), the count decides. A holder that was cut off and returns finds another one and stops writing. A run
whose checkpoints are elsewhere locks that place too, after its run directory: who loses that one loses both.

In a folder only O_EXCL and unlink are used, which every shared folder has; in a store each write is
conditional on the version before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from os.path import realpath
from pathlib import Path
from typing import Protocol

from fsdp.base.errors import CheckpointError, RefusedError, error_number
from fsdp.base.phases import ACTIVITIES
from fsdp.rundir.atomic_write import writing
from fsdp.rundir.lock_holder import (
    RELEASED,
    Holder,
    is_alive,
    is_later_start,
    is_orphan,
    is_suspended,
    read_holder,
    this_holder,
    this_place,
)

log = logging.getLogger(__name__)

FILE = "CLAIM"
MOST_BYTES = 1 << 16
_PROBE = r"\.(writable|seen-by-all|shared)-[0-9a-f]{8}"
_REPLACED = rf"config\.toml|(metrics|saves|history)\.jsonl|STOPPED|DONE|FAILED|report\.html|{_PROBE}"
LEFTOVER = re.compile(rf"\.CLAIM-(dead-)?[0-9a-f]{{16}}|{_PROBE}|\.({_REPLACED})\.[0-9a-f]{{8}}")
"""Temporary files of a start: of the lock, of paths.py, of dist/preflight.py and of a store's check, and what
atomic_write.py has not renamed to one of the run directory's files.
"""
OLD_S = 3600.0
"""A start uses such a file for seconds: one this old belongs to none that lives."""
REMOVAL_S = 5.0
"""A process removes a dead lock within milliseconds, unless it was stopped or killed meanwhile."""
TWO_RUNS = "squeue or ps shows both runs: end one of them"
ORPHAN_S = 900.0
"""The time that a run whose launcher was killed has for its last save."""


@dataclass(frozen=True)
class VersionedObject:
    """A small text and its version, which no other text has."""

    data: bytes
    version: str


class Place(Protocol):
    """`swap` writes the text if it has this version (None: if there is none) and returns the new version, or
    None; `drop` deletes it if it has this version. fsdp/checkpoint/object_store.py is one.
    """

    where: str
    beat_s: float
    stale_s: float
    """The holder of a count that is unchanged this long is dead: several beats."""

    def get(self, name: str) -> VersionedObject | None: ...
    def swap(self, name: str, data: bytes, version: str | None) -> str | None: ...
    def drop(self, name: str, version: str) -> bool: ...


class Folder:
    """A folder as the place of a lock. The version is that of the first line, the holder."""

    beat_s, stale_s = 2.0, 20.0
    """A shared folder may cache attributes for some seconds."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.where = Path(path), str(path)
        self._descriptor: int | None = None

    def get(self, name: str) -> VersionedObject | None:
        """A FIFO or a device in its place neither blocks nor fills the memory."""
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            # a link that leads nowhere: nobody renews it
            return VersionedObject(b"", _version(b"")) if (self.path / name).is_symlink() else None
        try:
            data = os.read(descriptor, MOST_BYTES)
        finally:
            os.close(descriptor)
        return VersionedObject(data, _version(data))

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        if self._descriptor is not None:
            # through the open file: after a takeover this writes into a file without a name
            head = data.index(b"\n") + 1
            os.pwrite(self._descriptor, data[head:], head)
            os.fsync(self._descriptor)
            found = self.get(name)
            return version if found is not None and found.version == version else None
        return self._create(name, data) if version is None or self.drop(name, version) else None

    def _create(self, name: str, data: bytes) -> str | None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self.path / name, flags, 0o644)
        except FileExistsError:
            return None
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        except OSError:
            os.close(descriptor)
            (self.path / name).unlink()
            raise
        self._descriptor = descriptor
        _remove_leftovers(self.path, os.fstat(descriptor).st_mtime)
        return _version(data)

    def drop(self, name: str, version: str) -> bool:
        """Of several processes the one that makes the second file removes the first one, and no other's."""
        second = self.path / f".{name}-dead-{version}"
        try:
            os.close(os.open(second, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            if _vanishes(second):
                return False
        except FileNotFoundError:  # the folder was renamed or removed
            return False
        try:
            found = self.get(name)
            if found is None or found.version != version:
                return False
            (self.path / name).unlink(missing_ok=True)
            return True
        finally:
            second.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _version(data: bytes) -> str:
    return hashlib.sha256(data.partition(b"\n")[0]).hexdigest()[:16]


def _vanishes(file: Path) -> bool:
    """Whether the process that removes the lock has ended with it, within REMOVAL_S."""
    deadline = time.monotonic() + REMOVAL_S
    while file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _remove_leftovers(folder: Path, now: float) -> None:
    """Remove temporary files that killed starts have left. `now` is by the clock that dates the files."""
    try:
        for file in folder.iterdir():
            if LEFTOVER.fullmatch(file.name) and now - file.lstat().st_mtime > OLD_S:
                file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("temporary files of killed starts in %s cannot be removed: %s", folder, error)


class Lock:
    """The held lock of one place: a thread renews it until `release`."""

    def __init__(self, place: Place, holder: Holder, version: str, took_over: str) -> None:
        self.took_over = took_over
        """One line about the dead holder that this one replaced; empty if there was none."""
        self.lost: str | None = None
        """The new holder, set by the last renewal: the loop reads it each step without reading the place."""
        self._place, self._holder, self._version = place, holder, version
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def lost_now(self) -> str | None:
        """None while this process holds the lock; else why not. Called before every seal and pruning."""
        where, found = self._place.where, self._place.get(FILE)
        if found is None:
            if isinstance(self._place, Folder) and not self._place.path.is_dir():
                return f"{where} is gone: it was renamed or removed"
            return f"the lock of {where} is gone: {FILE} was removed, and another job may write there"
        now = read_holder(found.data)
        if now is not None and now.token == self._holder.token:
            return None
        late = "this process did not renew its lock in time and must not write there"
        return f"{where} was taken over by {now}: {late}"

    def advice(self) -> str:
        """The hint of an error about a lost lock."""
        if isinstance(self._place, Folder) and not self._place.path.is_dir():
            back = f"mv it back to {shlex.quote(self._place.where)} if it was renamed"
            return f"{back}: the same command then resumes from its checkpoints"
        return TWO_RUNS

    def release(self) -> None:
        """Release the lock, unless another holder has it by now. One line if it cannot be removed: it counts
        as a dead holder's then.
        """
        self._over.set()
        # a request to a store may be between retries; written after the deletion it would leave the lock
        self._thread.join(10.0)
        try:
            dropped = self._place.drop(FILE, self._version)
            if not dropped and (version := _version_of(self._place, self._holder)) is not None:
                self._place.drop(FILE, version)  # the last renewal was written, and its response lost
        except Exception as error:  # each client of a store has its own classes
            RELEASED.add(self._holder.token)
            message = "the lock %s/%s cannot be removed (%s): the next start here takes it over"
            log.warning(message, self._place.where, FILE, getattr(error, "strerror", None) or error)
        if isinstance(self._place, Folder):
            self._place.close()

    def _beat(self) -> None:
        ACTIVITIES.leave_out_this_thread()
        count = missed = 0
        while not self._over.wait(self._place.beat_s) and self.lost is None:
            count += 1
            error = self._renew(count)
            if error is not None:
                missed += 1
                if missed == 1:
                    log.warning("the lock of %s cannot be renewed: %s", self._place.where, error)
            elif missed:
                log.warning("the lock of %s is renewed again, %d renewals failed", self._place.where, missed)
                missed = 0

    def _renew(self, count: int) -> OSError | None:
        """Looks who holds the lock where the count cannot be written: NFS gives ESTALE for the file of a
        holder that was replaced.
        """
        failed, version = None, None
        try:
            version = _write(self._place, self._holder, count, self._version)
        except OSError as error:
            failed = error
        try:
            self.lost = self.lost_now() if version is None else None
        except OSError as error:
            failed = failed or error
        self._version = version or self._version
        return failed


def _write(place: Place, holder: Holder, count: int, version: str | None) -> str | None:
    """The new version, or None if another job has the lock.

    A write whose response was lost, this one or the one before it, has left another version with this token.
    """
    data = json.dumps(asdict(holder)).encode() + f"\n{count:020d}\n".encode()
    return place.swap(FILE, data, version) or _version_of(place, holder)


def _version_of(place: Place, holder: Holder) -> str | None:
    """The version of the lock that this holder has; None if it does not have it."""
    found = place.get(FILE)
    now = None if found is None else read_holder(found.data)
    return found.version if found is not None and now is not None and now.token == holder.token else None


class Locks:
    """The locks of a run held as one: lost when any of them is."""

    def __init__(self, *held: Lock, copy_records: Callable[[], None] | None = None) -> None:
        self.held, self._copy_records = held, copy_records

    @property
    def lost(self) -> str | None:
        return next((one.lost for one in self.held if one.lost is not None), None)

    def lost_now(self) -> str | None:
        return next((why for one in self.held if (why := one.lost_now()) is not None), None)

    def advice(self) -> str:
        """The hint of an error about the lost one of them."""
        return next((one.advice() for one in self.held if one.lost is not None), TWO_RUNS)

    def before_seal(self) -> str | None:
        """None if a checkpoint may be sealed now, after its records are copied; else the new holder."""
        why = self.lost_now()
        if why is None and self._copy_records is not None:
            self._copy_records()
        return why

    def release(self) -> None:
        """Releases each lock. Each logs a failure: another error may be on its way."""
        if self._copy_records is not None and self.lost is None:
            self._copy_records()
        for one in reversed(self.held):
            one.release()


def hold(
    run: Place | None,
    store: Place | None,
    launcher: str,
    job: str = "",
    copy_records: Callable[[], None] | None = None,
) -> Locks:
    """Takes the lock of a run directory, and of a store outside of it; RefusedError with a live holder.

    `copy_records` is called before each seal and at the release.
    """
    holder, ousted, held = this_holder(launcher, job), set[str](), list[Lock]()
    try:
        for place, flag in _places(run, store):
            held.append(_acquire(place, holder, ousted, flag))
    except BaseException:
        Locks(*held).release()
        raise
    return Locks(*held, copy_records=copy_records)


def _places(run: Place | None, store: Place | None) -> Iterator[tuple[Place, str]]:
    """The places to lock, each with the flag that names it."""
    if run is not None:
        yield run, "--run.dir"
    if store is None:
        return
    with _storing(store, "--checkpoint.dir"):
        place: Place | None = store
        if run is None or not _key(store).startswith(_key(run)):
            place = _around(store)
        elif _key(store) == _key(run) or store.get(FILE) is None:
            place = None  # one in the run directory is another run's, or of a version that locked both
    if place is not None:
        yield place, "--checkpoint.dir"


def _key(place: Place) -> str:
    return (realpath(place.path) if isinstance(place, Folder) else place.where).rstrip("/") + "/"


def _around(store: Place) -> Place:
    """The run directory that these checkpoints are in: its lock covers them."""
    folder, _, name = store.where.rpartition("/")
    if name == "checkpoints":
        run: Place = type(store)(folder)  # type: ignore[call-arg]
        with suppress(PermissionError):  # another user's: no run of this one
            if run.get(FILE) is not None or run.get("config.toml") is not None:
                return run
    return store


def _acquire(place: Place, holder: Holder, ousted: set[str], flag: str) -> Lock:
    with writing(place.path / FILE) if isinstance(place, Folder) else _storing(place, flag):
        while True:
            found, line = place.get(FILE), ""
            if found is not None and not (line := _clear(place, found, holder, ousted, flag)):
                continue
            version = _write(place, holder, 0, None if found is None else found.version)
            if version is not None:
                if line:
                    log.warning("%s", line)
                return Lock(place, holder, version, line)


@contextmanager
def _storing(place: Place, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = f"{flag} FOLDER that is writable"
        what = f"{place.where} cannot be written: {error}."
        raise CheckpointError(what, hint, error_number=error_number(error)) from None


def _clear(place: Place, found: VersionedObject, holder: Holder, ousted: set[str], flag: str) -> str:
    """A line about the dead holder; empty to look again; RefusedError if the holder is alive."""
    other = read_holder(found.data)
    who = other or "a holder without a name"
    ours = other is not None and other.place != "" and other.place == this_place()
    alive: bool | None = False
    if other is not None and other.token in ousted:
        return f"{place.where}: took over from {who}: it has lost its run directory"
    if other is not None and is_later_start(holder.job, other.job):
        how = f"{other.job} is over"
    else:
        how, alive = "it is dead", is_alive(other) if ours and other is not None else None
        if alive and other is not None and is_orphan(other):
            log.warning("%s: the launcher of %s was killed: waiting until it has saved", place.where, who)
            alive = not _ends(other)
        if alive is None:
            why = "its process is hidden from this one: " if ours else ""
            message = "%s is locked by %s: %swatching for %.0f s whether it is alive"
            log.warning(message, place.where, who, why, place.stale_s)
            how, now = f"it gave no sign for {place.stale_s:g} s", _change(place, found)
            if other is None and now is not None and read_holder(now.data) is not None:
                return ""
            alive = now is not None
    if not alive:
        if other is not None:
            ousted.add(other.token)
        return f"{place.where}: took over from {who}: {how}"
    ends = f"end that job (remove {place.where}/{FILE} only if you know it is gone)"
    if other is not None and ours and is_suspended(other):
        who, ends = f"{other}, which is suspended", f"kill -CONT {other.pid} resumes it, kill -9 ends it"
    raise RefusedError(f"{place.where} is being written by {who}.", f"another {flag}, or {ends}")


def _ends(holder: Holder) -> bool:
    deadline = time.monotonic() + ORPHAN_S
    while is_alive(holder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_alive(holder)


def _change(place: Place, found: VersionedObject) -> VersionedObject | None:
    """The next text within `stale_s`, a beat or a new holder's; None if there is none, or it is deleted."""
    deadline = time.monotonic() + place.stale_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, place.beat_s / 8, place.stale_s / 10))
        now = place.get(FILE)
        if now is None or now.data != found.data:
            return now
    return None

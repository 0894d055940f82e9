"""The lock: one live job writes to a run directory and all in it, and another job's start is refused.

A lock is a text named CLAIM in a place: a folder, or a prefix of an object store. It has its holder and a
count that the holder raises every few seconds. A holder of this machine (the same boot and PID namespace) is
dead when its process is; a suspended one is alive. One elsewhere is dead when its count does not change while
this process watches, so no clocks are compared. A holder that was cut off and returns finds another one and
stops writing. A store of checkpoints outside of the run directory is locked too, after it.

In a folder only O_EXCL and unlink are used, which every shared folder has; in a store each write is
conditional on the version before it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from fsdp.base import proc
from fsdp.base.errors import RefusedError
from fsdp.base.phases import ACTIVITIES, follows_parent
from fsdp.rundir.paths import storing, writing

log = logging.getLogger(__name__)

FILE = "CLAIM"
RELEASED = b"released\n"
"""The text of a lock that nobody holds, in a store."""
REMOVAL_S = 5.0
"""A process removes a dead lock within milliseconds, unless it was stopped or killed meanwhile."""
ORPHAN_S = 900.0
"""The time that a run whose launcher was killed has for its last save."""
TWO_RUNS = "squeue or ps shows both runs: end one of them"


# ---------------------------------------------------------------- the holder

State = Literal["alive", "dead", "orphan", "suspended"]
"""An orphan's launcher is dead: it saves and ends."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock. Process ids are comparable within one `place`, if it is not empty."""

    token: str
    host: str
    place: str
    pid: int
    born: str
    launcher: str
    job: str
    since: float
    parent: int = 0
    """The launcher's process, if this one saves and ends when that dies; else 0."""

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, started by {self.launcher}{job}, since {since}"

    def state(self) -> State:
        """Of a holder of this place. A zombie is dead; a process that /proc hides is alive."""
        seen = proc.stat(self.pid)
        if seen is None:
            try:
                os.kill(self.pid, 0)
            except OSError as error:
                return "alive" if error.errno == errno.EPERM else "dead"
            return "alive"
        if not seen.alive or seen.start_ticks != self.born:
            return "dead"
        if self.parent > 0 and seen.parent != self.parent:
            return "orphan"
        return "suspended" if seen.state in "Tt" else "alive"


_FORM = Holder("", "", "", 1, "", "", "", 0.0)


def this_holder(launcher: str, job: str = "") -> Holder:
    """This process as the holder of a lock."""
    pid, place, parent = os.getpid(), this_place(), os.getppid() if follows_parent() else 0
    seen = proc.stat(pid) if place else None
    born, token, host = "" if seen is None else seen.start_ticks, secrets.token_hex(8), socket.gethostname()
    return Holder(token, host, place, pid, born, launcher, job, time.time(), parent)


def this_place() -> str:
    """One value for all processes that share process ids; empty where the system does not show it."""
    try:
        return f"{socket.gethostname()} {proc.boot_id()} {proc.pid_namespace()}"
    except OSError:
        return ""


def read_holder(data: bytes) -> Holder | None:
    """The holder in a lock's first line; None for another form, which any user may write."""
    try:
        holder = Holder(**json.loads(data.partition(b"\n")[0]))
        str(holder)  # a time that is none
        is_whole = all(type(value) is type(getattr(_FORM, name)) for name, value in vars(holder).items())
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return holder if is_whole and 0 < holder.pid < 2**31 else None


def is_later_start(job: str, other: str) -> bool:
    """Whether `job` is a later start of the same job: `Slurm job 12, start 3, try 2`. The scheduler has then
    ended the other one, even if its processes outlive their slurmd.
    """
    form = r"(\w+ job [^\s,]+), start (\d+)(?:, try (\d+))?"
    ours, theirs = re.fullmatch(form, job, re.ASCII), re.fullmatch(form, other, re.ASCII)
    if ours is None or theirs is None or ours[1] != theirs[1]:
        return False
    return (int(ours[2]), int(ours[3] or 1)) > (int(theirs[2]), int(theirs[3] or 1))


# ---------------------------------------------------------------- the place


@dataclass(frozen=True)
class VersionedObject:
    """A small text and its version, which no other text has."""

    data: bytes
    version: str


class Place(Protocol):
    """`swap` writes the text if it has this version (None: if there is none) and returns the new version, or
    None; `drop` releases it if it has this version. ObjectStore in fsdp/checkpoint/store.py is one.
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
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        return VersionedObject(data, _version(data))

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        if self._descriptor is not None:
            # through the open file: after a takeover this writes into a file without a name
            head = data.index(b"\n") + 1
            os.pwrite(self._descriptor, data[head:], head)
            os.fsync(self._descriptor)
            found = self.get(name)
            return version if found is not None and found.version == version else None
        if version is not None and not self.drop(name, version):
            return None
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
        return _version(data)

    def drop(self, name: str, version: str) -> bool:
        """Of several processes the one that makes the second file removes the first one, and no other's."""
        second = self.path / f".{name}-dead-{version}"
        try:
            os.close(os.open(second, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            if not second.exists() or time.time() - second.stat().st_mtime < REMOVAL_S:
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


# ---------------------------------------------------------------- the held lock


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
            if self._is_renamed():
                return f"{where} is gone: it was renamed or removed"
            return f"the lock of {where} is gone: {FILE} was removed, and another job may write there"
        now = read_holder(found.data)
        if now is not None and now.token == self._holder.token:
            return None
        late = "this process did not renew its lock in time and must not write there"
        return f"{where} was taken over by {now}: {late}"

    def _is_renamed(self) -> bool:
        return isinstance(self._place, Folder) and not self._place.path.is_dir()

    def advice(self) -> str:
        """The hint of an error about a lost lock."""
        if self._is_renamed():
            back = f"mv it back to {shlex.quote(self._place.where)} if it was renamed"
            return f"{back}: the same command then resumes from its checkpoints"
        return TWO_RUNS

    def release(self) -> None:
        """Releases the lock, if this holder still has it. A failure is logged: an error may be on its way."""
        self._over.set()
        # a request to a store may be between retries; written after the release it would leave the lock
        self._thread.join(10.0)
        try:
            found = self._place.get(FILE)  # its last renewal may have been written, and its response lost
            if found is not None and _is_of(found, self._holder):
                self._place.drop(FILE, found.version)
        except Exception as error:  # each client of a store has its own classes
            log.warning("the lock %s/%s cannot be removed: %s", self._place.where, FILE, error)
        if isinstance(self._place, Folder):
            self._place.close()

    def _beat(self) -> None:
        ACTIVITIES.leave_out_this_thread()
        count, failed = 0, False
        while not self._over.wait(self._place.beat_s) and self.lost is None:
            count += 1
            try:
                self._renew(count)
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("the lock of %s cannot be renewed: %s", self._place.where, error)
                failed = True

    def _renew(self, count: int) -> None:
        try:
            version = _write(self._place, self._holder, count, self._version)
        except OSError:  # NFS gives a replaced holder ESTALE
            self.lost = self.lost_now()
            raise
        self.lost = self.lost_now() if version is None else None
        self._version = version or self._version


def _write(place: Place, holder: Holder, count: int, version: str | None) -> str | None:
    """The new version, or None if another job has the lock. A write whose response was lost has left another
    version with this token.
    """
    data = json.dumps(asdict(holder)).encode() + f"\n{count:020d}\n".encode()
    if (written := place.swap(FILE, data, version)) is not None:
        return written
    found = place.get(FILE)
    return found.version if found is not None and _is_of(found, holder) else None


def _is_of(found: VersionedObject, holder: Holder) -> bool:
    now = read_holder(found.data)
    return now is not None and now.token == holder.token


class Locks:
    """The locks of a run held as one: lost when any of them is."""

    def __init__(self, *held: Lock, copy_records: Callable[[], None] = lambda: None) -> None:
        self.held, self._copy_records = held, copy_records

    @property
    def lost(self) -> str | None:
        return next((lock.lost for lock in self.held if lock.lost is not None), None)

    def lost_now(self) -> str | None:
        return next((why for lock in self.held if (why := lock.lost_now()) is not None), None)

    def before_seal(self) -> str | None:
        """None if a checkpoint may be sealed now, after its records are copied; else the new holder."""
        if (why := self.lost_now()) is None:
            self._copy_records()
        return why

    def release(self) -> None:
        if self.lost is None:
            self._copy_records()
        for lock in reversed(self.held):
            lock.release()


# ---------------------------------------------------------------- taking it


def hold(
    run: Place | None,
    store: Place | None,
    launcher: str,
    job: str = "",
    copy_records: Callable[[], None] = lambda: None,
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
    if isinstance(store, Folder):
        path = Path(os.path.realpath(store.path))
        around = path.parent
        if path.name == "checkpoints" and any((around / name).exists() for name in (FILE, "config.toml")):
            path = around  # a run directory: its lock covers its checkpoints
        if not isinstance(run, Folder) or not path.is_relative_to(os.path.realpath(run.path)):
            yield Folder(path), "--checkpoint.dir"
    elif store is not None:
        yield store, "--checkpoint.dir"


def _acquire(place: Place, holder: Holder, ousted: set[str], flag: str) -> Lock:
    with writing(place.path / FILE) if isinstance(place, Folder) else storing(place.where, flag):
        while True:
            line, found = "", place.get(FILE)
            is_free = found is None or found.data == RELEASED
            if found is not None and not is_free:
                line = _take_over(place, found, holder, ousted, flag)
            version = None if found is None else found.version
            if (is_free or line) and (version := _write(place, holder, 0, version)) is not None:
                if line:
                    log.warning("%s", line)
                return Lock(place, holder, version, line)
            time.sleep(0.01)


def _take_over(place: Place, found: VersionedObject, holder: Holder, ousted: set[str], flag: str) -> str:
    """A line about the dead holder; empty to look again; RefusedError if the holder is alive."""
    other, hint = (
        read_holder(found.data),
        f"end that job (remove {place.where}/{FILE} only if you know it is gone)",
    )
    who, how, alive = str(other or "a holder without a name"), "it is dead", False
    if other is not None and other.token in ousted:
        how = "it has lost its run directory"
    elif other is not None and is_later_start(holder.job, other.job):
        how = f"{other.job} is over"
    elif other is not None and other.place and other.place == this_place():
        if other.state() == "orphan":
            log.warning("%s: the launcher of %s was killed: waiting until it has saved", place.where, who)
            deadline = time.monotonic() + ORPHAN_S
            while other.state() == "orphan" and time.monotonic() < deadline:
                time.sleep(0.1)
        alive = (state := other.state()) != "dead"
        if state == "suspended":
            who, hint = f"{who}, which is suspended", f"kill -CONT {other.pid} resumes it, kill -9 ends it"
    else:
        message = "%s is locked by %s: watching for %.0f s whether it is alive"
        log.warning(message, place.where, who, place.stale_s)
        now = _change(place, found)
        if other is None and now is not None and read_holder(now.data) is not None:
            return ""  # it was being written
        how, alive = f"it gave no sign for {place.stale_s:g} s", now is not None
    if alive:
        raise RefusedError(f"{place.where} is being written by {who}.", f"another {flag}, or {hint}")
    if other is not None:
        ousted.add(other.token)
    return f"{place.where}: took over from {who}: {how}"


def _change(place: Place, found: VersionedObject) -> VersionedObject | None:
    """The next text within `stale_s`, a beat or a new holder's; None if there is none, or it is released."""
    deadline = time.monotonic() + place.stale_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, place.beat_s / 8, place.stale_s / 10))
        now = place.get(FILE)
        if now is None or now.data != found.data:
            return None if now is None or now.data == RELEASED else now
    return None

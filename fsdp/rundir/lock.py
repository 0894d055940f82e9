"""The lock: one live job writes to a run directory and all in it, and another job's start is refused.

A lock is a text named CLAIM in a place: a folder, or a prefix of an object store. It has its holder and a
count that the holder raises every few seconds. A holder of this machine (the same boot and PID namespace) is
dead when its process is; a suspended one is alive. One elsewhere is dead when its count does not change while
this process watches, so no clocks are compared. A holder that was cut off and returns finds another one and
stops writing. A store of checkpoints outside of the run directory is locked too, after it.

In a folder only O_EXCL and unlink are used, which every shared folder has; in S3 the first write is
conditional. Of two jobs that take over at the same moment the last one holds: the other one finds that out
before it writes its first record (`lost_now`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from fsdp.base import proc
from fsdp.base.errors import RefusedError
from fsdp.base.phases import ACTIVITIES, follows_parent
from fsdp.rundir.history import storing, writing

log = logging.getLogger(__name__)

FILE = "CLAIM"
ORPHAN_S = 900.0
"""The time that a run whose launcher was killed has for its last save."""
TWO_RUNS = "squeue or ps shows another run: end one of them; or mv the folder back if it was renamed"


# ---------------------------------------------------------------- the holder


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

    def state(self) -> Literal["alive", "dead", "orphan"]:
        """Of a holder of this place. An orphan's launcher is dead: it saves and ends."""
        process = proc.stat(self.pid)
        if process is None or not process.alive or process.start_ticks != self.born:
            return "dead"
        return "orphan" if self.parent and process.parent != self.parent else "alive"


def this_holder(launcher: str, job: str = "") -> Holder:
    """This process as the holder of a lock."""
    pid, parent, process = os.getpid(), os.getppid() if follows_parent() else 0, proc.stat("self")
    born, host = "" if process is None else process.start_ticks, socket.gethostname()
    return Holder(secrets.token_hex(8), host, this_place(), pid, born, launcher, job, time.time(), parent)


def this_place() -> str:
    """One value for all processes that share process ids; empty where the system does not show it."""
    try:
        return f"{socket.gethostname()} {proc.boot_id()} {proc.pid_namespace()}"
    except OSError:
        return ""


def read_holder(data: bytes) -> Holder | None:
    """The holder in a lock's first line; None for another form."""
    try:
        return Holder(**json.loads(data.partition(b"\n")[0]))
    except (ValueError, TypeError):
        return None


def is_later_start(job: str, other: str) -> bool:
    """Whether `job` is a later start of the same job: `Slurm job 12, start 3, try 2`. The scheduler has then
    ended the other one, even if its processes outlive their slurmd.
    """
    (name, _, start), (other_name, _, other_start) = job.partition(", "), other.partition(", ")
    numbers, other_numbers = ([int(n) for n in re.findall(r"\d+", text)] for text in (start, other_start))
    return name == other_name and numbers > other_numbers


# ---------------------------------------------------------------- the place


class Place(Protocol):
    """`claim` makes the file unless there is one by now, or in place of a `dead` holder's; `write_small`
    renews it. ObjectStore in fsdp/checkpoint/store.py is one.
    """

    where: str
    beat_s: float
    stale_s: float
    """The holder of a count that is unchanged this long is dead: several beats."""

    def read_small(self, name: str) -> bytes | None: ...
    def claim(self, name: str, data: bytes, dead: bool) -> None: ...
    def write_small(self, name: str, data: bytes) -> None: ...
    def delete_small(self, name: str) -> None: ...


class Folder:
    """A folder as the place of a lock. It is renewed through the open file: after a takeover this writes into
    a file without a name.
    """

    beat_s, stale_s = 2.0, 20.0
    """A shared folder may cache attributes for some seconds."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.where = Path(path), str(path)
        self._file: io.FileIO | None = None

    def read_small(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def claim(self, name: str, data: bytes, dead: bool) -> None:
        if dead:
            self.delete_small(name)
        self.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._file = io.FileIO(self.path / name, "x")
            self.write_small(name, data)

    def write_small(self, name: str, data: bytes) -> None:
        assert self._file is not None
        os.pwrite(self._file.fileno(), data, 0)
        os.fsync(self._file.fileno())

    def delete_small(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


# ---------------------------------------------------------------- the held lock


class Lock:
    """The lock of a run: its directory and a store outside of it. Lost when either is. A thread for each
    place renews it until `release`.
    """

    def __init__(self, launcher: str, job: str, copy_records: Callable[[], None]) -> None:
        self.lost: str | None = None
        """The new holder, set by the last renewal: the loop reads it each step without reading the place."""
        self.took_over = ""
        """One line about the dead holder that this one replaced last; empty if there was none."""
        self._holder, self._copy_records = this_holder(launcher, job), copy_records
        self._threads: dict[Place, threading.Thread] = {}
        self._over, self._ousted = threading.Event(), set[str]()

    def lost_now(self) -> str | None:
        """None while this process holds the lock; else why not. Called before records, seals and pruning."""
        return next(filter(None, map(self._lost, self._threads)), None)

    def _lost(self, place: Place) -> str | None:
        if (text := place.read_small(FILE)) is None:
            return f"{place.where}/{FILE} is gone: it was removed, or its folder was renamed"
        if self._holds(text):
            return None
        late = "this process did not renew its lock in time and must not write there"
        return f"{place.where} was taken over by {read_holder(text)}: {late}"

    def _holds(self, text: bytes | None) -> bool:
        holder = None if text is None else read_holder(text)
        return holder is not None and holder.token == self._holder.token

    def before_seal(self) -> str | None:
        """None if a checkpoint may be sealed now, after its records are copied; else the new holder."""
        if (reason := self.lost_now()) is None:
            self._copy_records()
        return reason

    def release(self) -> None:
        """Releases what this holder still has. A failure is logged: an error may be on its way."""
        if self.lost is None:
            self._copy_records()
        self._over.set()
        for place, thread in self._threads.items():
            # a request to a store may be between retries; written after the release it would leave the lock
            thread.join(10.0)
            try:
                if self._holds(place.read_small(FILE)):
                    place.delete_small(FILE)
            except Exception as error:  # each client of a store has its own classes
                log.warning("the lock %s/%s cannot be removed: %s", place.where, FILE, error)
            if isinstance(place, Folder):
                place.close()

    def _beat(self, place: Place) -> None:
        ACTIVITIES.leave_out_this_thread()
        count, failed = 0, False
        while not self._over.wait(place.beat_s) and self.lost is None:
            count += 1
            try:
                self.lost = self._lost(place)
                if self.lost is None:
                    place.write_small(FILE, self._text(count))
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("the lock of %s cannot be renewed: %s", place.where, error)
                failed = True

    def _text(self, count: int) -> bytes:
        return json.dumps(asdict(self._holder)).encode() + f"\n{count:020d}\n".encode()

    # ------------------------------------------------------------ taking it

    def take(self, place: Place, flag: str) -> None:
        """RefusedError with a live holder. `flag` names the place."""
        with writing(place.path / FILE, flag) if isinstance(place, Folder) else storing(place.where, flag):
            while not self._holds(text := place.read_small(FILE)):
                self.took_over = "" if text is None else self._take_over(place, text, flag)
                place.claim(FILE, self._text(0), dead=text is not None)
        if self.took_over:
            log.warning("%s", self.took_over)
        self._threads[place] = threading.Thread(target=self._beat, args=(place,), name="lock", daemon=True)
        self._threads[place].start()

    def _take_over(self, place: Place, text: bytes, flag: str) -> str:
        """A line about the dead holder; RefusedError if it is alive."""
        other = read_holder(text)
        name = "a holder without a name" if other is None else str(other)
        if not (reason := self._why_dead(place, text, other)):
            hint = (
                f"another {flag}, or end that job (remove {place.where}/{FILE} only if you know it is gone)"
            )
            raise RefusedError(f"{place.where} is being written by {name}.", hint)
        if other is not None:
            self._ousted.add(other.token)
        return f"{place.where}: took over from {name}: {reason}"

    def _why_dead(self, place: Place, text: bytes, other: Holder | None) -> str:
        """Empty for a holder that is alive."""
        if other is not None and other.token in self._ousted:
            return "it has lost its run directory"
        if other is not None and is_later_start(self._holder.job, other.job):
            return f"{other.job} is over"
        if other is not None and other.place == self._holder.place != "":
            if other.state() == "orphan":
                log.warning(
                    "%s: the launcher of %s was killed: waiting until it has saved", place.where, other
                )
                deadline = time.monotonic() + ORPHAN_S
                while other.state() == "orphan" and time.monotonic() < deadline:
                    time.sleep(0.1)
            return "it is dead" if other.state() == "dead" else ""
        log.warning("%s is locked by %s: watching whether it is alive", place.where, other or "a process")
        deadline = time.monotonic() + place.stale_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, place.beat_s / 8, place.stale_s / 10))
            if (now := place.read_small(FILE)) != text:
                return "it has ended" if now is None else ""
        return f"it gave no sign for {place.stale_s:g} s"


def hold(
    run: Place | None,
    store: Place | None,
    launcher: str,
    job: str = "",
    copy_records: Callable[[], None] = lambda: None,
) -> Lock:
    """Takes the lock of a run directory, and of a store outside of it; RefusedError with a live holder.

    `copy_records` is called before each seal and at the release.
    """
    lock = Lock(launcher, job, copy_records)
    try:
        for place, flag in _places(run, store):
            lock.take(place, flag)
    except BaseException as error:
        lock.lost = str(error)  # it has no records to copy
        lock.release()
        raise
    return lock


def _places(run: Place | None, store: Place | None) -> Iterator[tuple[Place, str]]:
    """The places to lock, each with the flag that names it."""
    if run is not None:
        yield run, "--run.dir"
    if isinstance(store, Folder):
        path = Path(os.path.realpath(store.path))
        around = path.parent
        if path.name == "checkpoints" and any((around / name).exists() for name in (FILE, "config.toml")):
            path = around  # a run directory: its lock covers its checkpoints
        if isinstance(run, Folder) and path.is_relative_to(os.path.realpath(run.path)):
            return
        store = Folder(path)
    if store is not None:
        yield store, "--checkpoint.dir"

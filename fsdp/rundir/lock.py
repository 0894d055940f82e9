"""The lock of a run directory: one live job writes there, and another job's start is refused.

The lock is a file, CLAIM, with its holder and a count that the holder raises every few seconds. A dead holder
on this machine is recognised by its process; one on another machine by a count that does not change while
this process watches, so no clocks are compared. "This machine" means the same machine id, boot id and PID
namespace. If /proc does not show these (macOS, a container that masks it) or hides the holder's process
(hidepid), the count decides. A takeover replaces the file: a holder that was cut off and returns finds
another holder in it and stops writing. Only O_EXCL, link and rename are used, which every shared folder has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fsdp.base.errors import RefusedError
from fsdp.rundir.atomic_write import rename, writing
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

FILE = "CLAIM"
BEAT_S = 2.0
MOST_BYTES = 1 << 16
STALE_S = 20.0
"""The holder of a count that is unchanged this long is dead: ten beats, more than a shared folder caches."""
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


class FolderLock:
    """A held lock: a thread renews it until `release`."""

    def __init__(self, run_dir: Path, holder: Holder, descriptor: int, beat_at: int, took_over: str) -> None:
        self.holder = holder
        self.took_over = took_over
        """One line about the dead holder that this one replaced; empty if there was none."""
        self.lost: str | None = None
        """The new holder, set by the last renewal: the loop reads it each step without reading the disk."""
        self._path, self._descriptor, self._beat_at = run_dir / FILE, descriptor, beat_at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    @staticmethod
    def acquire(run_dir: Path, launcher: str, job: str = "", stale_s: float = STALE_S) -> FolderLock:
        """Take the lock, or raise RefusedError with its holder. May watch an unknown holder for `stale_s`."""
        holder = this_holder(launcher, job)
        took_over = ""
        while True:
            with writing(run_dir / FILE):
                run_dir.mkdir(parents=True, exist_ok=True)
                staged, descriptor, beat_at = _write(run_dir, holder)
                taken = False
                try:
                    taken = _create(staged, run_dir / FILE)
                finally:
                    if not taken:
                        os.close(descriptor)
                        staged.unlink(missing_ok=True)
                if taken:
                    _remove_leftovers(run_dir, os.fstat(descriptor).st_mtime)
                    return FolderLock(run_dir, holder, descriptor, beat_at, took_over)
                took_over = _clear_dead(run_dir, stale_s, job) or took_over

    def lost_now(self) -> str | None:
        """None while this process holds the lock; else why not. Called before every seal."""
        try:
            now, _ = _read_patiently(self._path)
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                return f"{self._path.parent} is gone: it was renamed or removed"
            gone = f"{FILE} was removed, and another job may write there"
            return f"the lock of {self._path.parent} is gone: {gone}"
        if now is not None and now.token == self.holder.token:
            return None
        late = "this process did not renew its lock in time and must not write there"
        return f"{self._path.parent} was taken over by {now}: {late}"

    def advice(self) -> str:
        """The hint of an error about a lost lock."""
        folder = shlex.quote(str(self._path.parent))
        if self._path.parent.is_dir():
            return TWO_RUNS
        return f"mv it back to {folder} if it was renamed: the same command then resumes from its checkpoints"

    def release(self) -> None:
        """Release the lock, unless another holder has it by now. One line if its file cannot be removed: it
        counts as a dead holder's then.
        """
        self._over.set()
        self._thread.join()
        try:
            if self.lost_now() is None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            RELEASED.add(self.holder.token)
            message = "the lock %s cannot be removed (%s): the next start here takes it over"
            log.warning(message, self._path, error.strerror)
        with contextlib.suppress(OSError):  # closed all the same: an error is about the count's bytes
            os.close(self._descriptor)

    def _beat(self) -> None:
        """Renew the lock through the open file: after a takeover this writes into a file without a name."""
        count = missed = 0
        while not self._over.wait(BEAT_S):
            count += 1
            error = self._renew(count)
            if error is not None:
                missed += 1
                if missed == 1:
                    log.warning("the lock of %s cannot be renewed: %s", self._path.parent, error)
            elif missed:
                log.warning("the lock of %s is renewed again, %d renewals failed", self._path.parent, missed)
                missed = 0

    def _renew(self, count: int) -> OSError | None:
        """Write the count, then look who holds the lock, even if the count cannot be written: NFS gives
        ESTALE for the file of a holder that was replaced.
        """
        failed = None
        try:
            os.pwrite(self._descriptor, f"{count:020d}\n".encode(), self._beat_at)
            os.fsync(self._descriptor)
        except OSError as error:
            failed = error
        try:
            self.lost = self.lost_now()
        except OSError as error:
            failed = failed or error
        return failed


def _write(run_dir: Path, holder: Holder) -> tuple[Path, int, int]:
    """Write the lock file whole, under a temporary name."""
    staged = run_dir / f".{FILE}-{holder.token}"
    text = json.dumps(asdict(holder)).encode() + b"\n"
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text + b"0" * 20 + b"\n")
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        staged.unlink(missing_ok=True)
        raise
    return staged, descriptor, len(text)


def _create(staged: Path, file: Path) -> bool:
    """Give the file its name if no other has it; of several concurrent calls one succeeds."""
    try:
        file.hardlink_to(staged)
    except FileExistsError:
        # a file server whose reply was lost repeats the link, and the second one finds the first
        if not _is_link_of(staged, file):
            return False
    except OSError:
        return _create_without_links(staged, file)
    with contextlib.suppress(OSError):  # the lock is taken, and a later start removes this name
        staged.unlink(missing_ok=True)
    return True


def _is_link_of(staged: Path, file: Path) -> bool:
    try:
        return os.path.samestat(staged.lstat(), file.lstat())
    except FileNotFoundError:  # its holder has released it
        return False


def _create_without_links(staged: Path, file: Path) -> bool:
    """For folders without hard links: create an empty file exclusively, then replace it by the whole one."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    rename(staged, file)
    return True


def _remove_leftovers(folder: Path, now: float) -> None:
    """Remove temporary files that killed starts have left. `now` is by the clock that dates the files."""
    try:
        for file in folder.iterdir():
            if LEFTOVER.fullmatch(file.name) and now - file.lstat().st_mtime > OLD_S:
                file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("temporary files of killed starts in %s cannot be removed: %s", folder, error)


def _read(file: Path) -> tuple[Holder | None, bytes]:
    """The holder (None if the file does not name one) and the whole text with its count."""
    data = read_lock_file(file)
    return read_holder(data), data


def read_lock_file(file: Path) -> bytes:
    """A FIFO or a device in its place neither blocks nor fills the memory."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def _read_patiently(file: Path) -> tuple[Holder | None, bytes]:
    """Read the lock. It may be missing for a moment, while another job checks whether it is a dead one."""
    for _ in range(5):
        try:
            return _read(file)
        except FileNotFoundError:
            time.sleep(0.1)
    return _read(file)


def _clear_dead(
    run_dir: Path, stale_s: float, job: str = "", watch: Callable[[Path, bytes, float], bool] | None = None
) -> str:
    """Remove a dead holder's lock, and return a line about it; empty if the lock is gone.

    RefusedError if the holder is alive.
    """
    file = run_dir / FILE
    try:
        holder, data = _read(file)
    except FileNotFoundError:
        if file.is_symlink():  # it leads nowhere: nobody renews it
            _remove(run_dir, b"")
        return ""
    if holder is not None and is_later_start(job, holder.job):
        alive, how = False, f"{holder.job} is over"
    else:
        ours = holder is not None and holder.place != "" and holder.place == this_place()
        known = is_alive(holder) if ours and holder is not None else None
        alive, how = known is True, "it is dead"
        if known is None:
            why = "its process is hidden from this one: " if ours else ""
            message = "%s is locked by %s: %swatching for %.0f s whether it is alive"
            log.warning(message, run_dir, holder or "a holder without a name", why, stale_s)
            alive, how = (watch or _changes)(file, data, stale_s), f"it gave no sign for {stale_s:g} s"
    if alive:
        raise RefusedError(
            f"{run_dir} is being written by {holder or 'another job'}.",
            f"another --run.dir, or end that job (remove {file} only if you know it is gone)",
        )
    _remove(run_dir, data)
    line = f"{run_dir}: took over from {holder or 'a holder without a name'}: {how}"
    log.warning(line)
    return line


def _changes(file: Path, data: bytes, stale_s: float) -> bool:
    """Whether the lock's text changes within `stale_s`: a beat, or a new holder."""
    deadline = time.monotonic() + stale_s
    while time.monotonic() < deadline:
        time.sleep(min(0.25, stale_s / 10))
        try:
            if read_lock_file(file) != data:
                return True
        except FileNotFoundError:
            return False
    return False


def _remove(run_dir: Path, data: bytes) -> None:
    """Remove this dead lock and no other.

    Of several processes one makes its second name and removes it. Where there are no hard links, or that
    process was killed meanwhile, a slower one may rename a new holder's file; it then restores it.
    """
    file, first = run_dir / FILE, data.partition(b"\n")[0]
    second = run_dir / f".{FILE}-dead-{hashlib.sha256(first).hexdigest()[:16]}"
    try:
        second.hardlink_to(file)
    except FileExistsError:
        if _vanishes(second):
            return
    except OSError:  # no hard links here, or the lock is gone
        if not file.is_symlink() and not file.exists():
            return
    aside = run_dir / f".{FILE}-dead-{secrets.token_hex(8)}"
    try:
        if not file.is_symlink() and read_lock_file(file).partition(b"\n")[0] != first:
            return
        rename(file, aside)
        # No lock is a link: this one is not another holder's.
        if not aside.is_symlink() and read_lock_file(aside).partition(b"\n")[0] != first:
            _create(aside, file)
    except FileNotFoundError:
        return
    finally:
        aside.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def _vanishes(file: Path) -> bool:
    """Whether the process that removes the lock has ended with it, within REMOVAL_S."""
    deadline = time.monotonic() + REMOVAL_S
    while file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

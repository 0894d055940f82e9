"""Who writes a run directory: one live job, and every other is refused by name.

The claim is a file that names its holder and carries a count that the holder raises every few seconds. A dead
holder of this machine is seen by its process; one elsewhere by a count that stands still while we watch,
which needs no two clocks to agree. "This machine" means the same machine id, boot id and PID namespace. Where
/proc does not give these (macOS, a container that masks it) or hides the holder's process (hidepid), the
process proves nothing and the count decides. Taking over replaces the file, so a holder that was cut off and
comes back finds another's name in it and stops writing. Only O_EXCL, link and rename are used: no lock that a
shared folder may not have.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp.base.errors import RefusedError
from fsdp.rundir.atomic_write import writing

log = logging.getLogger(__name__)

FILE = "CLAIM"
BEAT_S = 2.0
STALE_S = 20.0
"""A count that stood still this long belongs to nobody: ten beats, and longer than a shared folder caches."""


@dataclass(frozen=True)
class Holder:
    """Who holds a claim. Process ids are comparable within one `place`; an empty `place` equals no other."""

    token: str
    host: str
    place: str
    pid: int
    born: str
    launcher: str
    job: str
    since: float

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, started by {self.launcher}{job}, since {since}"


def here(launcher: str, job: str = "") -> Holder:
    """This process as a holder."""
    pid = os.getpid()
    place = this_place()
    _, born = (_state_and_birth(pid) if place else None) or ("", "")
    return Holder(secrets.token_hex(8), socket.gethostname(), place, pid, born, launcher, job, time.time())


def this_place() -> str:
    """One value for all processes that share process ids; empty where this system does not tell.

    Host names may be equal in a cluster, and machine ids where nodes boot from one image; each boot draws a
    new boot id. The first PID namespace has the same number on every machine.
    """
    try:
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return ""  # /proc of another PID namespace: its process ids are not ours
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{socket.gethostname()} {_machine_id()} {boot} {space}"


def _machine_id() -> str:
    """Empty in many containers, where the boot id alone tells machines apart."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _state_and_birth(pid: int) -> tuple[str, str] | None:
    """State and start time in the kernel's ticks, which tells a reused process id. None where /proc does not
    show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def lives(holder: Holder) -> bool | None:
    """Only to be asked of a holder of this place; None where this process cannot know. A zombie is dead."""
    seen = _state_and_birth(holder.pid)
    if seen is not None:
        state, born = seen
        return state not in "ZX" and born == holder.born
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return None  # there, and hidden: the holder, or a later process of its number


class Claim:
    """A held claim: a thread keeps it alive until `release`."""

    def __init__(self, run_dir: Path, holder: Holder, descriptor: int, beat_at: int, took_over: str) -> None:
        self.holder = holder
        self.took_over = took_over
        """One line about the dead holder that was replaced; empty if there was none."""
        self.lost: str | None = None
        """Who has it now, as the last beat found out: the loop looks each step, and asks no disk."""
        self._path, self._descriptor, self._beat_at = run_dir / FILE, descriptor, beat_at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()

    @staticmethod
    def acquire(run_dir: Path, launcher: str, job: str = "", stale_s: float = STALE_S) -> Claim:
        """Hold this run directory, or RefusedError with who does. May watch a silent holder for `stale_s`."""
        run_dir.mkdir(parents=True, exist_ok=True)
        holder = here(launcher, job)
        took_over = ""
        while True:
            with writing(run_dir / FILE):
                run_dir.mkdir(parents=True, exist_ok=True)
                staged, descriptor, beat_at = _write(run_dir, holder)
            if _create(staged, run_dir / FILE):
                return Claim(run_dir, holder, descriptor, beat_at, took_over)
            os.close(descriptor)
            staged.unlink(missing_ok=True)
            took_over = _clear_dead(run_dir, stale_s, job) or took_over

    def ousted(self) -> str | None:
        """None while the claim is ours; else who has it now. Asked before every seal."""
        try:
            now, _ = _read_patiently(self._path)
        except FileNotFoundError:
            return f"the claim on {self._path.parent} is gone: somebody removed {FILE}, and another job may write there"
        if now is not None and now.token == self.holder.token:
            return None
        return f"{self._path.parent} was taken over by {now}: this process was silent too long and must not write there"

    def release(self) -> None:
        """Give the directory back; nothing happens where another has it by now."""
        self._over.set()
        self._thread.join()
        if self.ousted() is None:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _beat(self) -> None:
        """Through the open file, never by name: after a take-over this writes into a file that nobody sees."""
        count = missed = 0
        while not self._over.wait(BEAT_S):
            count += 1
            try:
                os.pwrite(self._descriptor, f"{count:020d}\n".encode(), self._beat_at)
                os.fsync(self._descriptor)
                self.lost = self.ousted()
            except OSError as error:
                missed += 1
                if missed == 1:
                    log.warning("the claim on %s cannot be renewed: %s", self._path.parent, error)
            else:
                if missed:
                    log.warning(
                        "the claim on %s is renewed again, %d beats failed", self._path.parent, missed
                    )
                missed = 0


def _write(run_dir: Path, holder: Holder) -> tuple[Path, int, int]:
    """The claim under a name of its own, whole before it gets the name that counts."""
    staged = run_dir / f".{FILE}-{holder.token}"
    text = json.dumps(asdict(holder)).encode() + b"\n"
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text + b"0" * 20 + b"\n")
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        staged.unlink()
        raise
    return staged, descriptor, len(text)


def _create(staged: Path, claim: Path) -> bool:
    """Give it its name if nobody has that name; of many who try at once one succeeds."""
    try:
        claim.hardlink_to(staged)
    except FileExistsError:
        return False
    except OSError:
        return _create_without_links(staged, claim)
    staged.unlink()
    return True


def _create_without_links(staged: Path, claim: Path) -> bool:
    """For folders that know no hard links: an empty file made exclusively, then replaced by the whole one."""
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    staged.rename(claim)
    return True


def _read(claim: Path) -> tuple[Holder | None, bytes]:
    """The holder (None where the file does not say) and the whole text, its count included."""
    data = claim.read_bytes()
    try:
        holder = Holder(**json.loads(data.partition(b"\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return None, data
    return holder if is_sound(holder) else None, data


def is_sound(holder: Holder) -> bool:
    """Anybody may have written the file, and its values go to kill() and localtime()."""
    words = (holder.token, holder.host, holder.place, holder.born, holder.launcher, holder.job)
    if not all(isinstance(word, str) for word in words):
        return False
    pid, since = holder.pid, holder.since
    return type(pid) is int and 0 < pid < 2**31 and type(since) in (int, float) and 0 <= since < 2**32


def _read_patiently(claim: Path) -> tuple[Holder | None, bytes]:
    """Another job that mistook it for a dead one's may have it in its hand for a moment."""
    for _ in range(5):
        try:
            return _read(claim)
        except FileNotFoundError:
            time.sleep(0.1)
    return _read(claim)


def _start(job: str) -> tuple[str, int, int]:
    """`Slurm job 12, start 3, try 2` (fsdp/dist/env.py) as what can be compared; another text is the only
    start of its kind.
    """
    found = re.fullmatch(r"(Slurm job \d+), start (\d+)(?:, try (\d+))?", job)
    return (found[1], int(found[2]), int(found[3] or 1)) if found else (job, 0, 0)


def succeeds(job: str, other: str) -> bool:
    """A later start of the same job: the scheduler has ended the other, even if its processes live on without
    their slurmd.
    """
    ours, theirs = _start(job), _start(other)
    return ours[0] == theirs[0] and ours[1:] > theirs[1:]


def _clear_dead(
    run_dir: Path, stale_s: float, job: str = "", watch: Callable[[Path, bytes, float], bool] | None = None
) -> str:
    """Make way if the holder is dead, and say so; RefusedError if it lives. Empty if it went by itself."""
    claim = run_dir / FILE
    try:
        holder, data = _read(claim)
    except FileNotFoundError:
        return ""
    if holder is not None and succeeds(job, holder.job):
        alive, how = False, f"{holder.job} is over"
    else:
        ours = holder is not None and holder.place != "" and holder.place == this_place()
        known = lives(holder) if ours and holder is not None else None
        alive, how = known is True, "it is dead"
        if known is None:
            why = "its process is hidden from this one: " if ours else ""
            shown = holder or "somebody unnamed"
            words = "%s is claimed by %s: %swatching for %.0f s whether it lives"
            log.warning(words, run_dir, shown, why, stale_s)
            alive, how = (watch or _changes)(claim, data, stale_s), f"it gave no sign for {stale_s:g} s"
    if alive:
        raise RefusedError(
            f"{run_dir} is being written by {holder or 'another job'}.",
            f"another --run.dir, or end that job (remove {claim} only if you know it is gone)",
        )
    _remove(run_dir, data)
    line = f"{run_dir}: took over from {holder or 'a holder without a name'}: {how}"
    log.warning(line)
    return line


def _changes(claim: Path, data: bytes, stale_s: float) -> bool:
    """Does the claim's text change (a beat, or a new holder) while we watch?"""
    deadline = time.monotonic() + stale_s
    while time.monotonic() < deadline:
        time.sleep(min(0.25, stale_s / 10))
        try:
            if claim.read_bytes() != data:
                return True
        except FileNotFoundError:
            return False
    return False


def _remove(run_dir: Path, data: bytes) -> None:
    """Take a dead claim away, and only that one: of two who saw it dead, the slower finds another's file in
    its hand and puts it back.
    """
    aside = run_dir / f".{FILE}-dead-{secrets.token_hex(8)}"
    try:
        (run_dir / FILE).rename(aside)
    except FileNotFoundError:
        return
    if aside.read_bytes().partition(b"\n")[0] != data.partition(b"\n")[0]:
        _create(aside, run_dir / FILE)
    aside.unlink(missing_ok=True)

"""Who holds a lock: a process of a machine and of a job, whether it lives, and which start of its job it is.

"This machine" means the same machine id, boot id and PID namespace: only then are process ids comparable.
Not here: the lock and its takeover (lock.py).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp.base import proc
from fsdp.base.phases import follows_parent

RELEASED: set[str] = set()
"""Tokens of this process's locks that are released while their files remain."""


@dataclass(frozen=True)
class Holder:
    """A lock's holder. Process ids are comparable within one `place`; an empty `place` equals no other."""

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


def this_holder(launcher: str, job: str = "") -> Holder:
    """This process as the holder of a lock."""
    pid = os.getpid()
    place = this_place()
    seen = proc.stat(pid) if place else None
    born = seen.start_ticks if seen is not None else ""
    parent = os.getppid() if follows_parent() else 0
    return Holder(
        secrets.token_hex(8), socket.gethostname(), place, pid, born, launcher, job, time.time(), parent
    )


def this_place() -> str:
    """One value for all processes that share process ids; empty if this system does not show it.

    Host names may be equal in a cluster, and machine ids on nodes that boot from one image; each boot has a
    new boot id. The first PID namespace has the same number on every machine.
    """
    try:
        if not proc.shows_this_process():
            return ""  # /proc of another PID namespace: its process ids are not ours
        boot, space = proc.boot_id(), proc.pid_namespace()
    except OSError:
        return ""
    return f"{socket.gethostname()} {_machine_id()} {boot} {space}"


def _machine_id() -> str:
    """Empty in many containers, where the boot id alone distinguishes machines."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def is_alive(holder: Holder) -> bool | None:
    """Whether a holder of this place is alive; None if /proc hides it. A zombie is dead."""
    if holder.token in RELEASED:
        return False
    seen = proc.stat(holder.pid)
    if seen is not None:
        return seen.alive and seen.start_ticks == holder.born
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return None  # hidden: the holder, or a later process with its number


def is_orphan(holder: Holder) -> bool:
    """Whether the launcher of a living holder of this place is dead: the holder saves and ends."""
    seen = proc.stat(holder.pid)
    return holder.parent > 0 and seen is not None and seen.parent != holder.parent


def is_suspended(holder: Holder) -> bool:
    seen = proc.stat(holder.pid)
    return seen is not None and seen.state in "Tt"


def read_holder(data: bytes) -> Holder | None:
    """The holder in a lock's first line; None if it names none."""
    try:
        holder = Holder(**json.loads(data.partition(b"\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return None
    return holder if _is_valid(holder) else None


def _is_valid(holder: Holder) -> bool:
    """Whether the values have the right types and ranges: any user may write the file, and kill() gets its
    pid.
    """
    texts = (holder.token, holder.host, holder.place, holder.born, holder.launcher, holder.job)
    if not all(isinstance(text, str) for text in texts):
        return False
    pid, since = holder.pid, holder.since
    if type(holder.parent) is not int:
        return False
    return type(pid) is int and 0 < pid < 2**31 and type(since) in (int, float) and 0 <= since < 2**32


def _start(job: str) -> tuple[str, int, int] | None:
    """`Slurm job 12, start 3, try 2` (fsdp/dist/env.py), or another scheduler's, as comparable values; None
    for other texts.
    """
    found = re.fullmatch(r"(\w+ job [^\s,]+), start (\d+)(?:, try (\d+))?", job, re.ASCII)
    return (found[1], int(found[2]), int(found[3] or 1)) if found else None


def is_later_start(job: str, other: str) -> bool:
    """Whether `job` is a later start of the same job as `other`.

    The scheduler has then ended the other, even if its processes outlive their slurmd.
    """
    ours, theirs = _start(job), _start(other)
    return ours is not None and theirs is not None and ours[0] == theirs[0] and ours[1:] > theirs[1:]

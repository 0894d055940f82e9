"""The cache of compiled kernels, so that the next start of a job compiles nothing, on whichever node.

Each node compiles into a folder of its own, under TMPDIR or /tmp. At the start it is filled from a shared
folder in the home directory that the nodes share; behind each save rank 0 copies new kernels back, so that a
resumed run finds them. Nodes that compile into one shared folder would meet each other's locks and
half-visible files. If the home cannot be written, the node's own folder is used alone. --speed.compile_cache
DIR is used as it is, by all ranks.

Entries are code that is executed: both folders belong to the user, never to a run directory that somebody
else may have written; a folder that others can write to is refused. Not here: what is compiled (shard.py).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from fsdp.base.cache_folder import cache_folder
from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.dist.env import DistEnv
from fsdp.parallel.compiler import compiles

log = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LOCKS = "locks"


@dataclass(frozen=True)
class Places:
    """The folder that kernels are compiled to, and the shared copy for other nodes; None for none."""

    own: Path
    shared: Path | None


def places(speed: SpeedSection) -> Places | None:
    """The folders by the flag; None leaves them to torch, or to torch's own variable if it is set."""
    if speed.compile_cache == "off":
        return None
    if speed.compile_cache != "auto":
        return Places(Path(speed.compile_cache).absolute(), None)
    own = Path(tempfile.gettempdir(), f"shardrun-compile-{os.getuid()}")
    return None if _user_set(own) else Places(own, _shared_folder())


def _shared_folder() -> Path | None:
    try:
        return cache_folder("compile")
    except RuntimeError:
        return None  # no HOME, and a user without a password entry, as in many containers


def _user_set(own: Path) -> bool:
    """Whether the user has set torch's variable. torch sets it, too, to its default, as an earlier start
    in this process does.
    """
    return not os.environ.get(VARIABLE, torch_default()).startswith((torch_default(), str(own)))


def torch_default() -> str:
    return str(Path(tempfile.gettempdir(), "torchinductor_"))


def maybe_compile_cache(speed: SpeedSection, env: DistEnv) -> CompileCache | None:
    """Called before anything is compiled. Every rank writes to the node's folder: torch renames a file to
    its name when it is complete.
    """
    found = places(speed) if compiles(speed, env.device) else None
    if found is None:
        return None
    _make_own(found.own)
    before = os.environ.get(VARIABLE, "not set")
    os.environ[VARIABLE] = str(found.own)
    if before != str(found.own):
        log.info("%s: %s → %s", VARIABLE, before, found.own)
    shared = _usable(found.shared) if env.local_rank == 0 else None
    if shared is None:
        return None
    # The node's other ranks compile at their first forward, which waits for this rank's part in a collective.
    _copy_missing(shared, found.own)
    return CompileCache(found.own, shared) if env.is_main else None


def _make_own(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        what = f"--speed.compile_cache {folder} cannot be made ({error.strerror})."
        raise ConfigError(what, "--speed.compile_cache off") from None
    if _others_can_write(folder):
        raise ConfigError(
            f"--speed.compile_cache {folder} can be written by others, and what lies there is run as code.",
            f"chmod 700 {folder} if it is yours, or --speed.compile_cache off",
        )


def _others_can_write(folder: Path) -> bool:
    about = folder.stat()
    return about.st_uid != os.getuid() or bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _usable(shared: Path | None) -> Path | None:
    """The shared folder, created if missing; None, with a warning, if it cannot be used."""
    if shared is None:
        return None
    try:
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = "others can write to it" if _others_can_write(shared) else ""
    except OSError as error:
        why = str(error.strerror)
    if why:
        log.warning(
            "compiled kernels stay on this node: %s: %s. HINT: --speed.compile_cache DIR keeps them there",
            shared,
            why,
        )
    return None if why else shared


class CompileCache:
    """On rank 0: copies the node's new kernels to the shared folder."""

    def __init__(self, own: Path, shared: Path) -> None:
        self._own, self._shared = own, shared
        self._copying: threading.Thread | None = None

    def publish(self, *, wait: bool) -> None:
        """Copies on a thread, one at a time; `wait` returns when all is copied."""
        if self._copying is not None and (wait or not self._copying.is_alive()):
            self._copying.join()
            self._copying = None
        if self._copying is None:
            self._copying = threading.Thread(
                target=_copy_missing, args=(self._own, self._shared), name="compile-cache"
            )
            self._copying.start()
        if wait:
            self._copying.join()


def _copy_missing(source: Path, target: Path) -> None:
    """Copies each file that the target lacks; it has its name there when it is complete."""
    try:
        there = set(_entries(target))
        for entry in _entries(source):
            if entry not in there and not _is_locked(source, entry):
                _copy(source / entry, target / entry)
    except OSError as error:
        # With a full or missing disk the next start compiles again; no run stops.
        log.warning("compiled kernels of %s could not all be copied to %s: %s", source, target, error)


def _entries(folder: Path) -> list[Path]:
    """Files below by their relative paths, Triton's lists of files last: the files that such a list names
    exist before it.
    """
    found = []
    for current, names, files in os.walk(folder):
        names[:] = [name for name in names if name != LOCKS]
        paths = (
            Path(current, name)
            for name in files
            if not name.startswith(".") and not name.endswith((".lock", ".tmp"))
        )
        found += [path.relative_to(folder) for path in paths if not path.is_symlink()]
    return sorted(found, key=lambda entry: (entry.name.startswith("__grp__"), entry))


def _is_locked(folder: Path, entry: Path) -> bool:
    """Whether a process holds torch's lock on the output: a linker writes under the final name."""
    lock = folder / LOCKS / f"{entry.name.partition('.')[0]}.lock"
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _copy(source: Path, target: Path) -> None:
    """Not rundir/atomic_write.py: it syncs each file, and a cache has thousands; nor does it keep the mode,
    which linked kernels need. `_entries` leaves out the name aside.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        shutil.copyfile(source, aside)
        shutil.copymode(source, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)

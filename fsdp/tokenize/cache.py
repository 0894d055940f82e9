"""Files made from the data once and shared by ranks, runs and nodes: ~/.cache/shardrun/data.

A lock (flock, which ends with its process) lets one process build while others wait. Where a file system has
none, two may build at once: each writes aside, and a rename decides.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.proc import cache_folder


def digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]


def identity(path: Path) -> list[Any]:
    """What a cached file of it is known by. Reading the contents would take as long as tokenizing them."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def made_once(name: str, key: Any, make: Callable[[Path], None]) -> Path:
    """Returns the file or folder of this key in the cache; `make` writes it where it is absent.

    `make` gets the same path again after a killed start, and may continue what is there.
    """
    cached = cache_folder("data") / f"{name}-{digest(key)}"
    if cached.exists():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with locked(cached.with_name(f"{cached.name}.lock")) as alone:
            if not cached.exists():
                partial = Path(f"{cached}.partial{'' if alone else os.urandom(4).hex()}")
                make(partial)
                _sync(partial)
                try:
                    partial.rename(cached)
                except OSError:
                    if not cached.exists():  # another process was first, without a lock between them
                        raise
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = f"{cached.parent} cannot be written ({error.strerror or error})."
        raise ConfigError(reason, "XDG_CACHE_HOME=FOLDER before the command names another place") from None
    return cached


def _sync(made: Path) -> None:
    """Or a power cut could keep the name and lose the bytes, and each later start would read zeros."""
    for path in (*(file for file in made.rglob("*") if file.is_file()), made):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            if path.is_file():  # some shared file systems cannot sync a folder
                raise
        finally:
            os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Waits for the lock. Yields False on a file system without locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True

"""Files written whole or not at all, and the error for a place that cannot be written."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp.base.errors import CheckpointError, ConfigError, ShardrunError, error_number

FULL = (errno.ENOSPC, errno.EDQUOT)
WRITES_ALONE = (*FULL, errno.EROFS, errno.EFBIG)
"""Errors that no read has."""
DENIED = (errno.EACCES, errno.EPERM)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a one-line error that names the file. For the files that a start needs."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ShardrunError:
    # Path.is_dir raises below a folder that may not be searched
    folder = next(one for one in (path, *path.absolute().parents) if os.path.isdir(one))  # noqa: PTH112
    what = f"{path} cannot be written ({error.strerror})."
    if error.errno in FULL:
        hint = f"{storage_advice(error.errno, str(folder))}, then start the same command"
        return CheckpointError(what, hint, error_number=error_number(error))
    if error.errno == errno.EEXIST and error.filename is not None:  # of mkdir, which accepts a folder
        hint = f"mv {shlex.quote(str(error.filename))} to another name; --run.dir runs/NAME is another place"
        return ConfigError(f"{error.filename} is in the place of a folder.", hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigError(what, "ulimit -n 65536 before the start")
    if error.errno == errno.EFBIG:
        return ConfigError(what, f"{storage_advice(error.errno, str(folder))}, before the start")
    advice = storage_advice(error.errno or 0, str(folder)) if error.errno not in DENIED else ""
    advice = advice or f"ls -ld {_denied(folder, error)} shows who may write there"
    return ConfigError(what, f"{advice}; --run.dir runs/NAME is another place")


def _denied(folder: Path, error: OSError) -> str:
    """The folder, and a file in it that may not be opened, as words of a command."""
    file = error.filename
    shown = (folder, file) if isinstance(file, str | Path) and os.path.lexists(file) else (folder,)
    return " ".join(dict.fromkeys(shlex.quote(str(one)) for one in shown))


def storage_advice(number: int, place: str) -> str:
    """What shows or removes the cause of a write's `errno` in a folder or under a URL; empty if unknown."""
    if number == errno.EFBIG:
        return "ulimit -f unlimited lifts the limit on a file's size"
    if "://" in place:
        return "renew the credentials" if number in DENIED else ""
    folder = shlex.quote(place)
    if number in FULL:
        return f"df -h {folder} and df -i {folder} show what is full: free some"
    if number == errno.EROFS:
        return f"findmnt -T {folder} shows the mount: make it writable"
    return f"ls -ld {folder} shows who may write there" if number in DENIED else ""


def storage_shown(place: str) -> str:
    """What shows the storage of a folder or a URL that fails for another reason."""
    if "://" in place:
        return f"python -m fsdp.checkpoint {shlex.quote(place)} shows whether it answers"
    return f"findmnt -T {shlex.quote(place)} and df -h {shlex.quote(place)} show the storage"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file. A reader sees the old file or the new one, whole, even after a power failure."""
    replace_with(path, [text.encode()])


def rename(source: Path, target: Path) -> None:
    """Rename, also where a file server repeats it because its reply was lost: the second finds no source."""
    before = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        if not os.path.samestat(before, target.lstat()):
            raise


def replace_with(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the file by these bytes, synced before the rename: a file of NULs could otherwise remain."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise

"""Files written whole or not at all, and the error for a place that cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp.base.errors import CheckpointError, ConfigError, ShardrunError, error_number

FULL = (errno.ENOSPC, errno.EDQUOT)


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
    if error.errno in FULL:
        hint = f"df -h {folder} and df -i {folder} show what is full: free some, then start the same command"
        full = f"{path} cannot be written ({error.strerror})."
        return CheckpointError(full, hint, error_number=error_number(error))
    hint = f"ls -ld {folder} shows who may write there; --run.dir runs/NAME is another place"
    return ConfigError(f"{path} cannot be written ({error.strerror}).", hint)


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

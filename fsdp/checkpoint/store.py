"""Where checkpoints lie: the interface, checkpoints in a folder, and the store of a folder or URL.

A folder may be local or shared by several nodes. Renames and deletions are synced: after a power cut it has
its old state or its new one. Object stores are in object_store.py.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fsdp.base.phases import Activity, methods_announce
from fsdp.checkpoint.manifest import MANIFEST, final_name, parse_name, staging_name
from fsdp.rundir.lock import Folder, Place
from fsdp.rundir.paths import rename, replace_with

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
BLOCK = 4096
DIRECT_BYTES = 1 << 20
Buffer = bytes | memoryview


class Store(Protocol):
    """A place with one level of folders, each a checkpoint. `where` is for messages: without credentials.

    `sizes` lists a folder, `size` looks up one file (None without it): a listing may lack new files. After
    `forget` a folder is read from the storage and not from this node's memory. `write` may iterate over the
    buffers several times. Small files lie beside the folders. The records of a run directory are copied to an
    object store alone.
    """

    where: str

    def folders(self) -> list[str]: ...
    def sizes(self, folder: str) -> dict[str, int]: ...
    def size(self, folder: str, file: str) -> int | None: ...
    def read(self, folder: str, file: str) -> bytes: ...
    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None: ...
    def staging(self, step: int, attempt: str) -> str: ...
    def final(self, step: int, attempt: str) -> str: ...
    def begin(self, folder: str) -> None: ...
    def write(self, folder: str, file: str, buffers: Iterable[Buffer]) -> None: ...
    def seal(self, staged: str, final: str) -> None: ...
    def remove(self, folder: str, attempt: str) -> None: ...
    def forget(self, folder: str) -> None: ...
    def set_aside(self, folder: str, why: str) -> str: ...
    def path(self, folder: str) -> str: ...
    def read_small(self, name: str) -> bytes | None: ...
    def write_small(self, name: str, data: bytes) -> None: ...
    def delete_small(self, name: str) -> None: ...
    def fetch_records(self, run: Path) -> None: ...
    def put_records(self, run: Path) -> None: ...


@methods_announce(Activity.STORAGE)
class LocalStore:
    """Checkpoints as subfolders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def path(self, folder: str) -> str:
        return str(self.root / folder)

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if _is_folder(entry))

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()
        }

    def size(self, folder: str, file: str) -> int | None:
        """NFS looks the name up anew, where a listing may be cached."""
        path = self.root / folder / file
        return path.stat().st_size if path.is_file() else None

    def read(self, folder: str, file: str) -> bytes:
        return (self.root / folder / file).read_bytes()

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        with (self.root / folder / file).open("rb") as stream:
            stream.seek(offset)
            for view in buffers:
                if (count := stream.readinto(view)) < len(view):
                    raise EOFError(f"ends at {stream.tell()}, {len(view) - count} bytes short")

    def forget(self, folder: str) -> None:
        """Drops the folder's files from the page cache of this node."""
        with suppress(OSError):  # the read that follows meets it
            for entry in os.scandir(self.root / folder):
                with Path(entry).open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def staging(self, step: int, attempt: str) -> str:
        return staging_name(step, attempt)

    def final(self, step: int, attempt: str) -> str:
        return final_name(step)

    def begin(self, folder: str) -> None:
        """Makes an empty folder; one of an earlier save of the same attempt is deleted."""
        if os.path.lexists(self.root / folder):
            self._delete(folder)
        self.make()
        (self.root / folder).mkdir()

    def write(self, folder: str, file: str, buffers: Iterable[Buffer]) -> None:
        """Writes all buffers and syncs the file: when this returns, they survive a power cut."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self.root / folder / file, flags, 0o644)
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
                view = view[write_past_cache(descriptor, view) :]
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def seal(self, staged: str, final: str) -> None:
        """Renames the staged folder to its final name; an unsealed folder of that name is set aside first."""
        sync_folder(self.root / staged)
        if os.path.lexists(self.root / final):
            self.set_aside(final, "unsealed")
        rename(self.root / staged, self.root / final)
        sync_folder(self.root)

    def remove(self, folder: str, attempt: str) -> None:
        """Deletes the manifest first, then the folder's name, then its files. A link's target stays."""
        if (self.root / folder).is_symlink():
            self._delete(folder)
            return
        if (self.root / folder / MANIFEST).exists():
            (self.root / folder / MANIFEST).unlink(missing_ok=True)
            sync_folder(self.root / folder)  # or a power cut could keep the manifest and lose files
        base = parse_name(folder)
        gone = folder
        if base is not None and base.kind != "gone":
            gone = f"{final_name(base.step)}.gone-{attempt}{os.urandom(3).hex()}"
            rename(self.root / folder, self.root / gone)
            sync_folder(self.root)
        self._delete(gone)

    def _delete(self, folder: str) -> None:
        """Deletes a folder with its files, or a link without its target."""
        path = self.root / folder
        if path.is_symlink():
            path.unlink(missing_ok=True)
            sync_folder(self.root)
        else:
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():  # all but what cannot be deleted is; again, for the reason
                shutil.rmtree(path)

    def set_aside(self, folder: str, why: str) -> str:
        """Renames a folder to `<folder>.broken-<why>`; returns the new name."""
        stem = f"{folder}.broken-{why}"
        target, nth = stem, 1
        while os.path.lexists(self.root / target):
            nth += 1
            target = f"{stem}-{nth}"
        rename(self.root / folder, self.root / target)
        sync_folder(self.root)
        return target

    def make(self) -> None:
        """Makes the root folder if it does not exist, and syncs the name of each folder that it makes."""
        missing = [one for one in (self.root, *self.root.parents) if not one.is_dir()]
        self.root.mkdir(parents=True, exist_ok=True)
        for one in reversed(missing):
            sync_folder(one.parent)

    def read_small(self, name: str) -> bytes | None:
        file = self.root / name
        return file.read_bytes() if file.exists() else None

    def write_small(self, name: str, data: bytes) -> None:
        self.make()
        replace_with(self.root / name, [data])

    def delete_small(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def fetch_records(self, run: Path) -> None:
        """The run directory has them."""

    def put_records(self, run: Path) -> None:
        """The run directory has them."""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link that leads nowhere is none; whether a checkpoint's folder is there may not be guessed."""
    try:
        return entry.is_dir()
    except OSError as error:
        if parse_name(entry.name) is None or error.errno in (errno.ELOOP, errno.ENOTDIR):
            return False
        raise


def write_past_cache(descriptor: int, view: memoryview) -> int:
    """Writes the whole blocks of a large buffer with O_DIRECT; returns the number of bytes written.

    Through the page cache the processor would copy each byte into memory, while the training step needs both.
    Where the file system or the buffer's address does not allow it, nothing is written.
    """
    whole = len(view) // BLOCK * BLOCK
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or whole < DIRECT_BYTES:
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag)
        while done < whole:
            written = os.write(descriptor, view[done : min(whole, done + BATCH_BYTES)])
            done += written
            # a short write, as on a full disk: the rest is written the ordinary way, which raises
            if written % BLOCK:
                break
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


_unsynced: set[int] = set()
"""Devices that cannot sync a folder: each is logged once."""


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, where the file system can: some shared ones have no such request."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if (device := os.fstat(descriptor).st_dev) not in _unsynced:
            _unsynced.add(device)
            log.warning(
                "%s: this file system cannot sync a folder (%s): "
                "a power cut of its server may lose the newest checkpoint's name",
                folder,
                error.strerror,
            )
    finally:
        os.close(descriptor)


def open_store(place: str) -> Store:
    """A LocalStore for a folder, an ObjectStore for a URL."""
    scheme, colon, rest = place.partition("://")
    if not colon:
        return LocalStore(Path(place))
    if scheme in ("file", "local"):
        return LocalStore(Path(rest))
    from fsdp.checkpoint.object_store import ObjectStore  # imports fsspec

    return ObjectStore(place)


def lock_place(store: Store) -> Place:
    if isinstance(store, LocalStore):
        return Folder(store.root)
    from fsdp.checkpoint.object_store import ObjectStore

    assert isinstance(store, ObjectStore)
    return store

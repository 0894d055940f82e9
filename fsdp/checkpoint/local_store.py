"""Checkpoints in a folder, of this machine or shared. Not here: an object store (object_store.py).

Renames and deletions are synced, so that after a power cut a folder is there as it was or as it will be.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.phases import Activity, methods_announce
from fsdp.checkpoint import file_names
from fsdp.checkpoint.store import Buffer

MANY = 512  # buffers of one writev or preadv; the kernel's own limit is 1024
BATCH_BYTES = 16 << 20
BLOCK = 4096
DIRECT_BYTES = 1 << 20


@methods_announce(Activity.STORAGE)
class LocalStore:
    """A folder. What is renamed or deleted is synced, so that a power cut finds one or the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def path(self, folder: str) -> str:
        return str(self.root / folder)

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()
        }

    def read(self, folder: str, file: str) -> bytes:
        return (self.root / folder / file).read_bytes()

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        with (self.root / folder / file).open("rb", buffering=0) as stream:
            read_exactly(stream.fileno(), offset, buffers)

    def staging(self, step: int, attempt: str) -> str:
        return file_names.staging(step, attempt)

    def final(self, step: int, attempt: str) -> str:
        return file_names.final(step)

    def begin(self, folder: str) -> None:
        """An empty folder for this attempt's try; what an earlier try of the same attempt left goes."""
        if os.path.lexists(self.root / folder):
            self._delete(folder)
        (self.root / folder).mkdir(parents=True)

    def write(self, folder: str, file: str, buffers: Sequence[Buffer]) -> None:
        """All buffers, then synced: when this returns a power cut does not lose them."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self.root / folder / file, flags, 0o644)
        try:
            first, *rest = buffers
            done = write_past_cache(descriptor, memoryview(first))
            write_all(descriptor, [memoryview(first)[done:], *rest])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def seal(self, staged: str, final: str) -> None:
        """Staged becomes final in one rename; a folder of that name without a seal makes room first."""
        sync_folder(self.root / staged)
        if os.path.lexists(self.root / final):
            self.set_aside(final, "unsealed")
        (self.root / staged).rename(self.root / final)
        sync_folder(self.root)

    def remove(self, folder: str, attempt: str) -> None:
        """The seal goes first, then the name, then the bytes. Of a link only the link: what it leads to is
        not this store's.
        """
        if (self.root / folder).is_symlink():
            self._delete(folder)
            return
        if (self.root / folder / file_names.MANIFEST).exists():
            (self.root / folder / file_names.MANIFEST).unlink()
            sync_folder(self.root / folder)  # or a power cut could leave the seal and not the files
        base = file_names.parse(folder)
        gone = folder
        if base is not None and base.kind != "gone":
            gone = f"{file_names.final(base.step)}.gone-{attempt}{os.urandom(3).hex()}"
            (self.root / folder).rename(self.root / gone)
            sync_folder(self.root)
        self._delete(gone)

    def _delete(self, folder: str) -> None:
        """Delete a folder with its files, or a link without what it leads to."""
        path = self.root / folder
        if path.is_symlink():
            path.unlink()
            sync_folder(self.root)
        else:
            shutil.rmtree(path)

    def set_aside(self, folder: str, why: str) -> str:
        """Give a folder a name that says why it does not count."""
        stem = f"{folder}.broken-{why}"
        target, nth = stem, 1
        while os.path.lexists(self.root / target):
            nth += 1
            target = f"{stem}-{nth}"
        (self.root / folder).rename(self.root / target)
        sync_folder(self.root)
        return target

    def make(self) -> None:
        """The folder itself, if it is not there."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            sync_folder(self.root.parent)

    def prove(self, word: str) -> None:
        """Leave a word that every rank should see."""
        self.make()
        (self.root / f".shared-{word}").write_text(word)

    def proven(self, word: str) -> bool:
        return (self.root / f".shared-{word}").exists()

    def unprove(self, word: str) -> None:
        (self.root / f".shared-{word}").unlink(missing_ok=True)


def write_past_cache(descriptor: int, view: memoryview) -> int:
    """Write the whole blocks of a large buffer straight from its memory; returns how many bytes that was.

    Through the page cache each byte would be copied by the processor, into pages taken from whoever needs
    memory, while the step wants both. Where the file system or the buffer's place does not allow it, nothing
    is written here.
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
            # cut short, as before a full disk: the rest goes the ordinary way, and says so
            if written % BLOCK:
                break
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def write_all(descriptor: int, buffers: list[Buffer]) -> None:
    """writev until all is written: it may take less than it was given."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        written = os.writev(descriptor, views[:MANY])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def read_exactly(descriptor: int, offset: int, buffers: list[memoryview]) -> None:
    """preadv until all is read; a file that ends before is an error."""
    views = [view for view in buffers if len(view)]
    while views:
        got = os.preadv(descriptor, views[:MANY], offset)
        if got == 0:
            raise EOFError(f"ends at {offset}, {sum(map(len, views))} bytes short")
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

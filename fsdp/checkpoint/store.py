"""Where checkpoints lie: one level of folders, each a checkpoint, in a folder or under s3://bucket/prefix.

Both classes have the same methods. A LocalStore may be local or shared by several nodes: a save is staged
under another name, and the seal is a rename; renames and deletions are synced, so that after a power cut a
folder has its old state or its new one. Objects cannot be renamed: in an ObjectStore each attempt writes
under a name of its own, and the manifest, written last, is the seal. The objects inside decide the name that
a folder is listed under: without a manifest `.tmp-`, with a mark `.broken-`. Requests are retried with
growing pauses; a final failure is an OSError without secrets in its message.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsdp.base.errors import CheckpointError
from fsdp.base.object_client import error_code, is_s3, is_url, open_url, retried, without_secrets
from fsdp.base.phases import Activity, methods_announce
from fsdp.checkpoint.manifest import MANIFEST, final_name, parse_name, staging_name
from fsdp.rundir.history import replace_with
from fsdp.rundir.lock import Folder, Place

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
BLOCK = 4096
DIRECT_BYTES = 1 << 20
PART_BYTES = 16 << 20
"""Of an object's upload or read."""
MOST_PARTS = 10_000
"""Of one object in S3. A larger object than 156 GiB is written in larger parts."""
MARK = ".broken-"
REFUSED = ("PreconditionFailed", "412")
"""Codes of S3 for a conditional write of an object that exists."""
HISTORY = "history.jsonl"
RECORDS = ("config.toml", "metrics.jsonl", "saves.jsonl", HISTORY)
Buffer = bytes | memoryview
T = TypeVar("T")


@methods_announce(Activity.STORAGE)
class LocalStore:
    """Checkpoints as subfolders of `root`. `where`, of both stores, is for messages: without credentials."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def path(self, folder: str) -> str:
        return str(self.root / folder)

    def folders(self) -> list[str]:
        """Whether a checkpoint's folder is there may not be guessed: an entry that cannot be read raises."""
        return (
            sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
            if self.root.is_dir()
            else []
        )

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()
        }

    def size(self, folder: str, file: str) -> int | None:
        """Of one file, None without it. NFS may list a folder from its cache, and looks up a name."""
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
        """Drops the folder's files from the page cache of this node: the next read is the storage's."""
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
            self.remove(folder, "")
        self.make()
        (self.root / folder).mkdir()

    def write(self, folder: str, file: str, buffers: Iterable[Buffer]) -> None:
        """Writes all buffers and syncs the file: when this returns, they survive a power cut."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self.root / folder / file, flags, 0o644)
        try:
            for view in map(_bytes, buffers):
                done = write_past_cache(descriptor, view)
                while done < len(view):
                    done += os.write(descriptor, view[done:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def seal(self, staged: str, final: str) -> None:
        """Renames the staged folder to its final name; an unsealed folder of that name is set aside first."""
        sync_folder(self.root / staged)
        if os.path.lexists(self.root / final):
            self.set_aside(final, "unsealed")
        self._rename(staged, final)

    def remove(self, folder: str, attempt: str) -> None:
        """Deletes the manifest first, then the folder's name, then its files. A link's target stays."""
        path = self.root / folder
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return
        if (path / MANIFEST).exists():
            (path / MANIFEST).unlink(missing_ok=True)
            sync_folder(path)  # or a power cut could keep the manifest and lose files
        name = parse_name(folder)
        if name is not None and name.kind != "gone":
            deleted = f"{final_name(name.step)}.gone-{attempt}{os.urandom(3).hex()}"
            self._rename(folder, deleted)
            path = self.root / deleted
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():  # all but what cannot be deleted is; again, for the reason
            shutil.rmtree(path)

    def set_aside(self, folder: str, why: str) -> str:
        """Renames a folder to `<folder>.broken-<why>`; returns the new name."""
        target = f"{folder}{MARK}{why}"
        if os.path.lexists(self.root / target):
            target += f"-{os.urandom(3).hex()}"
        self._rename(folder, target)
        return target

    def _rename(self, folder: str, target: str) -> None:
        (self.root / folder).rename(self.root / target)
        sync_folder(self.root)

    def make(self) -> None:
        """Makes the root folder if it does not exist, and syncs the name of each folder that it makes."""
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.is_dir()]
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            sync_folder(folder.parent)

    def read_small(self, name: str) -> bytes | None:
        """A small file beside the folders."""
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


def _bytes(buffer: Buffer) -> memoryview:
    return memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")


def write_past_cache(descriptor: int, view: memoryview) -> int:
    """Writes the whole blocks of a large buffer with O_DIRECT; returns the number of bytes written.

    Through the page cache the processor would copy each byte into memory, while the training step needs both.
    What cannot be written so (the file system or the buffer's address does not allow it, the disk is full) is
    written the ordinary way, which raises what persists.
    """
    done, whole = 0, len(view) // BLOCK * BLOCK
    if whole < DIRECT_BYTES:
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole and not done % BLOCK:
            done += os.write(descriptor, view[done : min(whole, done + BATCH_BYTES)])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder, where the file system can: some shared ones have no such request."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- object stores


@methods_announce(Activity.STORAGE)
class ObjectStore:
    """A prefix in a bucket, through fsspec. Safe to use from several threads."""

    beat_s, stale_s = 10.0, 60.0
    """Of the lock: each renewal is a request that a cloud charges for; six take longer than retries."""

    def __init__(self, url: str) -> None:
        self.where = without_secrets(url)
        self._fs, self._root = open_url(url, CheckpointError, "--checkpoint.dir s3://bucket/prefix")

    def _retried(self, request: Callable[[], T], action: str) -> T:
        return retried(request, action, self._fs)

    def path(self, folder: str) -> str:
        return f"{self.where.rstrip('/')}/{folder}"

    def folders(self) -> list[str]:
        files = defaultdict[str, set[str]](set)
        for path in self._listing(""):
            folder, slash, file = path.partition("/")
            if slash:
                files[folder].add(file)
        return sorted(_listed_name(folder, names) for folder, names in files.items())

    def sizes(self, folder: str) -> dict[str, int]:
        listing = self._listing(_prefix(folder))
        return {path: size for path, size in listing.items() if "/" not in path and not path.startswith(MARK)}

    def size(self, folder: str, file: str) -> int | None:
        return self.sizes(folder).get(file)

    def _listing(self, folder: str) -> dict[str, int]:
        """Path below the folder → size; empty for a folder that does not exist."""
        base = f"{self._root}/{folder}".rstrip("/")

        def request() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return {}
            return {
                path[len(base) + 1 :]: int(entry["size"]) for path, entry in entries.items() if path != base
            }

        return self._retried(request, f"listing {self.path(folder)}")

    def read(self, folder: str, file: str) -> bytes:
        path = self._path(folder, file)
        return bytes(self._retried(lambda: self._fs.cat_file(path), f"reading {self.path(folder)}/{file}"))

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        """In requests of PART_BYTES, each of which may fill many small buffers."""
        path, action = self._path(folder, file), f"reading {self.path(folder)}/{file}"
        end, data = offset + sum(map(len, buffers)), memoryview(b"")
        for view in buffers:
            while view:
                if not data:
                    first, offset = offset, min(end, offset + PART_BYTES)
                    request = partial(self._fs.cat_file, path, start=first, end=offset)
                    data = memoryview(self._retried(request, action))
                    if missing := offset - first - len(data):
                        raise EOFError(f"{file} ends at {first + len(data)}, {missing} bytes short")
                taken = min(len(data), len(view))
                view[:taken] = data[:taken]
                data, view = data[taken:], view[taken:]

    def forget(self, folder: str) -> None:
        """Nothing of it is in memory."""

    def staging(self, step: int, attempt: str) -> str:
        return final_name(step, attempt)

    def final(self, step: int, attempt: str) -> str:
        return final_name(step, attempt)

    def begin(self, folder: str) -> None:
        """Deletes what an earlier save of this attempt left under the prefix."""
        if self._listing(folder):
            self.remove(folder, "")

    def write(self, folder: str, file: str, buffers: Iterable[Buffer]) -> None:
        """Iterates over the buffers anew for each retry."""
        path, size = self._path(folder, file), sum(memoryview(buffer).nbytes for buffer in buffers)
        block_size = PART_BYTES * max(1, -(-size // (PART_BYTES * MOST_PARTS)))

        def request() -> None:
            stream = self._fs.open(path, "wb", block_size=block_size)
            try:
                for view in map(_bytes, buffers):
                    for first in range(0, len(view), PART_BYTES):
                        stream.write(view[first : first + PART_BYTES])
                stream.close()
            except BaseException:
                with suppress(Exception):  # the one that ended the upload is raised
                    stream.discard()
                # The garbage collector closes an open stream, also after a retry has succeeded: closing would
                # store what has been written so far as the whole object.
                stream.closed = True
                raise

        self._retried(request, f"writing {self.path(folder)}/{file}")

    def seal(self, staged: str, final: str) -> None:
        """Nothing to do: the manifest is the seal."""

    def remove(self, folder: str, attempt: str) -> None:
        """Deletes the manifest first, then the other files."""
        for file in sorted(self._listing(_prefix(folder)), key=lambda file: file != MANIFEST):
            request = partial(self._fs.rm_file, self._path(folder, file))
            self._retried(request, f"deleting {self.path(folder)}/{file}")

    def set_aside(self, folder: str, why: str) -> str:
        path = self._path(folder, f"{MARK}{why}")
        self._retried(lambda: self._fs.pipe_file(path, b""), f"marking {self.path(folder)}")
        return f"{folder}{MARK}{why}"

    def read_small(self, name: str) -> bytes | None:
        self._fs.invalidate_cache()
        request = partial(self._fs.cat_file, f"{self._root}/{name}")
        with suppress(FileNotFoundError):
            return bytes(self._retried(request, f"reading {self.path(name)}"))
        return None

    def write_small(self, name: str, data: bytes) -> None:
        request = partial(self._fs.pipe_file, f"{self._root}/{name}", data)
        self._retried(request, f"writing {self.path(name)}")

    def claim(self, name: str, data: bytes, dead: bool) -> None:
        """In S3 the server refuses the second of two jobs; elsewhere the last one to write has the lock."""

        def request() -> None:
            try:
                self._fs.pipe_file(f"{self._root}/{name}", data, mode="create")
            except Exception as error:  # s3fs has a class for each code
                if not isinstance(error, FileExistsError) and error_code(error) not in REFUSED:
                    raise

        if dead or not is_s3(self._fs):
            self.write_small(name, data)
        else:
            self._retried(request, f"writing {self.path(name)}")

    def delete_small(self, name: str) -> None:
        self._retried(lambda: self._fs.rm_file(f"{self._root}/{name}"), f"deleting from {self.where}")

    # ------------------------------------------------------------ the records of the run that saves here

    def fetch_records(self, run: Path) -> None:
        """Writes the last start's records into a run directory that has none, as on a new pod."""
        for name in () if (run / HISTORY).exists() else RECORDS:
            if (data := self.read_small(name)) is not None:
                replace_with(run / name, [data])

    def put_records(self, run: Path) -> None:
        """Copies the records. A failure is logged: the save itself counts."""
        try:
            for file in (run / name for name in RECORDS if (run / name).is_file()):
                self.write_small(file.name, file.read_bytes())
        except OSError as error:
            log.warning("the records of %s are not all in %s: %s", run, self.where, error)

    def _path(self, folder: str, file: str) -> str:
        return f"{self._root}/{_prefix(folder)}/{file}"


def _listed_name(folder: str, files: set[str]) -> str:
    """The name that a local folder with these files would have."""
    name = parse_name(folder)
    if name is None or name.kind != "final":
        return folder
    if mark := next((file for file in files if file.startswith(MARK)), ""):
        return f"{folder}{mark}"
    return folder if MANIFEST in files else staging_name(name.step, name.attempt)


def _prefix(folder: str) -> str:
    """The prefix in the bucket of a listed folder."""
    name = parse_name(folder)
    if name is not None and name.kind == "tmp":
        return final_name(name.step, name.attempt)
    return folder if name is None else folder.partition(".")[0]


# ---------------------------------------------------------------- either

Store = LocalStore | ObjectStore


def open_store(place: str) -> Store:
    path = place.removeprefix("file://")
    return ObjectStore(path) if is_url(path) else LocalStore(Path(path))


def lock_place(store: Store) -> Place:
    return Folder(store.root) if isinstance(store, LocalStore) else store

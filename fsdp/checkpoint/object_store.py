"""Checkpoints in an object store such as s3://bucket/prefix, through fsspec.

Endpoint and keys come from fsspec's environment variables. Objects cannot be renamed: each attempt writes
under a name of its own, and the manifest, written last, is the seal. The objects inside decide the name that
a folder is listed under: without a manifest `.tmp-`, with a mark `.broken-`. Every request is retried with
growing pauses; a final failure is an OSError without secrets in its message.

A listing may lack objects that were written a moment ago (replicated stores; S3 itself lists them at once),
where reading one object finds it. So a missing manifest or file is looked up before a checkpoint counts as
unfinished or broken.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fsdp.base.errors import CheckpointError
from fsdp.base.object_client import (
    error_code,
    is_s3,
    open_url,
    redacted,
    retried,
    without_secrets,
)
from fsdp.base.phases import Activity, methods_announce
from fsdp.checkpoint.manifest import MANIFEST, final_name, parse_name, staging_name
from fsdp.rundir.lock import RELEASED, VersionedObject
from fsdp.rundir.paths import replace_with

log = logging.getLogger(__name__)

PART_BYTES = 16 << 20
MOST_PARTS = 10_000
"""Of one object in S3. A larger object than 156 GiB is written in larger parts."""
MARK = ".broken-"
REFUSED = ("PreconditionFailed", "412", "NoSuchKey")
"""Codes of a conditional write to an object of another version, or to none."""
HISTORY = "history.jsonl"
RECORDS = ("config.toml", "metrics.jsonl", "saves.jsonl", HISTORY)
T = TypeVar("T")


@methods_announce(Activity.STORAGE)
class ObjectStore:
    """A prefix in a bucket. Safe to use from several threads."""

    beat_s, stale_s = 10.0, 60.0
    """Of the lock: each renewal is a request that a cloud charges for; six take longer than retries."""

    def __init__(self, url: str) -> None:
        self.where = without_secrets(url)
        self._fs, self._root = open_url(url, CheckpointError, "--checkpoint.dir s3://bucket/prefix")
        self._conditional = is_s3(self._fs)

    def _retried(self, request: Callable[[], T], what: str) -> T:
        return retried(request, what, self._fs)

    def path(self, folder: str) -> str:
        return f"{self.where.rstrip('/')}/{folder}"

    def folders(self) -> list[str]:
        found: dict[str, set[str]] = {}
        for path in self._listing(""):
            folder, slash, file = path.partition("/")
            if slash:
                found.setdefault(folder, set()).add(file)
        for folder, files in found.items():
            if _is_unsealed(folder, files) and self.size(folder, MANIFEST) is not None:
                files.add(MANIFEST)
        return sorted(_listed_name(folder, files) for folder, files in found.items())

    def sizes(self, folder: str) -> dict[str, int]:
        listing = self._listing(_prefix(folder))
        return {path: size for path, size in listing.items() if "/" not in path and not path.startswith(MARK)}

    def size(self, folder: str, file: str) -> int | None:
        def request() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._path(folder, file))["size"])
            except FileNotFoundError:
                return None

        return self._retried(request, f"looking up an object in {self.where}")

    def _listing(self, folder: str) -> dict[str, int]:
        """Path below the folder → size; empty for a folder that does not exist."""
        base = f"{self._root}/{folder}".rstrip("/")

        def request() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return {}
            return {
                path[len(base) + 1 :]: int(entry["size"])
                for path, entry in found.items()
                if len(path) > len(base)
            }

        return self._retried(request, f"listing {self.path(folder)}")

    def read(self, folder: str, file: str) -> bytes:
        path = self._path(folder, file)
        return bytes(self._retried(lambda: self._fs.cat_file(path), f"reading {self.path(folder)}/{file}"))

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        path, what = self._path(folder, file), f"reading {self.path(folder)}/{file}"
        end = offset + sum(map(len, buffers))
        rest = [view for view in buffers if len(view)]
        while offset < end:
            stop = min(end, offset + PART_BYTES)
            data = self._retried(partial(self._fs.cat_file, path, start=offset, end=stop), what)
            if len(data) != stop - offset:
                raise EOFError(
                    f"{file} ends at {offset + len(data)}, {stop - offset - len(data)} bytes short"
                )
            rest = _pour(memoryview(data), rest)
            offset = stop

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

    def write(self, folder: str, file: str, buffers: Iterable[bytes | memoryview]) -> None:
        path = self._path(folder, file)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._retried(lambda: self._put(path, buffers, size), f"writing {self.path(folder)}/{file}")

    def _put(self, path: str, buffers: Iterable[bytes | memoryview], size: int) -> None:
        stream = self._fs.open(path, "wb", block_size=_part_bytes(size))
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
                for at in range(0, len(view), PART_BYTES):
                    stream.write(view[at : at + PART_BYTES])
            stream.close()
        except BaseException:
            self._discard(stream, path)
            raise

    def _discard(self, stream: Any, path: str) -> None:
        """Ends an upload without an object.

        Closing the stream would store what has been written so far as the whole object. The garbage collector
        closes one that is not marked as closed, whenever it finds it: also after a retry has succeeded.
        """
        try:
            stream.discard()
        except FileNotFoundError:
            pass  # the upload's end was stored, and the response lost: nothing is left of it
        except Exception as error:  # the one that ended the upload is raised
            log.warning("the unfinished upload of %s stays in the store: %s", path, redacted(error))
        finally:
            stream.closed = True

    def seal(self, staged: str, final: str) -> None:
        """Nothing to do: the manifest is the seal."""

    def remove(self, folder: str, attempt: str) -> None:
        """Deletes the manifest first, then the other files."""
        files = self._listing(_prefix(folder)).keys()
        if MANIFEST in files or self.size(folder, MANIFEST) is not None:
            self._delete(folder, MANIFEST)
        for file in sorted(files - {MANIFEST}):
            self._delete(folder, file)

    def _delete(self, folder: str, file: str) -> None:
        path = self._path(folder, file)
        self._retried(partial(self._fs.rm_file, path), f"deleting {self.path(folder)}/{file}")

    def set_aside(self, folder: str, why: str) -> str:
        path = self._path(folder, f"{MARK}{why}")
        self._retried(lambda: self._fs.pipe_file(path, b""), f"marking {self.path(folder)}")
        return f"{folder}.broken-{why}"

    def read_small(self, name: str) -> bytes | None:
        found = self.get(name)
        return None if found is None else found.data

    def write_small(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        self._retried(lambda: self._fs.pipe_file(path, data), f"writing to {self.where}")

    def delete_small(self, name: str) -> None:
        self._retried(lambda: self._fs.rm_file(f"{self._root}/{name}"), f"deleting from {self.where}")

    # ------------------------------------------------------------ the records of the run that saves here

    def fetch_records(self, run: Path) -> None:
        """Writes the last start's records into a run directory that has none, as on a new pod."""
        if (run / HISTORY).exists():
            return
        for name in RECORDS:
            if (data := self.read_small(name)) is not None:
                replace_with(run / name, [data])

    def put_records(self, run: Path) -> None:
        """Copies the records. A failure is logged: the save itself counts."""
        try:
            for file in (run / name for name in RECORDS if (run / name).is_file()):
                self.write_small(file.name, file.read_bytes())
        except OSError as error:
            log.warning("the records of %s are not all in %s: %s", run, self.where, error)

    # ------------------------------------------------------------ the lock's object, which several jobs write

    def get(self, name: str) -> VersionedObject | None:
        """A small object beside the folders, and S3's ETag or a digest; None if it does not exist.

        The ETag is read first: where the object is written between the two requests, a swap is refused.
        """
        return self._retried(lambda: self._get(f"{self._root}/{name}"), f"reading {self.path(name)}")

    def _get(self, path: str) -> VersionedObject | None:
        self._fs.invalidate_cache()
        try:
            version = self._fs.info(path).get("ETag") if self._conditional else None
            data = bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        return VersionedObject(data, version or hashlib.sha256(data).hexdigest())

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """Writes the object if it has this version (None: if it does not exist); the new version, or None.

        S3 compares and writes in one step (If-None-Match, If-Match). In another store the object is read
        first: two jobs that write between those two steps both receive a version, and the next read shows
        which one holds.
        """
        path = f"{self._root}/{name}"
        return self._retried(lambda: self._swap(path, data, version), f"writing {self.path(name)}")

    def _swap(self, path: str, data: bytes, version: str | None) -> str | None:
        if self._conditional:
            condition = {"mode": "create"} if version is None else {"IfMatch": version}
            try:
                return str(self._fs.pipe_file(path, data, **condition)["ETag"])
            except Exception as error:  # s3fs has a class for each code
                if isinstance(error, FileExistsError) or error_code(error) in REFUSED:
                    return None
                if error_code(error) != "NotImplemented":
                    raise
                self._conditional = False
                log.warning("%s has no conditional writes: two jobs may both take its lock", self.where)
        now = self._get(path)
        if (None if now is None else now.version) != version:
            return None
        self._fs.pipe_file(path, data)
        again = self._get(path)
        return again.version if again is not None and again.data == data else None

    def drop(self, name: str, version: str) -> bool:
        return self.swap(name, RELEASED, version) is not None

    def _path(self, folder: str, file: str) -> str:
        return f"{self._root}/{_prefix(folder)}/{file}"


def _is_unsealed(folder: str, files: set[str]) -> bool:
    """Whether a checkpoint's listing has neither a manifest nor a mark."""
    name = parse_name(folder)
    marked = MANIFEST in files or any(file.startswith(MARK) for file in files)
    return name is not None and name.kind == "final" and not marked


def _listed_name(folder: str, files: set[str]) -> str:
    """The name that a local folder with these files would have."""
    name = parse_name(folder)
    if name is None or name.kind != "final":
        return folder
    mark = next((file for file in files if file.startswith(MARK)), None)
    if mark is not None:
        return f"{folder}{mark}"
    return folder if MANIFEST in files else staging_name(name.step, name.attempt)


def _part_bytes(size: int) -> int:
    """The size of an upload's parts: two or three of them are held in memory."""
    return PART_BYTES * max(1, -(-size // (PART_BYTES * MOST_PARTS)))


def _prefix(folder: str) -> str:
    """The prefix in the bucket of a listed folder."""
    name = parse_name(folder)
    if name is None or name.kind == "final":
        return folder
    return final_name(name.step, name.attempt) if name.kind == "tmp" else folder.partition(".")[0]


def _pour(data: memoryview, into: list[memoryview]) -> list[memoryview]:
    """Copies data into buffers, the first ones first; returns the buffers still to be filled."""
    while len(data):
        taken = min(len(data), len(into[0]))
        into[0][:taken] = data[:taken]
        data, into = data[taken:], ([into[0][taken:]] if taken < len(into[0]) else []) + into[1:]
    return into

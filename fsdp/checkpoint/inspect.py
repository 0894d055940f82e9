"""Lists a store's checkpoints and tells whole ones from broken ones, without loading a tensor.

One rank reads the store and broadcasts the result.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

from fsdp.base.errors import CheckpointError, error_number
from fsdp.base.object_client import is_url
from fsdp.checkpoint import file_names, manifest
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.store import Store

CHUNK = 8 << 20
READERS = 8
"""A request to an object store takes some 50 ms, and a checkpoint has a file for each rank."""


@dataclass(frozen=True)
class CheckpointListing:
    """A folder with the name of a checkpoint: its manifest if it is sealed and sizes fit, else the reason."""

    folder: str
    step: int
    manifest: Manifest | None = None
    why: str = ""
    detail: str = ""
    unread: CheckpointError | None = None
    """Why it is not known whether it is whole."""


def examine(store: Store, folder: str) -> Manifest:
    """The manifest, after the checks that read no data: seal, step, names and sizes. Else Broken."""
    name = file_names.parse(folder)
    sizes = store.sizes(folder)
    own = sizes.get(file_names.MANIFEST)
    if own is None and (own := store.size(folder, file_names.MANIFEST)) is None:
        raise Broken("unsealed", "it has no manifest: it was never finished, or its seal was taken")
    if own > manifest.MOST_BYTES:
        raise Broken("manifest", f"its manifest has {own} bytes")
    found = manifest.decode(store.read(folder, file_names.MANIFEST))
    if name is not None and name.step != found.step:
        raise Broken("mixed", f"its manifest is of step {found.step}")
    for file, (size, _) in found.files.items():
        if (there := sizes.get(file)) is None and (there := store.size(folder, file)) is None:
            raise Broken("missing-file", f"{file} is missing")
        if there != size:
            raise Broken("size", f"{file} has {there} bytes and was sealed with {size}")
    return found


def classify_failure(error: Exception, where: str) -> Broken | CheckpointError:
    """Broken for damage, which is set aside. CheckpointError where the file may be whole (an error number of
    the system, full memory): the checkpoint keeps its name.
    """
    if isinstance(error, Broken):
        return error
    if isinstance(error, (EOFError, ValueError, KeyError)):
        return Broken("unreadable", f"{type(error).__name__}: {error}")
    if isinstance(error, PermissionError):
        return unreadable(where, error)
    return CheckpointError(
        f"{where} cannot be read: {type(error).__name__}: {error}.",
        "start again when the storage answers; nothing was set aside or changed",
        error_number=error_number(error),
    )


def listing_of(store: Store, folder: str) -> CheckpointListing:
    try:
        return CheckpointListing(folder, file_names.step_of(folder), examine(store, folder))
    except Broken as broken:
        return CheckpointListing(folder, file_names.step_of(folder), None, broken.why, broken.detail)
    except OSError as error:
        raise classify_failure(error, store.path(folder)) from None


def listing_or_reason(store: Store, folder: str) -> CheckpointListing:
    """As `listing_of`, where the other checkpoints are of use without this one: it may be another user's, or
    of a newer version. CheckpointError for a store that does not answer.
    """
    try:
        return listing_of(store, folder)
    except CheckpointError as error:
        if error.error_number == errno.ETIMEDOUT:
            raise
        return CheckpointListing(folder, file_names.step_of(folder), unread=error)


def finals(store: Store) -> list[str]:
    """Folders with the name of a checkpoint, the newest first."""
    parsed = [(name, folder) for folder in store.folders() if (name := file_names.parse(folder)) is not None]
    final = [(name.step, folder) for name, folder in parsed if name.kind == "final"]
    return [folder for _, folder in sorted(final, reverse=True)]


def scan(store: Store) -> list[CheckpointListing]:
    """The checkpoints, the newest first; CheckpointError for a store that cannot be listed."""
    with reading(store.where):
        return [listing_or_reason(store, folder) for folder in finals(store)]


def newest_whole(store: Store) -> CheckpointListing | None:
    """The newest whole checkpoint, if there is one. Older ones are not read: a run may keep many."""
    with reading(store.where):
        listings = (listing_of(store, folder) for folder in finals(store))
        return next((found for found in listings if found.manifest is not None), None)


@contextmanager
def reading(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(place, error) from None


def unreadable(place: str, error: OSError) -> CheckpointError:
    """The error for a store or a folder that cannot be reached or may not be read."""
    hint = f"ls -ld {shlex.quote(str(error.filename or place))} shows who may read it"
    if is_url(place):
        shown = (
            "aws s3 ls shows what they may read" if place.startswith("s3") else "see the store's own client"
        )
        hint = f"the keys are read from the environment: {shown}"
    return CheckpointError(f"{place} cannot be read: {error}.", hint, error_number=error_number(error))


def sealed_step(store: Store, step: int) -> CheckpointListing | None:
    """The whole checkpoint of this step; None if there is none."""
    folders = [folder for folder in finals(store) if file_names.step_of(folder) == step]
    listings = (listing_of(store, folder) for folder in folders)
    return next((found for found in listings if found.manifest is not None), None)


def check_file(store: Store, folder: str, file: str, size: int, crc: int) -> None:
    """Reads a whole file in pieces; Broken if its checksum differs."""
    found, buffer = 0, memoryview(bytearray(min(CHUNK, size)))
    for start in range(0, size, CHUNK):
        view = buffer[: min(CHUNK, size - start)]
        store.read_into(folder, file, start, [view])
        found = crc32(view, found)
    if found != crc:
        raise Broken("checksum", f"{file} is not what was written: its checksum differs")


def check_files(store: Store, folder: str, files: Mapping[str, tuple[int, int]]) -> None:
    """Reads whole files, READERS at a time; Broken for the first of them whose checksum differs."""
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(lambda file: check_file(store, folder, file, *files[file]), files):
            pass

"""A store's checkpoints: listed, opened, verified and pruned by one process, without loading a tensor.

One rank reads the store and broadcasts the result. Retention keeps the last k checkpoints, every n-th step's,
and the best by a metric: whole ones alone count, and old ones are deleted after the new one is sealed.
"""

from __future__ import annotations

import errno
import logging
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from zlib import crc32

from fsdp.base.errors import CheckpointError, ShardrunError, error_number, without_hint
from fsdp.base.object_client import is_url
from fsdp.checkpoint import manifest as manifests
from fsdp.checkpoint.manifest import MANIFEST, METADATA, Broken, FileRange, Manifest, SavedTensor, parse_name
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection

log = logging.getLogger(__name__)

CHUNK = 8 << 20
READERS = 8
"""A request to an object store takes some 50 ms, and a checkpoint has a file for each rank."""
MOST_OF_METADATA = 4 << 30
READ_AT_ONCE = 2 << 30
"""Bytes of checkpoints that are verified unasked: of larger ones the sizes alone are compared."""


# ---------------------------------------------------------------- errors


def classify_failure(error: Exception, path: str) -> Broken | CheckpointError:
    """Broken for damage, which is set aside. CheckpointError where the file may be whole (an error number of
    the system, full memory): the checkpoint keeps its name.
    """
    if isinstance(error, Broken):
        return error
    if isinstance(error, (EOFError, ValueError, KeyError)):
        return Broken("unreadable", f"{type(error).__name__}: {error}")
    return unreadable(path, error)


@contextmanager
def reading(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(place, error) from None


def unreadable(place: str, error: Exception) -> CheckpointError:
    """The error for a store or a folder that cannot be reached or may not be read."""
    reason, hint = (
        str(error) or type(error).__name__,
        "start again when the storage answers; nothing was changed",
    )
    if isinstance(error, PermissionError):
        hint = f"ls -ld {shlex.quote(str(error.filename or place))} shows who may read it"
    if is_url(place):
        hint = "the keys are read from the environment: aws s3 ls shows what they may read"
    return CheckpointError(f"{place} cannot be read: {reason}.", hint, error_number=error_number(error))


def one_line(error: BaseException, file: str = "") -> str:
    """File, error code and message of a failure, as far as it has them."""
    if isinstance(error, ShardrunError):
        return without_hint(error).rstrip(".")
    if not isinstance(error, OSError) or error.errno is None:
        return f"{file}: {type(error).__name__}: {str(error).partition(chr(10))[0]}".removeprefix(": ")
    number = errno.errorcode.get(error.errno, str(error.errno))
    return f"{error.filename or file}: {number}, {error.strerror}".removeprefix(": ")


# ---------------------------------------------------------------- listing


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
    sizes = store.sizes(folder)

    def size_of(file: str) -> int | None:
        return sizes[file] if file in sizes else store.size(folder, file)

    if (size := size_of(MANIFEST)) is None:
        raise Broken("unsealed", "it has no manifest: it was never finished, or its seal was taken")
    if size > manifests.MOST_BYTES:
        raise Broken("manifest", f"its manifest has {size} bytes")
    manifest = manifests.decode(store.read(folder, MANIFEST))
    if manifests.step_of(folder) not in (-1, manifest.step):
        raise Broken("mixed", f"its manifest is of step {manifest.step}")
    for file, (sealed_size, _) in manifest.files.items():
        if (size := size_of(file)) is None:
            raise Broken("missing-file", f"{file} is missing")
        if size != sealed_size:
            raise Broken("size", f"{file} has {size} bytes and was sealed with {sealed_size}")
    return manifest


def listing_of(store: Store, folder: str) -> CheckpointListing:
    step = manifests.step_of(folder)
    try:
        return CheckpointListing(folder, step, examine(store, folder))
    except Broken as broken:
        return CheckpointListing(folder, step, None, broken.why, broken.detail)
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
        return CheckpointListing(folder, manifests.step_of(folder), unread=error)


def folders_of(store: Store, kind: str) -> list[str]:
    """The folders with such a name, the newest step first."""
    named = [
        (name.step, folder)
        for folder in store.folders()
        if (name := parse_name(folder)) and name.kind == kind
    ]
    return [folder for _, folder in sorted(named, reverse=True)]


def finals(store: Store) -> list[str]:
    """Folders with the name of a checkpoint, the newest first."""
    return folders_of(store, "final")


def scan(store: Store) -> list[CheckpointListing]:
    """The checkpoints, the newest first; CheckpointError for a store that cannot be listed."""
    with reading(store.where):
        return [listing_or_reason(store, folder) for folder in finals(store)]


def newest_whole(store: Store, step: int | None = None) -> CheckpointListing | None:
    """The newest whole checkpoint, or that of a step, if there is one. Older ones are not read: a run may
    keep many.
    """
    with reading(store.where):
        folders = [folder for folder in finals(store) if step in (None, manifests.step_of(folder))]
        listings = (listing_of(store, folder) for folder in folders)
        return next((listing for listing in listings if listing.manifest is not None), None)


# ---------------------------------------------------------------- an opened checkpoint


@dataclass
class CheckpointSource:
    """An opened checkpoint. With a manifest it is a run's own, which fits in every key and dtype; without one
    it is another program's, and is not verified.
    """

    store: Store
    folder: str
    tensors: dict[str, SavedTensor]
    values: dict[str, FileRange]
    manifest: Manifest | None

    @property
    def keys(self) -> set[str]:
        return {*self.tensors, *self.values}

    @property
    def path(self) -> str:
        return self.store.path(self.folder)

    def digest(self, key: str) -> tuple[int, int]:
        """The number of elements and the digest of a tensor."""
        assert self.manifest is not None
        if key not in self.manifest.digests:
            raise Broken("digest", f"the manifest has no digest of {key}")
        numel, digest = self.manifest.digests[key]
        return numel, int(digest, 16)

    def misfit(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not of this model: {reason}.",
            "give the flags that the run had (config.toml beside it), or a new --run.dir",
        )


def read_places(store: Store, folder: str) -> bytes:
    """`.metadata`, which has the places of all tensors."""
    if (size := store.size(folder, METADATA)) is None:
        raise Broken("missing-file", f"{METADATA} is missing")
    if size > MOST_OF_METADATA:
        raise Broken("size", f"{METADATA} has {size} bytes")
    return store.read(folder, METADATA)


def opened(store: Store, folder: str, manifest: Manifest | None, data: bytes) -> CheckpointSource:
    """The source with this `.metadata`; Broken if it is damaged, unsafe, or not what was sealed."""
    if manifest is not None:
        if METADATA not in manifest.files:
            raise Broken("missing-file", f"its manifest lacks {METADATA}")
        if manifest.files[METADATA][1] != crc32(data):
            raise Broken("checksum", f"{METADATA} is not what was written: its checksum differs")
    source = CheckpointSource(store, folder, *manifests.read_metadata(data), manifest)
    for key, saved in source.tensors.items() if manifest is not None else ():
        count = math.prod(saved.size)
        if count and source.digest(key)[0] != count:  # empty tensors are not written
            raise Broken("digest", f"the manifest's digest of {key} is of another size")
    return source


def open_source(store: Store, folder: str, manifest: Manifest | None) -> CheckpointSource:
    """The source, opened by a single process."""
    return opened(store, folder, manifest, read_places(store, folder))


# ---------------------------------------------------------------- verifying


def check_file(store: Store, folder: str, file: str, size: int, crc: int) -> None:
    """Reads a whole file in pieces; Broken if its checksum differs."""
    sum_read, buffer = 0, memoryview(bytearray(min(CHUNK, size)))
    for start in range(0, size, CHUNK):
        view = buffer[: min(CHUNK, size - start)]
        store.read_into(folder, file, start, [view])
        sum_read = crc32(view, sum_read)
    if sum_read != crc:
        raise Broken("checksum", f"{file} is not what was written: its checksum differs")


def check_files(store: Store, folder: str, files: Mapping[str, tuple[int, int]]) -> None:
    """Reads whole files, READERS at a time; Broken for the first of them whose checksum differs."""
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(lambda file: check_file(store, folder, file, *files[file]), files):
            pass


def why_not_whole(store: Store, listing: CheckpointListing, read: bool) -> str | None:
    """Why it is not whole, or not known to be; `read`: every byte."""
    if listing.unread is not None:
        return without_hint(listing.unread).rstrip(".")
    if listing.manifest is None:
        return f"NOT whole: {listing.detail}"
    try:
        if read:
            check_files(store, listing.folder, listing.manifest.files)
            open_source(store, listing.folder, listing.manifest)
    except OSError as error:
        return f"cannot be read: {error}"
    except (Broken, EOFError, LookupError, ValueError, TypeError) as error:  # files that do not fit together
        return (
            f"NOT whole: {error.detail if isinstance(error, Broken) else f'{type(error).__name__}: {error}'}"
        )
    return None


def set_aside(store: Store) -> Iterator[tuple[str, str, str]]:
    """Each checkpoint that was set aside, why it is not whole, and the command that restores a whole one.
    Every byte is read where that takes seconds.
    """
    finals_there = finals(store)
    for folder in reversed(folders_of(store, "broken")):
        listing = listing_or_reason(store, folder)
        small = listing.manifest is not None and listing.manifest.bytes <= READ_AT_ONCE
        why = why_not_whole(store, listing, small)
        name, _, mark = folder.partition(".")
        words = ["mv", "-T", store.path(folder), store.path(name)]
        if is_url(store.where):
            words = ["aws", "s3", "rm", f"{store.path(name)}/.{mark}"]
        yield folder, why or "", "" if why or name in finals_there else shlex.join(words)


# ---------------------------------------------------------------- retention

MOST_FAILURES = 8
"""Deletions of one call: of a thousand in a bucket that lets nobody delete, each takes several requests."""


def superfluous(section: CheckpointSection, whole: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """The whole checkpoints that no rule keeps."""
    if not section.keep_last:
        return []
    newest = sorted(whole, key=lambda listing: listing.step, reverse=True)
    every = section.keep_every_steps
    regular = [listing for listing in newest if every and listing.step % every == 0]
    wanted = {listing.folder for listing in [*newest[: section.keep_last], *regular, *_best(section, newest)]}
    return [listing for listing in newest if listing.folder not in wanted]


def _best(section: CheckpointSection, whole: Iterable[CheckpointListing]) -> list[CheckpointListing]:
    """The best by their metric, of equal ones the newest."""
    name, sign = section.keep_best_metric.lstrip("-"), -1 if section.keep_best_metric[:1] == "-" else 1
    ranked = [
        (sign * value, -found.step, found)
        for found in whole
        if found.manifest is not None and not math.isnan(value := found.manifest.metrics.get(name, math.nan))
    ]
    return [found for _, _, found in sorted(ranked, key=lambda entry: entry[:2])[: section.keep_best]]


def prune(
    store: Store,
    section: CheckpointSection,
    attempt: str,
    known: dict[str, CheckpointListing] | None = None,
    left: dict[int, str] | None = None,
) -> list[str]:
    """Deletes what no rule keeps, and what earlier deletions left; returns the deleted folders.

    `known` are the whole checkpoints of an earlier call, by folder: of these the last ones and the best are
    examined again, since others are deleted for them. A run may keep a thousand. `left` receives the steps
    that could not be deleted, each with the reason.
    """
    if not section.keep_last:
        return []
    known = {} if known is None else known
    whole = list(_whole(store, section, known))
    unwanted = [listing.folder for listing in superfluous(section, whole)]
    unwanted += folders_of(store, "gone")
    deleted = delete(store, unwanted, attempt, {} if left is None else left)
    known.clear()
    known.update({listing.folder: listing for listing in whole if listing.folder not in deleted})
    return deleted


def delete(store: Store, folders: Iterable[str], attempt: str, left: dict[int, str]) -> list[str]:
    """Deletes these folders, as far as that is possible; returns those that it deleted.

    `left` receives the others, up to MOST_FAILURES: step → why. OSError for a server that does not answer:
    each further request would take minutes.
    """
    deleted = []
    for folder in folders:
        try:
            store.remove(folder, attempt)
            deleted.append(folder)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                raise
            reason = one_line(error).removeprefix(store.path(folder) + "/")
            left[manifests.step_of(folder)] = f"{folder}: {reason}"
            if len(left) == MOST_FAILURES:
                break
    return deleted


def _whole(
    store: Store, section: CheckpointSection, known: dict[str, CheckpointListing]
) -> Iterator[CheckpointListing]:
    """The whole checkpoints, the newest first."""
    best, count = {listing.folder for listing in _best(section, known.values())}, 0
    for folder in finals(store):
        listing = known.get(folder)
        if listing is None or folder in best or count < section.keep_last:
            listing = listing_or_reason(store, folder)
        if listing.unread is not None:
            log.warning("%s; it is neither counted nor deleted", without_hint(listing.unread).rstrip("."))
        if listing.manifest is not None:
            count += 1
            # without the lists of its files and tensors
            yield replace(listing, manifest=replace(listing.manifest, files={}, digests={}))


def sweep(store: Store, attempt: str) -> list[str]:
    """Deletes what earlier attempts left half-written or half-deleted; the caller holds the store's lock.

    What cannot be deleted is logged and left: it does not count as a checkpoint, and the run starts.
    """
    swept = []
    for folder in store.folders():
        name = parse_name(folder)
        if name is not None and name.kind in ("tmp", "gone") and name.attempt != attempt:
            try:
                store.remove(folder, attempt)
            except OSError as error:
                log.warning("%s could not be removed: %s", store.path(folder), error)
                continue
            swept.append(folder)
    return swept

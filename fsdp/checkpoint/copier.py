"""Copies of checkpoints from the nodes' own disks to the shared store, behind the training steps.

A thread on every rank makes one round for each checkpoint that was sealed locally, in the same order. In a
round rank 0 chooses the newest one that waits, each rank copies its own file, and rank 0 seals the copy in
the shared store: files, `.metadata`, manifest, rename. Not here: local saves (local_saver.py), and what a
restart does with local copies (local_tier.py).
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch

from fsdp.base.devices import WorkerThread
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, inspect, manifest
from fsdp.checkpoint.inspect import CHUNK
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.store import Store
from fsdp.dist.collectives import ObjectGroup
from fsdp.rundir.paths import storage_shown

log = logging.getLogger(__name__)

SEALED_IN_DOUBT = (
    "%s is whole in %s, but %s: a power cut may still lose it. "
    "Older checkpoints are kept there until a later copy succeeds."
)


@dataclass(frozen=True)
class CopyFailure:
    """Why a checkpoint was not copied."""

    text: str
    damaged: bool = False
    """Its local files are not what was sealed."""
    sealed: bool = False
    """The copy is whole all the same: what failed is its fsync or a response."""


def copy_file(local: LocalStore, folder: str, store: Store, staged: str, file: str, crc: int) -> None:
    """Copies one file through a mapping; Broken if it is not what was sealed."""
    path = Path(local.path(folder), file)
    if not path.stat().st_size:
        store.write(staged, file, [b""])
        return
    with path.open("rb") as stream:
        # not closed: a failed write's traceback still refers to parts of it, and closing would raise
        view = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    found = 0
    for at in range(0, len(view), CHUNK):
        found = crc32(view[at : at + CHUNK], found)
    if found != crc:
        raise Broken("checksum", f"{path} is not what was written: its checksum differs")
    store.write(staged, file, [view])


def copy_step(
    store: Store,
    local: LocalStore,
    group: ObjectGroup,
    *,
    folder: str,
    attempt: str,
    mine: Sequence[str],
    seals: bool,
    may_write: Callable[[], str | None],
) -> CopyFailure | None:
    """Copies a locally sealed checkpoint; returns why it failed, the same on every rank.

    `mine` are the files that this rank copies. One rank `seals`: rank 0 writes the manifest of that rank.
    Collective.
    """
    name = file_names.parse(folder)
    assert name is not None
    staged = store.staging(name.step, attempt)
    failure: CopyFailure | None
    failure = group.broadcast(_begin(store, staged, may_write) if group.rank == 0 else None)
    if failure is not None:
        return failure
    reports = group.gather(_copy_mine(store, local, folder, staged, mine, seals))
    final = store.final(name.step, attempt)
    failure = group.broadcast(_seal(store, staged, final, reports, may_write) if reports else None)
    return failure


def _begin(store: Store, staged: str, may_write: Callable[[], str | None]) -> CopyFailure | None:
    try:
        if (why := may_write()) is not None:
            return CopyFailure(why)
        store.begin(staged)
    except Exception as error:  # the other ranks wait for it, whatever it is
        return CopyFailure(f"rank 0: {type(error).__name__}: {error}")
    return None


def _copy_mine(
    store: Store, local: LocalStore, folder: str, staged: str, mine: Sequence[str], seals: bool
) -> CopyFailure | bytes:
    """The manifest if this rank's is sealed, else nothing."""
    if not mine and not seals:
        return b""
    try:
        data = local.read(folder, file_names.MANIFEST)
        sealed = manifest.decode(data)
        for file in mine:
            copy_file(local, folder, store, staged, file, sealed.files[file][1])
    except Broken as broken:
        return CopyFailure(broken.detail, damaged=True)
    except Exception as error:  # the other ranks wait for it, whatever it is
        return CopyFailure(f"{type(error).__name__}: {error}")
    return data if seals else b""


def _seal(
    store: Store,
    staged: str,
    final: str,
    reports: Sequence[CopyFailure | bytes],
    may_write: Callable[[], str | None],
) -> CopyFailure | None:
    failures = [(rank, one) for rank, one in enumerate(reports) if isinstance(one, CopyFailure)]
    text = "; ".join(f"rank {rank}: {one.text}" for rank, one in failures)
    data = next((one for one in reports if isinstance(one, bytes) and one), b"")
    try:
        if failures:
            store.remove(staged, "failed")
            return CopyFailure(text, all(one.damaged for _, one in failures))
        if (why := may_write()) is not None:
            return CopyFailure(why)
        store.write(staged, file_names.MANIFEST, [data])
        store.seal(staged, final)
    except Exception as error:  # the other ranks wait for it, whatever it is
        failure = CopyFailure(f"{text}; rank 0: {type(error).__name__}: {error}".removeprefix("; "))
        return failure if failures else _after_failed_seal(store, staged, final, data, failure)
    return None


def _after_failed_seal(
    store: Store, staged: str, final: str, data: bytes, failure: CopyFailure
) -> CopyFailure:
    """`sealed` if the copy is whole: an fsync may fail after the rename, and a server's response may be lost
    after it stored the manifest. Else what was copied is deleted.
    """
    try:
        if inspect.maybe_sealed(store, final) == manifest.decode(data):
            return replace(failure, sealed=True)
        store.remove(staged, "failed")
    except (OSError, Broken, CheckpointError) as error:  # the copy may be whole: nothing more is deleted
        return replace(failure, text=f"{failure.text}; then {type(error).__name__}: {error}")
    return failure


class Copier:
    """The thread. `put` after each local seal, on every rank; `close` waits for the last copy."""

    def __init__(
        self,
        store: Store,
        local: LocalStore,
        device: torch.device,
        attempt: str,
        may_write: Callable[[], str | None],
        after_copy: Callable[[], None],
    ) -> None:
        self._store, self._local, self._attempt = store, local, attempt
        self._may_write, self._after_copy = may_write, after_copy
        self._group = ObjectGroup()
        self._lock = threading.Lock()
        self._waiting = ""
        self._copying = ""
        self._failure: CopyFailure | None = None
        self.copy_seconds = 0.0
        """The duration of the last copy."""
        self._disconnected = False
        self._thread: WorkerThread[None] = WorkerThread(self._serve, "checkpoint-copy", device)

    def next(self, folder: str) -> set[str]:
        """Rank 0: this folder is copied next, in place of one that still waits; the folders to keep."""
        with self._lock:
            self._waiting = folder
            return {name for name in (self._waiting, self._copying) if name}

    def put(self) -> None:
        """A further checkpoint is sealed on all nodes."""
        self._thread.put(None)

    def close(self) -> None:
        """CheckpointError on every rank if the last copy failed: the shared store lacks the last state."""
        self._thread.stop()
        if self._failure is not None:
            raise CheckpointError(
                f"the last checkpoint is on the nodes' own disks alone: {self._failure.text}.",
                f"{storage_shown(self._store.where)}; the same command on the same nodes copies and resumes",
            )

    def _serve(self, _: None) -> None:
        if self._disconnected:
            return
        try:
            self._round()
        except Exception as error:  # the ranks are disconnected: a peer has died
            self._failure = CopyFailure(f"{type(error).__name__}: {error}")
            self._disconnected = True

    def _round(self) -> None:
        folder: str = self._group.broadcast(self._take() if self._group.rank == 0 else None)
        if not folder:
            return  # an earlier round has copied it, or a newer one
        started = time.perf_counter()
        mine = [file_names.data_file(self._group.rank)]
        mine += [file_names.METADATA] if self._group.rank == 0 else []
        failure = copy_step(
            self._store,
            self._local,
            self._group,
            folder=folder,
            attempt=self._attempt,
            mine=mine,
            seals=self._group.rank == 0,
            may_write=self._may_write,
        )
        self.copy_seconds = time.perf_counter() - started
        self._failure = None if failure is not None and failure.sealed else failure
        with self._lock:
            self._copying = ""
        if self._group.rank:
            return
        if failure is not None:
            if failure.sealed:
                log.warning(SEALED_IN_DOUBT, folder, self._store.where, failure.text)
            else:
                log.error("%s was NOT copied to %s: %s.", folder, self._store.where, failure.text)
            return
        log.info("%s copied to %s in %.1f s", folder, self._store.where, self.copy_seconds)
        self._after_copy()

    def _take(self) -> str:
        with self._lock:
            self._copying, self._waiting = self._waiting, ""
            return self._copying

"""Listings that lack new objects, as replicated object stores have: nothing whole is deleted or set aside.

The store is a stand-in: fsspec's memory, with names left out of the listings.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from zlib import crc32

import pytest

from fsdp.checkpoint import inspect, manifest
from fsdp.checkpoint.manifest import MANIFEST, METADATA
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.retention import sweep
from tests.checkpoint.manifests import a_manifest

DATA, ATTEMPT = b"tensors", "0123abcd"


class LateStore(ObjectStore):
    """Stand-in: objects whose path ends with one of `late` can be read and are not listed yet."""

    late: tuple[str, ...] = ()

    def _listing(self, folder: str) -> dict[str, int]:
        return {path: size for path, size in super()._listing(folder).items() if not path.endswith(self.late)}


@pytest.fixture
def store() -> Iterator[LateStore]:
    store = LateStore(f"memory://late-{secrets.token_hex(4)}/checkpoints")
    yield store
    if store._fs.exists(store._root):
        store._fs.rm(store._root, recursive=True)


def save(store: ObjectStore, step: int, *, seal: bool = True) -> str:
    folder = store.staging(step, ATTEMPT)
    store.write(folder, "__0_0.distcp", [DATA])
    store.write(folder, METADATA, [DATA])
    files = dict.fromkeys(["__0_0.distcp", METADATA], (len(DATA), crc32(DATA)))
    about = a_manifest(step=step, attempt=ATTEMPT, strategy="ddp", bytes=len(DATA), files=files)
    if seal:
        store.write(folder, MANIFEST, [manifest.encode(about)])
    return folder


@pytest.mark.parametrize("late", [MANIFEST, "__0_0.distcp", METADATA])
def test_a_whole_checkpoint_is_found_and_stays(store: LateStore, late: str) -> None:
    folder = save(store, 3)
    store.late = (late,)
    assert store.folders() == [folder]
    [found] = inspect.scan(store)
    assert found.manifest is not None, found.detail
    sweep(store, "another0")
    store.late = ()
    assert inspect.examine(store, folder).step == 3


def test_what_was_never_sealed_is_deleted(store: LateStore) -> None:
    whole, unfinished = save(store, 3), save(store, 6, seal=False)
    store.late = (MANIFEST,)
    sweep(store, "another0")
    store.late = ()
    assert store.folders() == [whole]
    assert store.size(unfinished, "__0_0.distcp") is None


def test_a_deleted_checkpoint_loses_its_seal_first(store: LateStore) -> None:
    """A manifest that stayed would seal a checkpoint without its files."""
    folder = save(store, 3)
    store.late = (MANIFEST,)
    store.remove(folder, ATTEMPT)
    assert store.size(folder, MANIFEST) is None

"""The Store of a folder or URL that holds checkpoints, and the place of its lock."""

from __future__ import annotations

from pathlib import Path

from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.store import Store
from fsdp.rundir.lock import Folder, Place


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

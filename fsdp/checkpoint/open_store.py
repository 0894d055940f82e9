"""From the place of checkpoints, a folder or a URL, to its Store."""

from __future__ import annotations

from pathlib import Path

from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.store import Store


def open_store(place: str) -> Store:
    """A folder, or an object store when the place is a URL."""
    scheme, colon, rest = place.partition("://")
    if not colon:
        return LocalStore(Path(place))
    if scheme in ("file", "local"):
        return LocalStore(Path(rest))
    from fsdp.checkpoint.object_store import ObjectStore  # imports fsspec, which only this needs

    return ObjectStore(place)

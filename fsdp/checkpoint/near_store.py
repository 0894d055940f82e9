"""The shared store with the files of a node's own copy of one checkpoint read from its disk."""

from __future__ import annotations

import contextlib

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, manifest
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.store import Store


class NearStore:
    """A Store for reading `found`; what is not on this node's disk comes from the shared store."""

    def __init__(self, shared: Store, local: LocalStore, found: CheckpointListing) -> None:
        self._shared, self._local = shared, local
        self.where = shared.where
        self._folder = file_names.final(found.step)
        self._near = _same_files(local, self._folder, found)

    def read(self, folder: str, file: str) -> bytes:
        if file in self._near:
            return self._local.read(self._folder, file)
        return self._shared.read(folder, file)

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        if file in self._near:
            self._local.read_into(self._folder, file, offset, buffers)
        else:
            self._shared.read_into(folder, file, offset, buffers)

    def __getattr__(self, name: str) -> object:
        """Whatever else a Store has is the shared one's."""
        return getattr(self._shared, name)


def _same_files(local: LocalStore, folder: str, found: CheckpointListing) -> frozenset[str]:
    """The files on this node's disk that are of this checkpoint, by the manifest beside them."""
    if found.manifest is None or folder not in local.folders():
        return frozenset()
    with contextlib.suppress(OSError, Broken, CheckpointError):
        if manifest.decode(local.read(folder, file_names.MANIFEST)).files == found.manifest.files:
            sizes = local.sizes(folder)
            return frozenset(
                name for name, (size, _) in found.manifest.files.items() if sizes.get(name) == size
            )
    return frozenset()

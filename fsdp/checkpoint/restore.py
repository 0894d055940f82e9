"""A restore, step by step: the newest that is whole, those before it where it is not, or one that somebody
points at.

Here live the order, and what is said of each. How a checkpoint is read is load.py's, what there is to choose
from survey.py's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import adapter_weights, discovery, file_names, inspect, load, snapshot
from fsdp.checkpoint.adapter_weights import Base
from fsdp.checkpoint.foreign_dcp import prefixes
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.store import Store
from fsdp.checkpoint.tensor_keys import Filling, Prefixes, Want, of_model, of_optimizer
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.optim.train_state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where the run goes on from, and what a person should know of it."""

    step: int
    where: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restore:
    """Of this run, from this store. Everything here is collective."""

    store: Store
    group: ObjectGroup
    env: DistEnv
    section: CheckpointSection
    sizes: MeshSizes
    config: str
    """The hash of what is trained, compared with the checkpoint's."""
    base: Base | None

    def newest(self, state: TrainState, founds: list[CheckpointListing]) -> Restored:
        notes: list[str] = []
        for found in founds:
            try:
                if found.manifest is None:
                    raise Broken(found.why, found.detail)
                return self._ours(state, self._open(self.store, found), found.manifest, notes)
            except Broken as broken:
                notes.append(self._put_aside(found, broken))
        raise discovery.none_whole(self.store, len(founds))

    def from_path(self, state: TrainState, path: str) -> Restored:
        """A checkpoint that somebody points at: ours with its counters, another program's from step 0. It is
        never renamed.
        """
        place, found = self.group.on_main(lambda: discovery.locate(path))
        try:
            source = self._open(open_store(place), found)
            if found.manifest is not None:
                return self._ours(state, source, found.manifest, [])
            where = prefixes(source.metadata, snapshot.parameter_names(state.model).values(), path)
            self._load(state, source, where, exact=False)
        except Broken as broken:
            hint = "give another, or --checkpoint.resume auto"
            raise CheckpointError(f"{path} is not whole: {broken.detail}.", hint) from None
        what = "weights and optimizer" if where.optim is not None else "weights alone"
        return Restored(0, path, (f"{what} of a checkpoint without a manifest: nothing to verify it with",))

    def _ours(
        self, state: TrainState, source: load.CheckpointSource, manifest: Manifest, notes: list[str]
    ) -> Restored:
        """One of our own, with its counters."""
        adapter_weights.check(manifest, self.base, source.store.path(source.folder))
        self._load(state, source, Prefixes(), exact=True)
        state.set_counters(dict(manifest.counters))
        differences = discovery.differences(manifest, self.sizes, self.env.world_size, self.config)
        return Restored(manifest.step, source.store.path(source.folder), (*notes, *differences))

    def _put_aside(self, found: CheckpointListing, broken: Broken) -> str:
        """Rename it on rank 0, one loud line; what is said is the same on every rank."""
        line = f"CHECKPOINT {found.folder} is NOT whole ({broken.detail})"
        if self.env.is_main:
            try:
                aside = self.store.set_aside(found.folder, broken.why)
                log.error("%s; set aside as %s. The one before it is taken.", line, aside)
            except OSError as error:
                log.error("%s; it could not be set aside (%s). The one before it is taken.", line, error)
        return line

    def _open(self, store: Store, found: CheckpointListing) -> load.CheckpointSource:
        """Rank 0 reads `.metadata`, all hear it."""
        data, failure = self.group.broadcast(
            self._read_metadata(store, found.folder) if self.env.is_main else None
        )
        if failure is not None:
            raise failure
        return load.opened(store, found.folder, found.manifest, data)

    def _read_metadata(self, store: Store, folder: str) -> tuple[bytes, load.Failure | None]:
        try:
            return store.read(folder, file_names.METADATA), None
        except OSError as error:
            return b"", inspect.of_failure(error, f"{store.path(folder)}/{file_names.METADATA}")

    def _load(self, state: TrainState, source: load.CheckpointSource, where: Prefixes, exact: bool) -> None:
        path = source.store.path(source.folder)
        wants: list[Want] = of_model(state, source.metadata, where, exact, path)
        filling: Filling | None = None
        if where.optim is not None:
            more, filling = of_optimizer(state, source.metadata, where.optim, exact, path)
            wants += more
        load.fill(source, _distinct(wants), filling, self.group, self.section.verify)


def _distinct(wants: list[Want]) -> list[Want]:
    """Tied weights have two keys and one memory: it is read once."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept = []
    for want in wants:
        spot = (want.piece.local.data_ptr(), want.piece.sizes)
        if want.piece.nbytes and spot in seen:
            continue
        seen.add(spot)
        kept.append(want)
    return kept

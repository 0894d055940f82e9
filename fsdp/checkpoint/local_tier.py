"""Checkpoints on the nodes' own disks in front of the shared store: --checkpoint.local_dir.

A save, in this order; a kill between any two steps leaves the checkpoint before it whole:

    1. every rank writes its file into DIR/NAME/step-N.tmp-… on its node, and syncs it
    2. every node's folder receives the manifest of all files, rank 0's also `.metadata`, and its name step-N
    3. training continues; a thread copies each file to the shared store's staging folder
    4. rank 0 writes the manifest there and renames: the shared checkpoint is sealed
    5. older shared checkpoints are pruned; older local folders were, once all nodes had sealed the newest

A start, in this order:

    1. rank 0 receives what each node's folders hold, and chooses the newest step whose files are all there
    2. if the shared store does not have that step, the nodes finish its copy (3 and 4), checked byte for byte
    3. all ranks restore the newest whole checkpoint of the shared store, as without local copies; each file
       that lies on a rank's node is read there

So the shared store alone decides which step all ranks resume: a node that was lost takes its part of newer
local steps with it, and the step before them is whole. Not here: the saves (local_saver.py), the thread
(copier.py) and the names of the local folders (local_names.py).
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import copier, file_names, inspect, manifest, retention
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.local_names import local_folder_name
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.near_store import NearStore
from fsdp.checkpoint.store import Store
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """One sealed folder of a node: the files that it holds whole, of all that the checkpoint has."""

    folder: str
    step: int
    seal: str
    """The digest of the manifest: equal for the folders of one checkpoint."""
    held: frozenset[str]
    total: frozenset[str]


@dataclass(frozen=True)
class LocalChoice:
    """A checkpoint that is whole over the nodes' folders, and the files that each node copies."""

    folder: str
    step: int
    files: dict[int, tuple[str, ...]]
    """By the rank that leads a node."""


class LocalTier:
    """This node's folder of checkpoints. Constructor, `catch_up` and `near` are collective."""

    def __init__(
        self, folder: Path, shared: Store, run_dir: Path, group: ObjectGroup, env: DistEnv, attempt: str
    ) -> None:
        self.leads = env.local_rank == 0
        self._shared, self._group, self._env, self._attempt = shared, group, env, attempt
        name: str = group.on_main(lambda: local_folder_name(shared, run_dir))
        self.store = LocalStore(folder / name)
        self._check()

    def _check(self) -> None:
        """CheckpointError on all ranks: a node cannot write its folder, or two nodes have the same one."""
        host, name = socket.gethostname(), f"{self._attempt}-{self._env.node_rank}"
        problem = ""
        if self.leads:
            try:
                self.store.put_marker(name)
            except OSError as error:
                problem = f"{self.store.root.parent} cannot be written on {host}: {error.strerror}"
        self._raise_any(problem)
        if self.leads:
            seen = [
                node
                for node in range(self._env.num_nodes)
                if node != self._env.node_rank and self.store.has_marker(f"{self._attempt}-{node}")
            ]
            problem = f"{self.store.root.parent} on {host} is the folder of nodes {seen} too" if seen else ""
        try:
            self._raise_any(problem)
        finally:
            self._group.gather(None)  # every node has looked
            if self.leads:
                self.store.remove_marker(name)
                retention.sweep(self.store, self._attempt)

    def _raise_any(self, problem: str) -> None:
        found = [one for one in self._group.gather(problem) or [] if one]
        said = self._group.broadcast(found[0] if found else "")
        if said:
            raise CheckpointError(
                f"--checkpoint.local_dir {said}.",
                "--checkpoint.local_dir a folder on each node's own disk; leave it out to save to "
                "--checkpoint.dir alone",
            )

    # ------------------------------------------------------------ a start

    def catch_up(self, may_write: Callable[[], str | None]) -> None:
        """Copies the newest step that is whole over the nodes' folders to the shared store, if newer."""
        gathered = self._group.gather(offers_of(self.store) if self.leads else [])
        choices = self._group.on_main(lambda: self._choices(gathered or []))
        for choice in choices:
            if self._group.rank == 0:
                log.info(
                    "step %d is on the nodes' own disks: copying it to %s", choice.step, self._shared.where
                )
            failure = copier.copy_step(
                self._shared,
                self.store,
                self._group,
                folder=choice.folder,
                attempt=self._attempt,
                mine=choice.files.get(self._group.rank, ()),
                seals=self._group.rank == min(choice.files),
                may_write=may_write,
            )
            if failure is None:
                return
            if failure.sealed:
                if self._group.rank == 0:
                    log.warning(copier.SEALED_IN_DOUBT, choice.folder, self._shared.where, failure.text)
                return
            if not failure.damaged:
                raise CheckpointError(
                    f"step {choice.step} is whole on the nodes' own disks, and could not be copied to "
                    f"{self._shared.where}: {failure.text}.",
                    "start again when the storage answers; nothing local was changed",
                )
            if self._group.rank == 0:
                log.error("step %d of the nodes' own disks is NOT whole: %s", choice.step, failure.text)

    def _choices(self, gathered: Sequence[Sequence[Offer]]) -> list[LocalChoice]:
        """Rank 0: the local checkpoints that are newer than the shared store's newest, newest first."""
        newest = inspect.newest_whole(self._shared)
        return [one for one in whole_over_nodes(gathered) if newest is None or one.step > newest.step]

    # ------------------------------------------------------------ reading

    def near(self, found: CheckpointListing) -> Store:
        """The shared store, with the files of this node's copy of the checkpoint read here."""
        return cast(Store, NearStore(self._shared, self.store, found))

    def drop(self, step: int) -> None:
        """Deletes this node's copy of a step, which is damaged."""
        folder = self.store.final(step, self._attempt)
        if self.leads and folder in self.store.folders():
            self.store.remove(folder, self._attempt)


def offers_of(store: LocalStore) -> list[Offer]:
    """The sealed folders of a node, the newest first."""
    offers = []
    for folder in inspect.finals(store):
        try:
            data = store.read(folder, file_names.MANIFEST)
            sizes, sealed = store.sizes(folder), manifest.decode(data)
        except (OSError, Broken, CheckpointError) as error:
            log.warning("%s is left out: %s", store.path(folder), error)
            continue
        held = frozenset(name for name, (size, _) in sealed.files.items() if sizes.get(name) == size)
        seal = hashlib.sha256(data).hexdigest()
        offers.append(Offer(folder, sealed.step, seal, held, frozenset(sealed.files)))
    return offers


def whole_over_nodes(gathered: Sequence[Sequence[Offer]]) -> list[LocalChoice]:
    """By rank, the folders of its node: the checkpoints whose files are all on some node, newest first."""
    together: dict[tuple[int, str], dict[int, Offer]] = {}
    for rank, offers in enumerate(gathered):
        for one in offers:
            together.setdefault((one.step, one.seal), {})[rank] = one
    found = []
    for (step, _), by_rank in sorted(together.items(), key=lambda item: -item[0][0]):
        first = next(iter(by_rank.values()))
        holders: dict[str, int] = {}
        for rank, one in by_rank.items():
            for file in one.held:
                holders.setdefault(file, rank)
        if holders.keys() == first.total:
            files = {
                rank: tuple(sorted(file for file, holder in holders.items() if holder == rank))
                for rank in set(holders.values())
            }
            found.append(LocalChoice(first.folder, step, files))
    return found

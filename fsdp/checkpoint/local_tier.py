"""Checkpoints on the nodes' own disks in front of the shared store: --checkpoint.local_dir.

A save, in this order; a kill between any two steps leaves the checkpoint before it whole:

    1. every rank writes its file into DIR/NAME/step-N.tmp-… on its node, and syncs it
    2. every node's folder receives the manifest of all files, rank 0's also `.metadata`, and its name step-N
    3. training continues; older local folders are deleted, but for one that is being copied
    4. a thread copies each file to the shared store, in rounds of all ranks, and rank 0 seals the copy there

A start, in this order:

    1. rank 0 receives what each node's folders hold, and chooses the newest step whose files are all there
    2. if the shared store does not have that step, the nodes finish its copy, checked byte for byte
    3. all ranks restore the newest whole checkpoint of the shared store, as without local copies

So the shared store alone decides which step all ranks resume: a node that was lost takes its part of newer
local steps with it, and the step before them is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp.base.devices import WorkerThread
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import inspect, manifest
from fsdp.checkpoint.manifest import MANIFEST, METADATA, Broken, Manifest, data_file, final_name, step_of
from fsdp.checkpoint.sealing import SaveOutcome, Sealing
from fsdp.checkpoint.store import LocalStore, Store
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv
from fsdp.rundir.history import storage_advice, storing

log = logging.getLogger(__name__)

TOKEN = ".local-checkpoints"
"""A file beside the shared checkpoints, deleted with them: the name of the run's local folders."""


class NodeStore(LocalStore):
    """A node's own folder: each node holds the files of its ranks alone."""

    def begin(self, folder: str) -> None:
        """Deletes the step's folder of an earlier start too: not every node sealed it."""
        earlier = final_name(step_of(folder))
        if earlier in self.folders():
            self.remove(earlier, "earlier")
        super().begin(folder)


@dataclass(frozen=True)
class Offer:
    """One sealed folder of a node: the files that it holds whole, of all that the checkpoint has."""

    step: int
    seal: str
    """The digest of the manifest: equal for the folders of one checkpoint."""
    held: frozenset[str]
    total: frozenset[str]


class LocalTier:
    """This node's folder of checkpoints, and the thread that copies. Constructor, `catch_up` and `close` are
    collective.
    """

    def __init__(
        self,
        folder: Path,
        shared: Store,
        env: DistEnv,
        group: ObjectGroup,
        attempt: str,
        lock_lost: Callable[[], str | None],
        after_copy: Callable[[SaveOutcome], None],
    ) -> None:
        self.copy_seconds = 0.0
        """The duration of the last copy."""
        self._shared, self._env, self._group, self._attempt = shared, env, group, attempt
        self._leads, self._lock_lost, self._after_copy = env.local_rank == 0, lock_lost, after_copy
        self.store = NodeStore(folder / group.on_main(lambda: local_folder_name(shared)))
        self._check_folder()
        self.sealing = Sealing(
            self.store, group, attempt, lock_lost, self._after_seal, leads=self._leads, shared=shared
        )
        self._copy_group = ObjectGroup()
        self._lock = threading.Lock()
        self._waiting = self._copying = -1
        self._failure = ""
        self._disconnected = False
        self._thread: WorkerThread[None] = WorkerThread(self._copy_next, "checkpoint-copy", env.device)

    def _check_folder(self) -> None:
        """CheckpointError on all ranks: a node cannot write its folder, or two nodes have the same one."""
        mark, place = self.store.root / f".node-{self._attempt}", self.store.root.parent
        problem = ""
        try:
            if self._leads:
                self.store.make()
                mark.touch(exist_ok=False)
        except FileExistsError:
            problem = f"{place} on {socket.gethostname()} is another node's folder too"
        except OSError as error:
            problem = f"{place} cannot be written on {socket.gethostname()}: {error.strerror}"
        problems = self._group.broadcast(list(filter(None, self._group.gather(problem) or [])))
        if self._leads and not problem:
            mark.unlink(missing_ok=True)
            inspect.sweep(self.store, self._attempt)
        if problems:
            hint = "--checkpoint.local_dir a folder on each node's own disk; leave it out to save to"
            raise CheckpointError(f"--checkpoint.local_dir {problems[0]}.", f"{hint} --checkpoint.dir alone")

    # ------------------------------------------------------------ a start

    def catch_up(self) -> None:
        """Copies the newest step that is whole over the nodes' folders to the shared store, if newer."""
        gathered = self._group.gather(offers_of(self.store) if self._leads else []) or []

        def newer() -> list[tuple[int, dict[str, int]]]:
            newest = inspect.newest_whole(self._shared)
            return [whole for whole in whole_over_nodes(gathered) if newest is None or whole[0] > newest.step]

        for step, holders in self._group.on_main(newer):
            if self._group.rank == 0:
                log.info("step %d is on the nodes' own disks: copying it", step)
            rank, first = self._group.rank, min(holders.values())
            files = [file for file, holder in holders.items() if holder == rank]
            outcome = self._copy(self._group, step, files, rank == first)
            if outcome.path:
                return
            if not outcome.damaged:
                raise CheckpointError(
                    f"step {step} is whole on the nodes' own disks, and could not be copied to "
                    f"{self._shared.where}: {outcome.failure}.",
                    "start again when the storage answers; nothing local was changed",
                )

    # ------------------------------------------------------------ after a save

    def _after_seal(self, outcome: SaveOutcome) -> None:
        """Every node has sealed the newest: it is copied next, in place of one that still waits, and the
        others are deleted.
        """
        with self._lock:
            self._waiting = outcome.step
            keep = {self._waiting, self._copying}
        keep = self._group.broadcast(keep)
        if self._leads:
            others = [folder for folder in inspect.finals(self.store) if step_of(folder) not in keep]
            left: dict[int, str] = {}
            inspect.delete(self.store, others, self._attempt, left)
            for why in left.values():
                log.warning("%s: not deleted: %s", self.store.root, why)
        self._thread.put(None)

    def _copy_next(self, _: None) -> None:
        """A round of all ranks: rank 0 chooses the newest folder that waits, if an earlier one did not."""
        group = self._copy_group
        if self._disconnected:
            return
        with self._lock:
            self._copying, self._waiting = self._waiting, -1
        try:
            step: int = group.broadcast(self._copying)
            if step < 0:
                return
            started = time.perf_counter()
            files = [data_file(group.rank), *[METADATA] * (group.rank == 0)]
            self._failure = self._copy(group, step, files, group.rank == 0).failure
            self.copy_seconds = time.perf_counter() - started
            if group.rank == 0 and not self._failure:
                log.info("step %d copied to %s in %.1f s", step, self._shared.where, self.copy_seconds)
        except Exception as error:  # the ranks are disconnected: a peer has died
            self._disconnected, self._failure = True, f"{type(error).__name__}: {error}"
        with self._lock:
            self._copying = -1

    def close(self) -> None:
        """CheckpointError on every rank if the last copy failed: the shared store lacks the last state."""
        self._thread.stop()
        if self._failure:
            raise CheckpointError(
                f"the last checkpoint is on the nodes' own disks alone: {self._failure}.",
                f"{storage_advice(errno.EIO, self._shared.where)}; the same command copies and resumes",
            )

    # ------------------------------------------------------------ a copy

    def _copy(self, group: ObjectGroup, step: int, files: Sequence[str], sends: bool) -> SaveOutcome:
        """Copies a locally sealed checkpoint: `files` are this rank's, one rank `sends` the manifest."""
        leads, folder = group.rank == 0, final_name(step)
        sealing = Sealing(self._shared, group, self._attempt, self._lock_lost, self._after_copy, leads=leads)
        write = partial(self._copy_files, folder, files, sends)
        outcome = sealing.run(step, write, lambda _, sent: (next(filter(None, sent)), 0))
        if leads and outcome.failure:
            log.error("%s was NOT copied to %s: %s.", folder, self._shared.where, outcome.failure)
        return outcome

    def _copy_files(self, folder: str, files: Sequence[str], sends: bool, staged: str) -> bytes:
        if not files and not sends:
            return b""
        data = self.store.read(folder, MANIFEST)
        sealed = manifest.decode(data)
        for file in files:
            copy_file(self.store, folder, self._shared, staged, file, *sealed.files[file])
        return data if sends else b""


def copy_file(
    local: LocalStore, folder: str, store: Store, staged: str, file: str, size: int, crc: int
) -> None:
    """Copies one file through a mapping; Broken if it is not what was sealed."""
    inspect.check_file(local, folder, file, size, crc)
    with Path(local.path(folder), file).open("rb") as stream:
        # not closed: a failed write's traceback still refers to parts of it, and closing would raise
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    store.write(staged, file, [memoryview(mapped)])


def offers_of(store: LocalStore) -> list[Offer]:
    """The sealed folders of a node, the newest first."""
    offers = []
    for folder in inspect.finals(store):
        try:
            data, sealed, held = _held(store, folder)
        except (OSError, Broken, CheckpointError) as error:
            log.warning("%s is left out: %s", store.path(folder), error)
            continue
        offers.append(Offer(sealed.step, hashlib.sha256(data).hexdigest(), held, frozenset(sealed.files)))
    return offers


def _held(store: LocalStore, folder: str) -> tuple[bytes, Manifest, frozenset[str]]:
    """The manifest in a node's folder, as written and decoded, and its files that are there whole."""
    data = store.read(folder, MANIFEST)
    sizes, sealed = store.sizes(folder), manifest.decode(data)
    held = {name for name, (size, _) in sealed.files.items() if sizes.get(name) == size}
    return data, sealed, frozenset(held)


def whole_over_nodes(gathered: Sequence[Sequence[Offer]]) -> Iterator[tuple[int, dict[str, int]]]:
    """Each checkpoint whose files are all on some node, newest first: its step, and each file's rank.

    `gathered` has by rank the folders of its node.
    """
    kinds = {(offer.step, offer.seal): offer.total for offers in gathered for offer in offers}
    for (step, seal), total in sorted(kinds.items(), key=lambda kind: -kind[0][0]):
        holders = {
            file: rank
            for rank, offers in reversed(list(enumerate(gathered)))
            for offer in offers
            if (offer.step, offer.seal) == (step, seal)
            for file in offer.held
        }
        if holders.keys() == total:
            yield step, holders


def local_folder_name(shared: Store) -> str:
    """The name of the local folders of the run with these checkpoints. Called under the store's lock.

    A new run in the place of a deleted one must not resume the old one's local checkpoints, and neither must
    a copy of its folder. A link or a rename leaves the inode, and a file system may number its inodes anew
    when it is mounted.
    """
    place, inode = shared.where, 0
    with storing(place):
        if isinstance(shared, LocalStore):
            shared.make()
            place, inode = str(shared.root.resolve()), shared.root.stat().st_ino
        name = f"shardrun-{secrets.token_hex(8)}"
        # Anyone may have written the file: its name becomes a folder's.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(shared.read_small(TOKEN) or b"")
            same = known["place"] == place or (inode and known["inode"] == inode)
            if same and re.fullmatch("shardrun-[0-9a-f]{16}", known["name"]):
                name = known["name"]
        text = json.dumps({"name": name, "place": place, "inode": inode})
        shared.write_small(TOKEN, f"{text}\n".encode())
    return name

"""What rank 0 finds before training: the run's checkpoints, the one at a PATH, whether storage is shared.

All functions but `check_shared` are local: ObjectGroup.on_main runs them on rank 0 and broadcasts the result.
"""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import torch

from fsdp.base.errors import CheckpointError, without_hint
from fsdp.base.object_client import is_url
from fsdp.base.text import listed
from fsdp.checkpoint import file_names, inspect, metadata, retention
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.mesh import MeshSizes
from fsdp.rundir.paths import storing

log = logging.getLogger(__name__)

READ_AT_ONCE = 2 << 30
"""Bytes of checkpoints that are verified unasked: of larger ones the sizes alone are compared."""


def list_checkpoints(store: Store, section: CheckpointSection, attempt: str) -> list[str]:
    """The run's checkpoints, the newest first, after the unfinished ones of earlier attempts are deleted."""
    try:
        swept = retention.sweep(store, attempt)
        folders = inspect.finals(store)
        broken = broken_folders(store)
    except OSError as error:
        raise CheckpointError(f"{store.where} cannot be read: {error}.", "--checkpoint.dir FOLDER") from None
    if swept:
        log.info("deleted unfinished checkpoints of earlier attempts: %s", ", ".join(swept))
    if section.resume == "never" and (folders or broken):
        folder = folders[0] if folders else broken[-1]
        raise CheckpointError(
            f"--checkpoint.resume never, but {store.where} holds {folder}: "
            "the two runs' checkpoints would mix.",
            "--checkpoint.resume auto to resume, or another --run.dir for a new run",
        )
    if broken and not folders:
        refuse(store)
    return folders


def refuse(
    store: Store, damaged: Mapping[str, Broken] = MappingProxyType({}), older: Sequence[str] = ()
) -> NoReturn:
    """CheckpointError: the newest checkpoints are damaged, or all that there are were set aside."""
    states = [f"{folder}: {broken.detail}" for folder, broken in damaged.items()]
    path = shlex.quote(store.path(older[0])) if older else "PATH of another checkpoint"
    hint = f"--checkpoint.resume {path} with a new --run.dir, or a new --run.dir alone to start from step 0"
    for folder, why, restoring in set_aside(store):
        states.append(f"{folder}: {why or 'it is whole'}")
        if restoring:
            hint = f"{restoring}, then the same command, resumes from {folder.partition('.')[0]}"
    which = f"the {len(damaged)} newest" if older else f"all {len(states)}"
    raise CheckpointError(
        f"{which} checkpoints in {store.where} are damaged or set aside, and a new run does not start over "
        f"them: {listed(states, 4)}.",
        hint,
    )


def broken_folders(store: Store) -> list[str]:
    """The folders of checkpoints that were set aside."""
    parsed = ((folder, file_names.parse(folder)) for folder in store.folders())
    return [folder for folder, name in parsed if name is not None and name.kind == "broken"]


def set_aside(store: Store) -> Iterator[tuple[str, str, str]]:
    """Each checkpoint that was set aside, why it is not whole, and the command that restores a whole one.
    Every byte is read where that takes seconds.
    """
    for folder in broken_folders(store):
        listing = inspect.listing_or_reason(store, folder)
        small = listing.manifest is not None and listing.manifest.bytes <= READ_AT_ONCE
        why = why_not_whole(store, listing, small)
        final, _, mark = folder.partition(".")
        words = ["mv", "-T", store.path(folder), store.path(final)]
        if is_url(store.where):
            words = ["aws", "s3", "rm", f"{store.path(final)}/.{mark}"]
        yield folder, why or "", "" if why or final in store.folders() else shlex.join(words)


def why_not_whole(store: Store, found: CheckpointListing, read: bool) -> str | None:
    """Why it is not whole, or not known to be; `read`: every byte."""
    if found.unread is not None:
        return without_hint(found.unread).rstrip(".")
    if found.manifest is None:
        return f"NOT whole: {found.detail}"
    try:
        if read:
            inspect.check_files(store, found.folder, found.manifest.files)
            metadata.open_one(store, found.folder, found.manifest)
    except (EOFError, LookupError, ValueError, TypeError) as error:
        # a manifest and files that do not fit together
        return f"NOT whole: {type(error).__name__}: {error}"
    except Broken as broken:
        return f"NOT whole: {broken.detail}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def find_checkpoint(path: str) -> tuple[str, CheckpointListing]:
    """The checkpoint at a path: its own folder, or the newest whole one of a run or folder of them."""
    for place in (path, f"{path.rstrip('/')}/checkpoints"):
        found = inspect.newest_whole(open_store(place))
        if found is not None:
            return place, found
    parent, _, folder = path.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
    with inspect.reading(store.where):
        sizes = store.sizes(folder) if folder in store.folders() else {}
    if file_names.MANIFEST in sizes:
        found = inspect.listing_of(store, folder)
        if found.manifest is None:
            raise CheckpointError(f"{path} is not whole: {found.detail}.", "give another checkpoint")
        return parent or ".", found
    if file_names.METADATA in sizes:
        return parent or ".", CheckpointListing(folder, 0)
    raise CheckpointError(
        f"--checkpoint.resume {path} is no checkpoint: it has no {file_names.METADATA}.",
        f"--model.weights {path} if it is a state dict, else the folder of a checkpoint",
    )


def differences(manifest: Manifest, sizes: MeshSizes, ranks: int, config: str) -> list[str]:
    """Notes on what differs between the run that saved the checkpoint and this one."""
    notes = []
    if manifest.config != config:
        notes.append(f"the configuration differs from the one that saved step {manifest.step}")
    if (manifest.mesh, manifest.ranks) != (str(sizes), ranks):
        notes.append(f"saved by {manifest.ranks} ranks ({manifest.mesh}), restored by {ranks} ({sizes})")
    if manifest.torch != torch.__version__:
        notes.append(f"saved by torch {manifest.torch}, restored by {torch.__version__}")
    return notes


def check_shared(store: Store, group: ObjectGroup, attempt: str) -> None:
    """CheckpointError with the ranks that cannot see a file that rank 0 writes to the store. Collective."""
    file = f".shared-{attempt}"

    def put() -> None:
        with storing(store.where):
            store.write_small(file, b"shared")

    group.on_main(put)
    try:
        why = "" if store.read_small(file) is not None else "cannot see what rank 0 wrote there"
    except OSError as error:
        why = f"cannot read it: {error}"
    seen = group.gather((socket.gethostname(), why)) or []
    blind = group.broadcast([(f"rank {rank} on {host}", why) for rank, (host, why) in enumerate(seen) if why])
    try:
        if group.rank == 0:
            store.delete_small(file)
    except OSError as error:  # where nothing may be deleted, as by a bucket's policy
        log.warning("%s: a marker of a few bytes stays there", error)
    if blind:
        raise CheckpointError(
            f"{store.where} is not shared: {', '.join(who for who, _ in blind)} {blind[0][1]}.",
            "--checkpoint.dir a folder that all nodes mount, or s3://bucket/prefix",
        )

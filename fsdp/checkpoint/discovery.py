"""What rank 0 finds before training: the run's checkpoints, the one at a PATH, whether storage is shared.

All functions but `check_shared` are local: ObjectGroup.on_main runs them on rank 0 and broadcasts the result.
"""

from __future__ import annotations

import logging
import socket

import torch

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, inspect, retention
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.mesh import MeshSizes

log = logging.getLogger(__name__)


def list_checkpoints(store: Store, section: CheckpointSection, attempt: str) -> list[CheckpointListing]:
    """The run's checkpoints, the newest first, after the unfinished ones of earlier attempts are deleted."""
    try:
        swept = retention.sweep(store, attempt)
        listings = inspect.scan(store)
        broken = [
            folder
            for folder in store.folders()
            if (name := file_names.parse(folder)) and name.kind == "broken"
        ]
    except OSError as error:
        raise CheckpointError(f"{store.where} cannot be read: {error}.", "--checkpoint.dir FOLDER") from None
    if swept:
        log.info("deleted unfinished checkpoints of earlier attempts: %s", ", ".join(swept))
    if section.resume == "never" and (listings or broken):
        folder = listings[0].folder if listings else broken[-1]
        raise CheckpointError(
            f"--checkpoint.resume never, but {store.where} holds {folder}: "
            "the two runs' checkpoints would mix.",
            "--checkpoint.resume auto to resume, or another --run.dir for a new run",
        )
    if broken and not listings:
        raise none_whole(store, len(broken))
    return listings


def none_whole(store: Store, count: int) -> CheckpointError:
    return CheckpointError(
        f"none of the {count} checkpoints in {store.where} is whole, and a new run does not start over them.",
        "--checkpoint.resume PATH of another checkpoint with a new --run.dir, "
        "or a new --run.dir alone to start from step 0",
    )


def find_checkpoint(path: str) -> tuple[str, CheckpointListing]:
    """The checkpoint at a path: its own folder, or the newest whole one of a run or folder of them."""
    for place in (path, f"{path.rstrip('/')}/checkpoints"):
        found = next((one for one in inspect.scan(open_store(place)) if one.manifest is not None), None)
        if found is not None:
            return place, found
    parent, _, folder = path.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
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
    group.on_main(lambda: _put_marker(store, attempt))
    seen = group.gather((socket.gethostname(), store.has_marker(attempt)))
    blind = group.broadcast(
        [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(seen or []) if not sees]
    )
    if group.rank == 0:
        store.remove_marker(attempt)
    if blind:
        raise CheckpointError(
            f"{store.where} is not shared: {', '.join(blind)} cannot see what rank 0 wrote there.",
            "--checkpoint.dir a folder that all nodes mount, or s3://bucket/prefix",
        )


def _put_marker(store: Store, attempt: str) -> None:
    try:
        store.put_marker(attempt)
    except OSError as error:
        raise CheckpointError(
            f"{store.where} cannot be written: {error}.", "--checkpoint.dir FOLDER that is writable"
        ) from None

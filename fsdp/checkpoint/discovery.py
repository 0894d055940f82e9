"""What rank 0 finds before a run begins: which checkpoints there are, where a PATH leads, whether all ranks
see one place.

Every function here but `prove_shared` looks at the disk and speaks to nobody; ObjectGroup.on_main makes its answer
everyone's.
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


def survey(store: Store, section: CheckpointSection, attempt: str) -> list[CheckpointListing]:
    """What lies there, the newest first, after the litter of earlier attempts is gone."""
    try:
        swept = retention.sweep(store, attempt)
        founds = inspect.scan(store)
        broken = [
            folder
            for folder in store.folders()
            if (name := file_names.parse(folder)) and name.kind == "broken"
        ]
    except OSError as error:
        raise CheckpointError(f"{store.where} cannot be read: {error}.", "--checkpoint.dir FOLDER") from None
    if swept:
        log.info("removed what earlier attempts left unfinished: %s", ", ".join(swept))
    if section.resume == "never" and (founds or broken):
        raise CheckpointError(
            f"--checkpoint.resume never, but {store.where} holds {founds[0].folder if founds else broken[-1]}: "
            "a new run over it would mix with it.",
            "--checkpoint.resume auto to go on, or another --run.dir to start anew",
        )
    if broken and not founds:
        raise none_whole(store, len(broken))
    return founds


def none_whole(store: Store, count: int) -> CheckpointError:
    return CheckpointError(
        f"none of the {count} checkpoints in {store.where} is whole, and a run is not begun anew over them.",
        "--checkpoint.resume PATH of another checkpoint with a new --run.dir, or a new --run.dir to start from step 0",
    )


def locate(path: str) -> tuple[str, CheckpointListing]:
    """A checkpoint folder itself, or the newest whole one of a run directory or a folder of checkpoints."""
    for place in (path, f"{path.rstrip('/')}/checkpoints"):
        found = next((one for one in inspect.scan(open_store(place)) if one.manifest is not None), None)
        if found is not None:
            return place, found
    parent, _, folder = path.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
    sizes = store.sizes(folder) if folder in store.folders() else {}
    if file_names.MANIFEST in sizes:
        found = inspect.look(store, folder)
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
    """What a person should know when a run goes on otherwise than it was saved."""
    notes = []
    if manifest.config != config:
        notes.append(f"the configuration differs from the one that saved step {manifest.step}")
    if (manifest.mesh, manifest.ranks) != (str(sizes), ranks):
        notes.append(f"saved by {manifest.ranks} ranks ({manifest.mesh}), restored by {ranks} ({sizes})")
    if manifest.torch != torch.__version__:
        notes.append(f"saved by torch {manifest.torch}, restored by {torch.__version__}")
    return notes


def prove_shared(store: Store, group: ObjectGroup, attempt: str) -> None:
    """Every rank sees what rank 0 wrote, or all stop and name those whose storage is not shared. Collective."""
    group.on_main(lambda: _leave_word(store, attempt))
    seen = group.gather((socket.gethostname(), store.proven(attempt)))
    blind = group.broadcast(
        [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(seen or []) if not sees]
    )
    if group.rank == 0:
        store.unprove(attempt)
    if blind:
        raise CheckpointError(
            f"{store.where} is not shared: {', '.join(blind)} cannot see what rank 0 wrote there.",
            "--checkpoint.dir a folder that all nodes mount, or s3://bucket/prefix",
        )


def _leave_word(store: Store, attempt: str) -> None:
    try:
        store.prove(attempt)
    except OSError as error:
        raise CheckpointError(
            f"{store.where} cannot be written: {error}.", "--checkpoint.dir FOLDER that is writable"
        ) from None

"""A restore at any number of ranks: which checkpoint, how it is read and verified, what failures mean.

Collective, but for what ObjectGroup.on_main runs on rank 0. Each rank reads its rows into its own tensors.
DCP's FileSystemReader reads each chunk whole through torch.load: measured at 124M parameters on 2 ranks
2.61 s, with verification here 1.86 s. A failure on one rank reaches all ranks before the next collective: all
raise the same Broken.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import shlex
import socket
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from fsdp.base.devices import set_thread_device
from fsdp.base.errors import CheckpointError
from fsdp.base.text import listed, quoted
from fsdp.checkpoint import inspect
from fsdp.checkpoint import state as states
from fsdp.checkpoint.inspect import CheckpointListing, CheckpointSource
from fsdp.checkpoint.manifest import MANIFEST, METADATA, Broken, FileRange, Manifest
from fsdp.checkpoint.state import PendingState, Piece, Sizes, as_bytes
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes
from fsdp.optim.optimizer import TrainState, averages, same_states
from fsdp.rundir.history import storing

if TYPE_CHECKING:
    from fsdp.checkpoint.pretrained import Base

log = logging.getLogger(__name__)

THREADS = 8
"""A request to an object store takes some 50 ms."""


# ---------------------------------------------------------------- what rank 0 finds


def list_checkpoints(store: Store, section: CheckpointSection, attempt: str) -> list[str]:
    """The run's checkpoints, the newest first, after the unfinished ones of earlier attempts are deleted."""
    try:
        swept = inspect.sweep(store, attempt)
        folders, broken = inspect.finals(store), inspect.folders_of(store, "broken")
    except OSError as error:
        raise CheckpointError(f"{store.where} cannot be read: {error}.", "--checkpoint.dir FOLDER") from None
    if swept:
        log.info("deleted unfinished checkpoints of earlier attempts: %s", ", ".join(swept))
    if section.resume == "never" and (folders or broken):
        raise CheckpointError(
            f"--checkpoint.resume never, but {store.where} holds {(folders or broken)[0]}: "
            "the two runs' checkpoints would mix.",
            "--checkpoint.resume auto to resume, or another --run.dir for a new run",
        )
    if broken and not folders:
        refuse(store, {}, [])
    return folders


def refuse(store: Store, damaged: Mapping[str, Broken], older: Sequence[str]) -> NoReturn:
    """CheckpointError: the newest checkpoints are damaged, or all that there are were set aside."""
    reasons = [f"{folder}: {broken.detail}" for folder, broken in damaged.items()]
    path = shlex.quote(store.path(older[0])) if older else "PATH of another checkpoint"
    hint = f"--checkpoint.resume {path} with a new --run.dir, or a new --run.dir alone to start from step 0"
    for folder, why, restoring in inspect.set_aside(store):
        reasons.append(f"{folder}: {why or 'it is whole'}")
        if restoring:
            hint = f"{restoring}, then the same command, resumes from {folder.partition('.')[0]}"
    which = f"the {len(damaged)} newest" if older else f"all {len(reasons)}"
    raise CheckpointError(
        f"{which} checkpoints in {store.where} are damaged or set aside, and a new run does not start over "
        f"them: {listed(reasons, 4)}.",
        hint,
    )


def find_checkpoint(path: str) -> tuple[str, CheckpointListing]:
    """The checkpoint at a path: its own folder, or the newest whole one of a run or folder of them."""
    for parent in (path, f"{path.rstrip('/')}/checkpoints"):
        if (newest := inspect.newest_whole(open_store(parent))) is not None:
            return parent, newest
    parent, _, folder = path.rstrip("/").rpartition("/")
    store = open_store(parent := parent or ".")
    with inspect.reading(store.where):
        sizes = store.sizes(folder) if folder in store.folders() else {}
    if MANIFEST in sizes:
        return parent, inspect.listing_of(store, folder)
    if METADATA in sizes:
        return parent, CheckpointListing(folder, 0)
    for place in (path, f"{path}/checkpoints"):
        if damaged := inspect.scan(open_store(place)):
            reason = damaged[0].detail or str(damaged[0].unread)
            reason = f"{place} holds no whole checkpoint: {damaged[0].folder} is not whole ({reason})."
            raise CheckpointError(reason, f"python -m fsdp.checkpoint {quoted(path)} verify")
    raise CheckpointError(
        f"--checkpoint.resume {path} is no checkpoint: it has no {METADATA}.",
        f"--model.weights {path} if it is a state dict, else the folder of a checkpoint",
    )


def check_shared(store: Store, group: ObjectGroup, attempt: str) -> None:
    """CheckpointError with the ranks that cannot see a file that rank 0 writes to the store. Collective."""
    file, why = f".shared-{attempt}", ""

    def put() -> None:
        with storing(store.where):
            store.write_small(file, b"shared")

    group.on_main(put)
    try:
        if store.read_small(file) is None:
            why = "cannot see what rank 0 wrote there"
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


# ---------------------------------------------------------------- the restore


@dataclass(frozen=True)
class Restored:
    """The step that the run resumes from, with notes for the log."""

    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restore:
    """A restore of this run from this store. Its methods are collective."""

    store: Store
    group: ObjectGroup
    env: DistEnv
    section: CheckpointSection
    sizes: MeshSizes
    config: str
    """The hash of the run's configuration, compared with the checkpoint's."""
    base: Base | None
    weights_only: bool = False

    def newest(self, state: TrainState, folders: list[str]) -> Restored:
        """`folders`: the checkpoints, the newest first. The newest is set aside if it is damaged, after the
        one before it is loaded: of several damaged ones none is, since the storage may be what is damaged.
        """
        damaged: dict[str, Broken] = {}
        for folder in folders[:2]:
            try:
                restored = self._twice(state, folder)
            except Broken as broken:
                damaged[folder] = broken
                continue
            notes = [self._set_aside(name, broken) for name, broken in damaged.items()]
            return replace(restored, notes=(*notes, *restored.notes))
        return self.group.on_main(lambda: refuse(self.store, damaged, folders[2:]))

    def _twice(self, state: TrainState, folder: str) -> Restored:
        """A second time, from the disk, if it is damaged: the page cache of a node may be what is."""
        listing = partial(self.group.on_main, partial(inspect.listing_of, self.store, folder))
        try:
            return self._sealed(state, self.store, listing())
        except Broken as broken:
            if self.env.is_main:
                log.warning("%s is read a second time: %s", self.store.path(folder), broken.detail)
            self.store.forget(folder)
            return self._sealed(state, self.store, listing())

    def from_path(self, state: TrainState, path: str) -> Restored:
        """Restores the checkpoint at a path, with its counters if it has a manifest, else from step 0.

        A checkpoint at a path is never renamed.
        """
        folder, listing = self.group.on_main(lambda: find_checkpoint(path))
        restore = self._sealed if listing.manifest is not None or listing.why else self._foreign
        try:
            return restore(state, open_store(folder), listing)
        except Broken as broken:
            hint = "give another, or --checkpoint.resume auto"
            raise CheckpointError(f"{path} is not whole: {broken.detail}.", hint) from None

    def _foreign(self, state: TrainState, store: Store, listing: CheckpointListing) -> Restored:
        """Another program's checkpoint: weights and optimizer, as far as it has them.

        Torch's converters keep the counters of a run's own one.
        """
        source = self._open(store, listing)
        prefix, optim = _prefixes(source, list(states.parameter_names(state.model).values()))
        notes = self._load(state, source, prefix, None if self.weights_only else optim)
        keys = {name: f"train.{name}" for name in state.counters()}
        if source.values.keys() >= set(keys.values()):
            state.set_counters(
                self.group.on_main(
                    lambda: {name: _load_value(source, source.values[key]) for name, key in keys.items()}
                )
            )
        note = "weights alone" if optim is None or self.weights_only else "weights and optimizer"
        note += " of a checkpoint without a manifest, which cannot be verified"
        return Restored(state.step, (note, *notes))

    def _sealed(self, state: TrainState, store: Store, listing: CheckpointListing) -> Restored:
        """Restores a sealed checkpoint with its counters."""
        from fsdp.checkpoint.pretrained import check_base

        if (manifest := listing.manifest) is None:
            raise Broken(listing.why, listing.detail)
        source = self._open(store, listing)
        check_base(manifest, self.base, source.path)
        optim, notes = None if self.weights_only else "optim.", list[str]()
        if optim and not same_states(manifest.optimizer, state.optimizer_name):
            optim = None
            notes.append(
                f"--optim.name {state.optimizer_name} starts with fresh states: "
                f"those of the checkpoint are of {manifest.optimizer}"
            )
        notes += self._load(state, source, "model.", optim)
        try:
            state.set_counters(dict(manifest.counters))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Broken("manifest", f"its counters are not a run's ({error!r})") from None
        state.data = manifest.data
        return Restored(manifest.step, (*notes, *self._differences(manifest)))

    def _differences(self, manifest: Manifest) -> list[str]:
        """Notes on what differs between the run that saved the checkpoint and this one."""
        notes, ranks = list[str](), self.env.world_size
        if manifest.config != self.config:
            notes.append(f"the configuration differs from the one that saved step {manifest.step}")
        if (manifest.mesh, manifest.ranks) != (str(self.sizes), ranks):
            saved = f"saved by {manifest.ranks} ranks ({manifest.mesh})"
            notes.append(f"{saved}, restored by {ranks} ({self.sizes})")
        if manifest.torch != torch.__version__:
            notes.append(f"saved by torch {manifest.torch}, restored by {torch.__version__}")
        return notes

    def _set_aside(self, folder: str, broken: Broken) -> str:
        """Renames and logs the broken checkpoint on rank 0; returns the same note on every rank."""
        line = f"CHECKPOINT {folder} is NOT whole ({broken.detail})"
        if self.env.is_main:
            try:
                how = f"set aside as {self.store.set_aside(folder, broken.why)}"
            except OSError as error:
                how = f"it could not be set aside ({error})"
            log.error("%s; %s. The one before it is loaded.", line, how)
        return line

    def _open(self, store: Store, listing: CheckpointListing) -> CheckpointSource:
        """Rank 0 reads the places of all tensors and broadcasts them."""

        def read() -> bytes:
            try:
                return inspect.read_places(store, listing.folder)
            except (OSError, Broken) as error:
                path = f"{store.path(listing.folder)}/{METADATA}"
                raise inspect.classify_failure(error, path) from None

        return inspect.opened(store, listing.folder, listing.manifest, self.group.on_main(read))

    def _load(self, state: TrainState, source: CheckpointSource, prefix: str, optim: str | None) -> list[str]:
        """Returns notes for the log."""
        targets = states.of_model(state.model, source, prefix)
        pending = PendingState(state, source, optim) if optim is not None else None
        present, missing = states.of_averages(state, source)
        fill(source, [*targets, *present], pending, self.group, self.section.verify)
        if not missing:
            return []
        weights = states.model_tensors(state.model)
        with torch.no_grad():
            for name in missing:
                local_tensor(averages(state.optimizer)[name]).copy_(local_tensor(weights[name]))
        return [f"the moving average of {len(missing)} parameters starts from the checkpoint's weights"]


def load_weights(source: CheckpointSource, model: nn.Module, group: ObjectGroup, *, verify: bool) -> None:
    """Fills a sharded model alone, without optimizer and counters. Collective."""
    try:
        fill(source, states.of_model(model, source), None, group, verify)
    except Broken as broken:
        hint = f"python -m fsdp.checkpoint {source.store.where} verify"
        raise CheckpointError(f"{source.path} is not whole: {broken.detail}.", hint) from None


def _prefixes(source: CheckpointSource, names: list[str]) -> tuple[str, str | None]:
    """The prefixes of another program's weights and optimizer states, for a model with these parameters:
    {"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module": …}}.
    """
    longest, keys = max(names, key=len), sorted(source.keys)  # sorted: the same prefix on every rank
    candidates = {key.removesuffix(longest) for key in keys if key.endswith(longest)}
    fitting = [p for p in candidates if source.keys.issuperset(p + name for name in names)]
    if not fitting:
        raise CheckpointError(
            f"{source.path} does not hold this model: no prefix turns {longest} and the other names into "
            f"keys (it holds {next(iter(keys), 'nothing')}, …).",
            "give the flags of the model that it was saved from",
        )
    heads = (key.partition(f"state.{name}.")[::2] for name in names for key in keys)
    optim = next((head for head, field in heads if field and (not head or head.endswith("."))), None)
    return min(fitting, key=lambda prefix: (len(prefix), prefix)), optim


# ---------------------------------------------------------------- the load


def fill(
    source: CheckpointSource,
    targets: list[Piece],
    pending: PendingState | None,
    group: ObjectGroup,
    verify: bool,
) -> None:
    """Fills and verifies every piece; Broken on every rank if that fails, and the state is unusable then."""
    targets = [*targets, *(pending.pieces if pending is not None else ())]
    values, failure = dict[str, Any](), None
    try:
        _read_all(source, targets)
        for _, _, key in pending.values if pending is not None else ():
            values[key] = _load_value(source, source.values[key])
    except Exception as error:  # any failure must reach the other ranks
        failure = inspect.classify_failure(error, source.path)
    failures = [report for report in group.gather(failure) or [] if report is not None]
    # Storage that does not answer comes before damage: a rank that cannot read cannot find damage.
    worst = group.broadcast(min(failures, key=lambda report: isinstance(report, Broken), default=None))
    if worst is not None:
        raise worst
    if verify and source.manifest is not None:
        shares = group.gather(
            [(p.key, p.offsets, states.digest(p.local, p.offsets, p.size)) for p in targets]
        )
        group.on_main(lambda: _compare(source, shares or []))
    if pending is not None:
        pending.commit(values)


def _compare(source: CheckpointSource, gathered: Sequence[Sequence[tuple[str, Sizes, int]]]) -> None:
    """Compares each tensor's digest, the sum of its parts', with that of the save. Replicas are equal."""
    shares: dict[str, dict[Sizes, int]] = {}
    for key, offsets, share in (entry for of_rank in gathered for entry in of_rank):
        if shares.setdefault(key, {}).setdefault(offsets, share) != share:
            raise Broken("digest", f"{key} is not what was saved: ranks that hold the same of it differ")
    for key, parts in shares.items():
        if sum(parts.values()) % 2**64 != source.digest(key)[1]:
            raise Broken("digest", f"{key} is not what was saved: its digest differs")


def _read_all(source: CheckpointSource, targets: list[Piece]) -> None:
    """Reads all pieces in THREADS threads; raises the first failure."""
    device = next((target.local.device for target in targets if target.local.is_cuda), None)
    with ThreadPoolExecutor(THREADS, initializer=set_thread_device, initargs=(device,)) as pool:
        for _ in pool.map(partial(_read, source), targets):
            pass


def _read(source: CheckpointSource, target: Piece) -> None:
    """Reads a piece from each stored chunk that overlaps it."""
    saved, covered = source.tensors[target.key], 0
    for chunk in saved.chunks:
        shared = states.overlap((target.offsets, target.sizes), (chunk.offsets, chunk.sizes))
        if shared is None:
            continue
        covered += math.prod(shared[1])
        into, within = target.local[_box(*shared, target.offsets)], _box(*shared, chunk.offsets)
        if source.manifest is None:
            tensor = _load_value(source, chunk.range)
            if getattr(tensor, "shape", None) != chunk.sizes:
                raise Broken(
                    "format", f"{chunk.range.file} at {chunk.range.start} is not the tensor {target.key}"
                )
            into.copy_(tensor[within])
            continue
        # Whole rows of this program's chunk: into the tensor itself if its memory can take the bytes.
        rows = (*into.shape[:1], *chunk.sizes[1:])
        straight = into.is_cpu and into.is_contiguous() and into.dtype == saved.dtype and into.shape == rows
        buffer = into if straight else torch.empty(rows, dtype=saved.dtype)
        skipped = within[0].start * math.prod(chunk.sizes[1:]) * saved.dtype.itemsize if within else 0
        start = chunk.range.start + source.manifest.head + skipped
        source.store.read_into(source.folder, chunk.range.file, start, [as_bytes(buffer)])
        if not straight:
            columns: Any = (..., *within[1:])
            into.copy_(buffer[columns])
    if covered != math.prod(target.sizes):
        raise Broken("metadata", f"it does not cover {target.key}")


def _box(offsets: Sizes, sizes: Sizes, begin: Sizes) -> tuple[slice, ...]:
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(offsets, sizes, begin, strict=True))


def _load_value(source: CheckpointSource, stored: FileRange) -> Any:
    """What torch.save wrote there, loaded with weights_only: nothing in it is executed."""
    data = bytearray(stored.length)
    source.store.read_into(source.folder, stored.file, stored.start, [memoryview(data)])
    try:
        if source.manifest is not None:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch compares no checksum
                if damaged := archive.testzip():
                    raise ValueError(f"the checksum of {damaged} differs")
        return torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError, AttributeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise Broken("format", f"{stored.file} at {stored.start} cannot be loaded ({reason})") from None


def whole(source: CheckpointSource, key: str) -> torch.Tensor:
    """A whole tensor, read by a single process and compared with its digest if there is a manifest."""
    saved = source.tensors[key]
    tensor, zeros = torch.empty(saved.size, dtype=saved.dtype), (0,) * len(saved.size)
    _read_all(source, [Piece(key, (key,), saved.size, zeros, tensor)])
    if source.manifest is not None and states.digest(tensor, zeros, saved.size) != source.digest(key)[1]:
        raise Broken("digest", f"{key} is not what was saved: its digest differs")
    return tensor

"""A restore: of the newest whole checkpoint, or of the one that --checkpoint.resume names.

What rank 0 finds in the store, the order of attempts, and their messages. load.py reads a checkpoint. All
functions but `check_shared` and `load_weights` are local: ObjectGroup.on_main runs them on rank 0 and
broadcasts the result.
"""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from fsdp.base.errors import CheckpointError, without_hint
from fsdp.base.text import listed
from fsdp.checkpoint import inspect, retention
from fsdp.checkpoint import state as states
from fsdp.checkpoint.inspect import CheckpointListing, CheckpointSource
from fsdp.checkpoint.manifest import MANIFEST, METADATA, Broken, Manifest
from fsdp.checkpoint.state import PendingState, Prefixes
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup, local_tensor
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.optim.optimizer import same_states
from fsdp.optim.state import TrainState, averages
from fsdp.rundir.paths import storing

if TYPE_CHECKING:
    from fsdp.checkpoint.local_tier import LocalTier
    from fsdp.checkpoint.pretrained import Base

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- what rank 0 finds


def list_checkpoints(store: Store, section: CheckpointSection, attempt: str) -> list[str]:
    """The run's checkpoints, the newest first, after the unfinished ones of earlier attempts are deleted."""
    try:
        swept = retention.sweep(store, attempt)
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
        refuse(store)
    return folders


def refuse(
    store: Store, damaged: Mapping[str, Broken] = MappingProxyType({}), older: Sequence[str] = ()
) -> NoReturn:
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
    for place in (path, f"{path.rstrip('/')}/checkpoints"):
        if (newest := inspect.newest_whole(open_store(place))) is not None:
            return place, newest
    parent, _, folder = path.rstrip("/").rpartition("/")
    parent = parent or "."
    store = open_store(parent)
    with inspect.reading(store.where):
        sizes = store.sizes(folder) if folder in store.folders() else {}
    if MANIFEST in sizes:
        return parent, inspect.listing_of(store, folder)
    if METADATA in sizes:
        return parent, CheckpointListing(folder, 0)
    raise CheckpointError(
        f"--checkpoint.resume {path} is no checkpoint: it has no {METADATA}.",
        f"--model.weights {path} if it is a state dict, else the folder of a checkpoint",
    )


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
    tier: LocalTier | None = None

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
        try:
            return self._once(state, folder)
        except Broken as broken:
            if self.env.is_main:
                log.warning("%s is read a second time: %s", self.store.path(folder), broken.detail)
            self.store.forget(folder)
            return self._once(state, folder)

    def _once(self, state: TrainState, folder: str) -> Restored:
        """With the files of the nodes' own copies, where there are any that are whole and can be read."""
        listing, note = self.group.on_main(partial(inspect.listing_of, self.store, folder)), ""
        if self.tier is not None and listing.manifest is not None:
            try:
                return self._sealed(state, self.tier.near(listing), listing)
            except Broken as broken:
                self.tier.drop(listing.step)
                note = f"a local copy of step {listing.step} is NOT whole ({broken.detail}): dropped"
            except CheckpointError as error:
                note = f"a local copy of step {listing.step} is not used: {without_hint(error)}"
            if self.env.is_main:
                log.error("%s", note)
        restored = self._sealed(state, self.store, listing)
        return replace(restored, notes=(note, *restored.notes)) if note else restored

    def from_path(self, state: TrainState, path: str) -> Restored:
        """Restores the checkpoint at a path, with its counters if it has a manifest, else from step 0.

        A checkpoint at a path is never renamed.
        """
        folder, listing = self.group.on_main(lambda: find_checkpoint(path))
        try:
            if listing.manifest is None and not listing.why:
                return self._foreign(state, self._open(open_store(folder), listing), path)
            return self._sealed(state, open_store(folder), listing)
        except Broken as broken:
            hint = "give another, or --checkpoint.resume auto"
            raise CheckpointError(f"{path} is not whole: {broken.detail}.", hint) from None

    def _foreign(self, state: TrainState, source: CheckpointSource, path: str) -> Restored:
        """Another program's checkpoint: weights and optimizer, as far as it has them.

        Torch's converters keep the counters of a run's own one.
        """
        prefixes = _prefixes(source, list(states.parameter_names(state.model).values()), path)
        prefixes = replace(prefixes, optim=None) if self.weights_only else prefixes
        notes = self._load(state, source, prefixes)
        keys = {name: f"train.{name}" for name in state.counters()}
        from fsdp.checkpoint import load

        numbers = self.group.on_main(lambda: {name: load.number(source, key) for name, key in keys.items()})
        read = {prefixes.model + name for name in states.model_tensors(state.model)}
        counters = {name: number for name, number in numbers.items() if number is not None}
        if len(counters) == len(keys):
            state.set_counters(counters)
            read.update(keys.values())
        states_read = (
            () if prefixes.optim is None else (f"{prefixes.optim}state.", f"{prefixes.optim}param_groups.")
        )
        if dropped := sorted(key for key in source.keys - read if not key.startswith(states_read)):
            notes.append(f"dropped, since a run has no place for it: {listed(dropped, 3)}")
        note = "weights alone" if prefixes.optim is None else "weights and optimizer"
        note += " of a checkpoint without a manifest, which cannot be verified"
        return Restored(state.step, (note, *notes))

    def _sealed(self, state: TrainState, store: Store, listing: CheckpointListing) -> Restored:
        """Restores a sealed checkpoint with its counters."""
        from fsdp.checkpoint.pretrained import check_base

        if (manifest := listing.manifest) is None:
            raise Broken(listing.why, listing.detail)
        source = self._open(store, listing)
        check_base(manifest, self.base, source.path)
        prefixes, notes = Prefixes(optim=None) if self.weights_only else Prefixes(), list[str]()
        if not self.weights_only and not same_states(manifest.optimizer, state.optimizer_name):
            prefixes = Prefixes(optim=None)
            notes.append(
                f"--optim.name {state.optimizer_name} starts with fresh states: "
                f"those of the checkpoint are of {manifest.optimizer}"
            )
        notes += self._load(state, source, prefixes)
        try:
            state.set_counters(dict(manifest.counters))
        except (KeyError, ValueError, OverflowError) as error:
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

    def _load(self, state: TrainState, source: CheckpointSource, prefixes: Prefixes) -> list[str]:
        """Returns notes for the log."""
        targets = states.of_model(state.model, source, prefixes.model)
        pending = PendingState(state, source, prefixes.optim) if prefixes.optim is not None else None
        present, missing = states.of_averages(state, source.tensors)
        targets += (pending.pieces if pending is not None else []) + present
        from fsdp.checkpoint import load

        load.fill(source, targets, pending, self.group, self.section.verify)
        if missing:
            _start_averages(state, missing)
            return [f"the moving average of {len(missing)} parameters starts from the checkpoint's weights"]
        dropped = not present and any(key.startswith("ema.") for key in source.tensors)
        return ["the checkpoint's moving average of the weights is dropped: --optim.ema is 0"] * dropped


@torch.no_grad()
def _start_averages(state: TrainState, names: list[str]) -> None:
    weights = states.model_tensors(state.model)
    for name in names:
        local_tensor(averages(state.optimizer)[name]).copy_(local_tensor(weights[name]))


def load_weights(source: CheckpointSource, model: nn.Module, group: ObjectGroup, *, verify: bool) -> None:
    """Fills a sharded model alone, without optimizer and counters. Collective."""
    try:
        from fsdp.checkpoint import load

        load.fill(source, states.of_model(model, source), None, group, verify)
    except Broken as broken:
        hint = f"python -m fsdp.checkpoint {source.store.where} verify"
        raise CheckpointError(f"{source.path} is not whole: {broken.detail}.", hint) from None


def _prefixes(source: CheckpointSource, names: list[str], path: str) -> Prefixes:
    """The prefixes of another program's keys, for a model with these parameters. Programs nest them in ways:
    {"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module": …}}.
    """
    longest, keys = max(names, key=len), sorted(source.keys)  # sorted: the same prefix on every rank
    candidates = {key.removesuffix(longest) for key in keys if key.endswith(longest)}
    fitting = [p for p in candidates if source.keys.issuperset(p + name for name in names)]
    if not fitting:
        raise CheckpointError(
            f"{path} does not hold this model: no prefix turns {longest} and all other parameters into keys "
            f"(it holds {next(iter(keys), 'nothing')}, …).",
            "give the flags of the model that it was saved from",
        )
    heads = (key.partition(f"state.{name}.")[::2] for name in names for key in keys)
    optim = next((head for head, field in heads if field and (not head or head.endswith("."))), None)
    return Prefixes(min(fitting, key=lambda prefix: (len(prefix), prefix)), optim)

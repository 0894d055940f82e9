"""A restore: of the newest whole checkpoint, or of the one that --checkpoint.resume names.

It holds the order of attempts and their messages. load.py reads a checkpoint, discovery.py lists them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp.base.errors import CheckpointError, without_hint
from fsdp.base.text import listed
from fsdp.checkpoint import discovery, file_names, inspect, load, metadata
from fsdp.checkpoint import state as states
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.metadata import CheckpointSource
from fsdp.checkpoint.state import PendingState, Prefixes
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup, local_tensor
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.optim.optimizer import same_states
from fsdp.optim.state import TrainState, averages

if TYPE_CHECKING:
    from fsdp.checkpoint.adapter_weights import Base
    from fsdp.checkpoint.local_tier import LocalTier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The step and place that the run resumes from, with notes for the log."""

    step: int
    where: str
    notes: tuple[str, ...] = ()
    epoch: int | None = None
    """The last complete epoch in another program's checkpoint, counted from 0."""


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
        return self.group.on_main(lambda: discovery.refuse(self.store, damaged, folders[2:]))

    def _twice(self, state: TrainState, folder: str) -> Restored:
        """A second time, from the disk, if it is damaged: the page cache of a node may be what is."""
        try:
            return self._newest(state, folder)
        except Broken as broken:
            if self.env.is_main:
                log.warning("%s is read a second time: %s", self.store.path(folder), broken.detail)
            self.store.forget(folder)
            return self._newest(state, folder)

    def _newest(self, state: TrainState, folder: str) -> Restored:
        listing, notes = self.group.on_main(partial(inspect.listing_of, self.store, folder)), list[str]()
        if (near := self._from_nodes(state, listing, notes)) is not None:
            return near
        if listing.manifest is None:
            raise Broken(listing.why, listing.detail)
        return self._sealed(state, self._open(self.store, listing), listing.manifest, notes)

    def _from_nodes(self, state: TrainState, listing: CheckpointListing, notes: list[str]) -> Restored | None:
        """Restores with the files of the nodes' own copies; None without them, or if one is damaged or cannot
        be read.
        """
        if self.tier is None or listing.manifest is None:
            return None
        try:
            return self._sealed(state, self._open(self.tier.near(listing), listing), listing.manifest, notes)
        except (Broken, CheckpointError) as error:
            if isinstance(error, Broken):
                self.tier.drop(listing.step)
                notes.append(f"a local copy of step {listing.step} is NOT whole ({error.detail}): dropped")
            else:
                notes.append(f"a local copy of step {listing.step} is not used: {without_hint(error)}")
            if self.env.is_main:
                log.error("%s", notes[-1])
            return None

    def from_path(self, state: TrainState, path: str) -> Restored:
        """Restores the checkpoint at a path, with its counters if it has a manifest, else from step 0.

        A checkpoint at a path is never renamed.
        """
        folder, listing = self.group.on_main(lambda: discovery.find_checkpoint(path))
        try:
            source = self._open(open_store(folder), listing)
            if listing.manifest is not None:
                return self._sealed(state, source, listing.manifest, [])
            return self._foreign(state, source, path)
        except Broken as broken:
            hint = "give another, or --checkpoint.resume auto"
            raise CheckpointError(f"{path} is not whole: {broken.detail}.", hint) from None

    def _foreign(self, state: TrainState, source: CheckpointSource, path: str) -> Restored:
        """Another program's checkpoint: weights, optimizer and epoch, as far as it has them.

        Torch's converters keep the counters of a run's own one.
        """
        prefixes = _prefixes(source, list(states.parameter_names(state.model).values()), path)
        prefixes = replace(prefixes, optim=None) if self.weights_only else prefixes
        notes = self._load(state, source, prefixes)
        names = {prefixes.model + name for name in states.model_tensors(state.model)}
        levels = prefixes.model.split(".")[:-1]
        candidates = [".".join([*levels[:depth], "epoch"]) for depth in range(len(levels), -1, -1)]
        epoch_key = next((key for key in candidates if key in source.keys), "")
        counter_keys = {name: f"train.{name}" for name in state.counters()}
        keys = [epoch_key, *counter_keys.values()]
        numbers = self.group.on_main(lambda: {key: load.read_number(source, key) for key in keys})
        epoch = numbers[epoch_key]
        epoch = epoch if isinstance(epoch, int) and epoch < 2**31 else None
        loaded = (
            (f"{prefixes.optim}state.", f"{prefixes.optim}param_groups.")
            if prefixes.optim is not None
            else ()
        )
        dropped = [
            key
            for key in sorted(source.keys - names)
            if not key.startswith((*loaded, "train.")) and (key != epoch_key or epoch is None)
        ]
        counters = {name: value for name, key in counter_keys.items() if (value := numbers[key]) is not None}
        note = "weights alone" if prefixes.optim is None else "weights and optimizer"
        notes.insert(0, f"{note} of a checkpoint without a manifest, which cannot be verified")
        if dropped:
            notes.append(f"dropped, since a run has no place for it: {listed(dropped, 3)}")
        if len(counters) == len(counter_keys):
            state.set_counters(counters)
        elif source.keys.issuperset(counter_keys.values()):
            notes.append(f"dropped, since they are not all numbers: {', '.join(counter_keys.values())}")
        return Restored(state.step, path, tuple(notes), epoch if state.step == 0 else None)

    def _sealed(
        self, state: TrainState, source: CheckpointSource, manifest: Manifest, notes: list[str]
    ) -> Restored:
        """Restores a sealed checkpoint with its counters."""
        from fsdp.checkpoint import adapter_weights

        adapter_weights.check(manifest, self.base, source.path)
        prefixes, more = Prefixes(optim=None) if self.weights_only else Prefixes(), []
        if not self.weights_only and not same_states(manifest.optimizer, state.optimizer_name):
            prefixes = Prefixes(optim=None)
            more.append(
                f"--optim.name {state.optimizer_name} starts with fresh states: "
                f"those of the checkpoint are of {manifest.optimizer}"
            )
        more += self._load(state, source, prefixes)
        try:
            state.set_counters(dict(manifest.counters))
        except (KeyError, ValueError, OverflowError) as error:
            raise Broken("manifest", f"its counters are not a run's ({error!r})") from None
        state.data = manifest.data
        differences = discovery.differences(manifest, self.sizes, self.env.world_size, self.config)
        return Restored(manifest.step, source.path, (*notes, *more, *differences))

    def _set_aside(self, folder: str, broken: Broken) -> str:
        """Renames and logs the broken checkpoint on rank 0; returns the same note on every rank."""
        line = f"CHECKPOINT {folder} is NOT whole ({broken.detail})"
        if self.env.is_main:
            try:
                aside = self.store.set_aside(folder, broken.why)
                log.error("%s; set aside as %s. The one before it is loaded.", line, aside)
            except OSError as error:
                log.error("%s; it could not be set aside (%s). The one before it is loaded.", line, error)
        return line

    def _open(self, store: Store, listing: CheckpointListing) -> CheckpointSource:
        """Rank 0 reads the places of all tensors and broadcasts them."""
        data, failure = self.group.broadcast(
            self._read_metadata(store, listing) if self.env.is_main else None
        )
        if failure is not None:
            raise failure
        return metadata.opened(store, listing.folder, listing.manifest, data)

    def _read_metadata(
        self, store: Store, listing: CheckpointListing
    ) -> tuple[bytes, Broken | CheckpointError | None]:
        try:
            return metadata.read_metadata(store, listing.folder), None
        except (OSError, Broken) as error:
            path = f"{store.path(listing.folder)}/{file_names.METADATA}"
            return b"", inspect.classify_failure(error, path)

    def _load(self, state: TrainState, source: CheckpointSource, prefixes: Prefixes) -> list[str]:
        """Returns notes for the log."""
        targets = states.of_model(state.model, source, prefixes.model)
        pending = PendingState(state, source, prefixes.optim) if prefixes.optim is not None else None
        present, missing = states.of_averages(state, source.tensors)
        targets += (pending.pieces if pending is not None else []) + present
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
    targets = states.of_model(model, source)
    try:
        load.fill(source, targets, None, group, verify)
    except Broken as broken:
        hint = f"python -m fsdp.checkpoint {source.store.where} verify"
        raise CheckpointError(f"{source.path} is not whole: {broken.detail}.", hint) from None


def _prefixes(source: CheckpointSource, names: list[str], path: str) -> Prefixes:
    """The prefixes of another program's keys, for a model with these parameters. Programs nest them in ways:
    {"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module": …}}.
    """
    longest, keys = max(names, key=len), source.keys
    candidates = {key.removesuffix(longest) for key in keys if key.endswith(longest)}
    fitting = sorted((p for p in candidates if keys.issuperset(p + name for name in names)), key=len)
    if not fitting:
        raise CheckpointError(
            f"{path} does not hold this model: no prefix turns {longest} and all other parameters into keys "
            f"(it holds {min(keys, default='nothing')}, …).",
            "give the flags of the model that it was saved from",
        )
    ordered = sorted(keys)  # the same prefix on every rank
    heads = (key.partition(f"state.{name}.")[::2] for name in names for key in ordered)
    optim = next((head for head, field in heads if field and (not head or head.endswith("."))), None)
    return Prefixes(fitting[0], optim)

"""A restore: of the newest whole checkpoint, or of the one that --checkpoint.resume names.

It holds the order of attempts and their messages. load.py reads a checkpoint, discovery.py lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from fsdp.base.errors import CheckpointError, without_hint
from fsdp.checkpoint import discovery, file_names, inspect, load
from fsdp.checkpoint import state as states
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.state import LoadTarget, PendingState, Prefixes, of_averages, of_model, of_optimizer
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.dist.shards import local_tensor
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
            notes = [self._set_aside(*one) for one in damaged.items()]
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
        found, notes = self.group.on_main(partial(inspect.listing_of, self.store, folder)), list[str]()
        if (near := self._from_nodes(state, found, notes)) is not None:
            return near
        if found.manifest is None:
            raise Broken(found.why, found.detail)
        return self._sealed(state, self._open(self.store, found), found.manifest, notes)

    def _from_nodes(self, state: TrainState, found: CheckpointListing, notes: list[str]) -> Restored | None:
        """Restores with the files of the nodes' own copies; None without them, or if one is damaged or cannot
        be read.
        """
        if self.tier is None or found.manifest is None:
            return None
        try:
            return self._sealed(state, self._open(self.tier.near(found), found), found.manifest, notes)
        except (Broken, CheckpointError) as error:
            if isinstance(error, Broken):
                self.tier.drop(found.step)
                notes.append(f"a local copy of step {found.step} is NOT whole ({error.detail}): dropped")
            else:
                notes.append(f"a local copy of step {found.step} is not used: {without_hint(error)}")
            if self.env.is_main:
                log.error("%s", notes[-1])
            return None

    def from_path(self, state: TrainState, path: str) -> Restored:
        """Restores the checkpoint at a path, with its counters if it has a manifest, else from step 0.

        A checkpoint at a path is never renamed.
        """
        place, found = self.group.on_main(lambda: discovery.find_checkpoint(path))
        try:
            source = self._open(open_store(place), found)
            if found.manifest is not None:
                return self._sealed(state, source, found.manifest, [])
            where = _prefixes(source.metadata, states.parameter_names(state.model).values(), path)
            where = replace(where, optim=None) if self.weights_only else where
            averaged = self._load(state, source, where, exact=False)
            epoch, dropped = self._beside_tensors(state, source, where)
            counters = self._counters(state, source, dropped)
        except Broken as broken:
            hint = "give another, or --checkpoint.resume auto"
            raise CheckpointError(f"{path} is not whole: {broken.detail}.", hint) from None
        what = "weights and optimizer" if where.optim is not None else "weights alone"
        note = f"{what} of a checkpoint without a manifest, which cannot be verified"
        if counters is not None:
            state.set_counters(counters)
        return Restored(state.step, path, (note, *averaged, *dropped), epoch if state.step == 0 else None)

    def _counters(
        self, state: TrainState, source: load.CheckpointSource, notes: list[str]
    ) -> dict[str, float | int] | None:
        """Those of a run's own checkpoint that torch's converters have rewritten; None if it has none."""
        keys = {name: f"train.{name}" for name in state.counters()}
        if not set(keys.values()) <= source.metadata.state_dict_metadata.keys():
            return None
        found = self.group.on_main(lambda: load.read_numbers(source, keys))
        if found is None:
            notes.append(f"dropped, since they are not all numbers: {', '.join(keys.values())}")
        return found

    def _beside_tensors(
        self, state: TrainState, source: load.CheckpointSource, where: Prefixes
    ) -> tuple[int | None, list[str]]:
        """The epoch of another program's checkpoint, and a note on what is not loaded."""
        names = [where.model + name for name in states.model_tensors(state.model)]
        key, others = _other_keys(source.metadata, names, where)
        epoch = None if key is None else self.group.on_main(lambda: load.read_whole_number(source, key))
        if key is not None and epoch is None:
            others.insert(0, key)
        others = [one for one in others if not one.startswith("train.")]
        few = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        return epoch, [f"dropped, since a run has no place for it: {few}"] if others else []

    def _sealed(
        self, state: TrainState, source: load.CheckpointSource, manifest: Manifest, notes: list[str]
    ) -> Restored:
        """Restores a sealed checkpoint with its counters."""
        from fsdp.checkpoint import adapter_weights

        adapter_weights.check(manifest, self.base, source.store.path(source.folder))
        where, more = Prefixes(optim=None) if self.weights_only else Prefixes(), []
        if not self.weights_only and not same_states(manifest.optimizer, state.optimizer_name):
            where = Prefixes(optim=None)
            more.append(
                f"--optim.name {state.optimizer_name} starts with fresh states: "
                f"those of the checkpoint are of {manifest.optimizer}"
            )
        more += self._load(state, source, where, exact=True)
        try:
            state.set_counters(dict(manifest.counters))
        except (KeyError, ValueError, OverflowError) as error:
            raise Broken("manifest", f"its counters are not a run's ({error!r})") from None
        state.data = manifest.data
        differences = discovery.differences(manifest, self.sizes, self.env.world_size, self.config)
        return Restored(manifest.step, source.store.path(source.folder), (*notes, *more, *differences))

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

    def _open(self, store: Store, found: CheckpointListing) -> load.CheckpointSource:
        """Rank 0 reads the places of all tensors and broadcasts them."""
        data, failure = self.group.broadcast(self._read_metadata(store, found) if self.env.is_main else None)
        if failure is not None:
            raise failure
        return load.opened(store, found.folder, found.manifest, data)

    def _read_metadata(self, store: Store, found: CheckpointListing) -> tuple[bytes, load.Failure | None]:
        try:
            return load.read_metadata(store, found.folder), None
        except (OSError, Broken) as error:
            path = f"{store.path(found.folder)}/{file_names.METADATA}"
            return b"", inspect.classify_failure(error, path)

    def _load(
        self, state: TrainState, source: load.CheckpointSource, where: Prefixes, exact: bool
    ) -> list[str]:
        """Returns notes for the log."""
        path = source.store.path(source.folder)
        targets: list[LoadTarget] = of_model(state.model, source.metadata, where, exact, path)
        pending: PendingState | None = None
        if where.optim is not None:
            more, pending = of_optimizer(state, source.metadata, where.optim, exact, path)
            targets += more
        found, missing = of_averages(state, source.metadata)
        load.fill(source, _distinct(targets + found), pending, self.group, self.section.verify)
        _start_averages(state, missing)
        if missing:
            return [f"the moving average of {len(missing)} parameters starts from the checkpoint's weights"]
        dropped = not found and any(key.startswith("ema.") for key in source.metadata.state_dict_metadata)
        return ["the checkpoint's moving average of the weights is dropped: --optim.ema is 0"] * dropped


@torch.no_grad()
def _start_averages(state: TrainState, names: list[str]) -> None:
    weights = states.model_tensors(state.model) if names else {}
    for name in names:
        local_tensor(averages(state.optimizer)[name]).copy_(local_tensor(weights[name]))


def load_weights(
    source: load.CheckpointSource, model: nn.Module, group: ObjectGroup, *, verify: bool
) -> None:
    """Fills a sharded model alone, without optimizer and counters. Collective."""
    path = source.store.path(source.folder)
    targets = of_model(model, source.metadata, Prefixes(), True, path)
    try:
        load.fill(source, _distinct(targets), None, group, verify)
    except Broken as broken:
        raise CheckpointError(
            f"{path} is not whole: {broken.detail}.", f"python -m fsdp.checkpoint {source.store.where} verify"
        ) from None


def _distinct(targets: list[LoadTarget]) -> list[LoadTarget]:
    """One target for each memory: tied weights have two keys."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept = []
    for target in targets:
        memory = (target.piece.local.data_ptr(), target.piece.sizes)
        if target.piece.nbytes and memory in seen:
            continue
        seen.add(memory)
        kept.append(target)
    return kept


# ---------------------------------------------------------------- checkpoints of other programs


def _prefixes(metadata: Metadata, parameters: Iterable[str], where: str) -> Prefixes:
    """The prefixes of this checkpoint's keys, for a model with these parameters. Programs nest them in ways:
    {"model": …}, {"app": {"model": …, "optim": …}}, {"state_dict": {"module": …}}.
    """
    keys, names = set(metadata.state_dict_metadata), list(parameters)
    longest = max(names, key=len)
    candidates = {key.removesuffix(longest) for key in keys if key.endswith(longest)}
    fitting = sorted((p for p in candidates if all(p + name in keys for name in names)), key=len)
    if not fitting:
        example = min(keys, default="nothing")
        raise CheckpointError(
            f"{where} does not hold this model: no prefix turns {longest} and all other parameters into keys "
            f"(it holds {example}, …).",
            "give the flags of the model that it was saved from",
        )
    return Prefixes(fitting[0], _optimizer_prefix(keys, names))


def _other_keys(
    metadata: Metadata, model_keys: Iterable[str], where: Prefixes
) -> tuple[str | None, list[str]]:
    """The key of the epoch beside the model, if there is one, and every other key that is not loaded."""
    parts = where.model.split(".")
    levels = [".".join([*parts[:depth], ""]) if depth else "" for depth in range(len(parts))]
    keys = set(metadata.state_dict_metadata)
    epoch = next((level + "epoch" for level in reversed(levels) if level + "epoch" in keys), None)
    left = keys - set(model_keys) - {epoch}
    if where.optim is not None:
        loaded = (f"{where.optim}state.", f"{where.optim}param_groups.")
        left = {key for key in left if not key.startswith(loaded)}
    return epoch, sorted(left)


def _optimizer_prefix(keys: set[str], names: list[str]) -> str | None:
    """The prefix before `state.<parameter>.<moment>`, if the checkpoint has such a key."""
    for name in names:
        for key in keys:
            head, middle, _ = key.rpartition(f"state.{name}.")
            if middle and (not head or head.endswith(".")):
                return head
    return None

"""Retention: keeps the last k checkpoints, every n-th step's, and the best by a metric.

Only whole checkpoints count, and old ones are deleted after the new one is sealed.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdp.base.errors import without_hint
from fsdp.checkpoint import file_names
from fsdp.checkpoint.inspect import CheckpointListing, finals_of, listing_or_reason
from fsdp.checkpoint.sealing import one_line
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection

log = logging.getLogger(__name__)

RETRIED = 8
"""Steps that an earlier call could not delete and this one tries again: of a thousand in a bucket that lets
nobody delete, each takes several requests.
"""


def superfluous(section: CheckpointSection, whole: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """The whole checkpoints that no rule keeps."""
    if not section.keep_last:
        return []
    newest = sorted(whole, key=lambda found: found.step, reverse=True)
    kept = {found.folder for found in newest[: section.keep_last]}
    if section.keep_every_steps:
        kept |= {found.folder for found in newest if found.step % section.keep_every_steps == 0}
    kept |= {
        found.folder
        for found in sorted(newest, key=lambda found: _rank(section, found))[: section.keep_best]
        if _has(section, found)
    }
    return [found for found in newest if found.folder not in kept]


def _metric(section: CheckpointSection, found: CheckpointListing) -> float:
    assert found.manifest is not None
    value = found.manifest.metrics.get(section.keep_best_metric.lstrip("-"), math.nan)
    return -value if section.keep_best_metric.startswith("-") else value


def _has(section: CheckpointSection, found: CheckpointListing) -> bool:
    return not math.isnan(_metric(section, found))


def _rank(section: CheckpointSection, found: CheckpointListing) -> tuple[bool, float, int]:
    """Sorts the best first, ties by the newest, and those without the metric last."""
    value = _metric(section, found)
    return math.isnan(value), value if not math.isnan(value) else 0.0, -found.step


def prune(
    store: Store,
    section: CheckpointSection,
    attempt: str,
    known: dict[str, CheckpointListing] | None = None,
    left: dict[int, str] | None = None,
) -> list[str]:
    """Deletes what no rule keeps, and what earlier deletions left; returns the deleted folders.

    `known` are the whole checkpoints of an earlier call, by folder: of these the last ones and the best are
    examined again, since others are deleted for them. A run may keep a thousand. `left` holds why a step
    could not be deleted, from earlier calls and from this one.
    """
    if not section.keep_last:
        return []
    known, left = {} if known is None else known, {} if left is None else left
    folders = store.folders()
    whole = _whole(store, section, known, finals_of(folders))
    unwanted = [found.folder for found in superfluous(section, whole)] + _half_deleted(folders)
    deleted = delete(store, _due(unwanted, left), attempt, left)
    for folder in deleted:
        known.pop(folder, None)
    return deleted


def delete(store: Store, folders: Iterable[str], attempt: str, left: dict[int, str]) -> list[str]:
    """Deletes these folders, as far as that is possible; returns those that it deleted.

    `left` receives the others: step → why. OSError for a server that does not answer: each further request
    would take minutes.
    """
    deleted = []
    for folder in folders:
        try:
            store.remove(folder, attempt)
            deleted.append(folder)
            why = ""
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                raise
            why = f"{folder}: {one_line(error).removeprefix(store.path(folder) + '/')}"
        left.pop(_step(folder), None)  # its place: the others are tried again before it
        if why:
            left[_step(folder)] = why
    return deleted


def _half_deleted(folders: Sequence[str]) -> list[str]:
    return [folder for folder in folders if (name := file_names.parse(folder)) and name.kind == "gone"]


def _due(unwanted: Sequence[str], left: dict[int, str]) -> list[str]:
    """The folders to delete now: new ones, then those of the RETRIED steps that were tried longest ago.

    What somebody else has deleted is taken out of `left`. A folder may have another name after a failure.
    """
    steps = {_step(folder) for folder in unwanted}
    for step in left.keys() - steps:
        del left[step]
    again = list(left)[:RETRIED]
    new = [folder for folder in unwanted if _step(folder) not in left]
    return new + [folder for step in again for folder in unwanted if _step(folder) == step]


def _step(folder: str) -> int:
    name = file_names.parse(folder)
    return -1 if name is None else name.step


def _whole(
    store: Store, section: CheckpointSection, known: dict[str, CheckpointListing], folders: Sequence[str]
) -> list[CheckpointListing]:
    for folder in known.keys() - set(folders):
        del known[folder]
    best = sorted(known.values(), key=lambda found: _rank(section, found))[: section.keep_best]
    again = {found.folder for found in best}
    whole: list[CheckpointListing] = []
    for folder in folders:
        if folder not in known or folder in again or len(whole) < section.keep_last:
            found = listing_or_reason(store, folder)
            known.pop(folder, None)
            if found.unread is not None:
                log.warning("%s; it is neither counted nor deleted", without_hint(found.unread).rstrip("."))
            if found.manifest is None:
                continue
            # not the lists of its files and tensors
            known[folder] = replace(found, manifest=replace(found.manifest, files={}, digests={}))
        whole.append(known[folder])
    return whole


def sweep(store: Store, attempt: str) -> list[str]:
    """Deletes what earlier attempts left half-written or half-deleted; the caller holds the store's lock.

    What cannot be deleted is logged and left: it does not count as a checkpoint, and the run starts.
    """
    swept = []
    for folder in store.folders():
        name = file_names.parse(folder)
        if name is not None and name.kind in ("tmp", "gone") and name.attempt != attempt:
            try:
                store.remove(folder, attempt)
            except OSError as error:
                log.warning("%s could not be removed: %s", store.path(folder), error)
                continue
            swept.append(folder)
    return swept

"""Retention: keeps the last k checkpoints, every n-th step's, and the best by a metric.

Only whole checkpoints count, and old ones are deleted after the new one is sealed.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fsdp.base.errors import without_hint
from fsdp.checkpoint.inspect import CheckpointListing, finals, listing_or_reason
from fsdp.checkpoint.manifest import parse_name, step_of
from fsdp.checkpoint.sealing import one_line
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection

log = logging.getLogger(__name__)

MOST_FAILURES = 8
"""Deletions of one call: of a thousand in a bucket that lets nobody delete, each takes several requests."""


def superfluous(section: CheckpointSection, whole: Sequence[CheckpointListing]) -> list[CheckpointListing]:
    """The whole checkpoints that no rule keeps."""
    if not section.keep_last:
        return []
    newest = sorted(whole, key=lambda listing: listing.step, reverse=True)
    every = section.keep_every_steps
    regular = [listing for listing in newest if every and listing.step % every == 0]
    wanted = {listing.folder for listing in [*newest[: section.keep_last], *regular, *_best(section, newest)]}
    return [listing for listing in newest if listing.folder not in wanted]


def _best(section: CheckpointSection, whole: Iterable[CheckpointListing]) -> list[CheckpointListing]:
    """The best by their metric, of equal ones the newest."""
    name, sign = section.keep_best_metric.lstrip("-"), -1 if section.keep_best_metric[:1] == "-" else 1
    ranked = [
        (sign * value, -found.step, found)
        for found in whole
        if found.manifest is not None and not math.isnan(value := found.manifest.metrics.get(name, math.nan))
    ]
    return [found for _, _, found in sorted(ranked, key=lambda entry: entry[:2])[: section.keep_best]]


def prune(
    store: Store,
    section: CheckpointSection,
    attempt: str,
    known: dict[str, CheckpointListing] | None = None,
    left: dict[int, str] | None = None,
) -> list[str]:
    """Deletes what no rule keeps, and what earlier deletions left; returns the deleted folders.

    `known` are the whole checkpoints of an earlier call, by folder: of these the last ones and the best are
    examined again, since others are deleted for them. A run may keep a thousand. `left` receives the steps
    that could not be deleted, each with the reason.
    """
    if not section.keep_last:
        return []
    known = {} if known is None else known
    whole = list(_whole(store, section, known))
    unwanted = [listing.folder for listing in superfluous(section, whole)]
    unwanted += [folder for folder in store.folders() if ".gone-" in folder and step_of(folder) >= 0]
    deleted = delete(store, unwanted, attempt, {} if left is None else left)
    known.clear()
    known.update({listing.folder: listing for listing in whole if listing.folder not in deleted})
    return deleted


def delete(store: Store, folders: Iterable[str], attempt: str, left: dict[int, str]) -> list[str]:
    """Deletes these folders, as far as that is possible; returns those that it deleted.

    `left` receives the others, up to MOST_FAILURES: step → why. OSError for a server that does not answer:
    each further request would take minutes.
    """
    deleted = []
    for folder in folders:
        try:
            store.remove(folder, attempt)
            deleted.append(folder)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                raise
            reason = one_line(error).removeprefix(store.path(folder) + "/")
            left[step_of(folder)] = f"{folder}: {reason}"
            if len(left) == MOST_FAILURES:
                break
    return deleted


def _whole(
    store: Store, section: CheckpointSection, known: dict[str, CheckpointListing]
) -> Iterator[CheckpointListing]:
    """The whole checkpoints, the newest first."""
    best, count = {listing.folder for listing in _best(section, known.values())}, 0
    for folder in finals(store):
        listing = known.get(folder)
        if listing is None or folder in best or count < section.keep_last:
            listing = listing_or_reason(store, folder)
        if listing.unread is not None:
            log.warning("%s; it is neither counted nor deleted", without_hint(listing.unread).rstrip("."))
        if listing.manifest is not None:
            count += 1
            # without the lists of its files and tensors
            yield replace(listing, manifest=replace(listing.manifest, files={}, digests={}))


def sweep(store: Store, attempt: str) -> list[str]:
    """Deletes what earlier attempts left half-written or half-deleted; the caller holds the store's lock.

    What cannot be deleted is logged and left: it does not count as a checkpoint, and the run starts.
    """
    swept = []
    for folder in store.folders():
        name = parse_name(folder)
        if name is not None and name.kind in ("tmp", "gone") and name.attempt != attempt:
            try:
                store.remove(folder, attempt)
            except OSError as error:
                log.warning("%s could not be removed: %s", store.path(folder), error)
                continue
            swept.append(folder)
    return swept

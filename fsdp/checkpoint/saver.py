"""One save beside the training steps: copy, write, seal (sealing.py). At most one is in flight.

The main thread hands over a snapshot and waits for the copy, for the end of the save, or reads its outcome.
All collectives here use a group of their own, from one background thread, in the same order on every rank.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from zlib import crc32

import torch

from fsdp.base.devices import WorkerThread
from fsdp.base.errors import CheckpointError, RefusedError
from fsdp.checkpoint import file_names, manifest
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.rank_file import (
    HEAD,
    Image,
    Staging,
    StagingMemory,
    WritePlan,
    Written,
    make_plan,
    metadata_bytes,
    pack_values,
    sum_digests,
    write_file,
)
from fsdp.checkpoint.sealing import Contents, SaveOutcome, Sealing, failed
from fsdp.checkpoint.state import KeyPath, Snapshot
from fsdp.dist.network import is_lost_peer
from fsdp.rundir.lock import TWO_RUNS
from fsdp.rundir.paths import storage_advice, storage_shown

log = logging.getLogger(__name__)

NICE = 10  # the background thread yields to the step's threads


@dataclass
class SaveJob:
    """One save. The main thread waits for it by the two events."""

    step: int
    snapshot: Snapshot
    about: Manifest
    ready: torch.cuda.Event | None = None
    values: list[tuple[str, KeyPath, bytes]] = field(default_factory=list)
    stall_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    copied: threading.Event = field(default_factory=threading.Event)
    copies: torch.cuda.Event | None = None
    done: threading.Event = field(default_factory=threading.Event)
    outcome: SaveOutcome | None = None
    settled: bool = False
    """Its outcome has been logged."""


class Saver:
    """The background thread, and what it keeps between saves: plan and staging buffer."""

    def __init__(self, sealing: Sealing, device: torch.device, memory: StagingMemory | None = None) -> None:
        self._sealing, self._group = sealing, sealing.group
        self._staging = Staging(device, memory)
        self._plan: WritePlan | None = None
        self._thread = WorkerThread(self._serve, "checkpoint", device, _lower_priority)

    def put(self, job: SaveJob) -> None:
        self._thread.put(job)

    def stop(self) -> None:
        self._thread.stop()

    def _serve(self, job: SaveJob) -> None:
        try:
            job.outcome = self._save(job)
        except Exception as error:
            # The ranks are disconnected: a peer has died, or this one cannot even copy.
            outcome, path = failed(job.step, [self._sealing.failure(error)]), self._sealing.sealed_path
            job.outcome = replace(outcome, path=path, fatal=True, cause=error, unseen=self._group.rank != 0)
        finally:
            job.copied.set()
            job.done.set()

    def _save(self, job: SaveJob) -> SaveOutcome:
        started = time.perf_counter()
        self._plan = make_plan(job.snapshot, self._plan, self._group)
        image = self._staging.copy([job.snapshot.pieces[nth] for nth in self._plan.mine], job.ready)
        job.copies = self._staging.event()
        job.copied.set()
        outcome = self._sealing.run(job.step, partial(self._write, job, image), partial(self._contents, job))
        return replace(outcome, write_s=time.perf_counter() - started)

    def _write(self, job: SaveJob, image: Image, folder: str) -> Written:
        if job.copies is not None:
            job.copies.synchronize()
        job.values = pack_values(job.snapshot) if self._group.rank == 0 else []
        values = [data for _, _, data in job.values]
        return write_file(self._sealing.store, folder, self._group.rank, image, values, self._staging)

    def _contents(self, job: SaveJob, written: list[Written]) -> Contents:
        """Rank 0: the file that names the places of all tensors, and the manifest."""
        assert self._plan is not None
        places = metadata_bytes(self._plan, job.values)
        files = {report.file: (report.size, report.crc) for report in written}
        files[file_names.METADATA] = (len(places), crc32(places))
        total = sum(size for size, _ in files.values())
        digests = sum_digests(self._plan, (report.shares for report in written))
        about = replace(job.about, created=time.time(), files=files, digests=digests, bytes=total, head=HEAD)
        return Contents({file_names.METADATA: places}, manifest.encode(about), total)


def _lower_priority() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)


def not_saved(outcome: SaveOutcome, what: str, place: str) -> CheckpointError:
    """`what`, then why; with the ranks and the error number of the failed save. `place`: where it writes."""
    # The lock alone ends a run without an exception: another start would be refused, or begin anew.
    lock_lost = outcome.fatal and outcome.cause is None
    advice = storage_advice(outcome.error_number, place) or storage_shown(place)
    if outcome.cause is not None and is_lost_peer(outcome.cause):
        # The cause tells the watch that another rank is at fault.
        error = CheckpointError(
            f"{what}: another rank ended during the save.",
            "the same command resumes from the newest whole checkpoint",
        )
    else:
        error = (RefusedError if lock_lost else CheckpointError)(
            f"{what}: {outcome.failure}.",
            f"{TWO_RUNS if lock_lost else advice}, then start the same command: it resumes from the newest "
            "whole checkpoint",
            ranks=outcome.ranks,
            error_number=outcome.error_number,
        )
    error.__cause__ = outcome.cause
    return error

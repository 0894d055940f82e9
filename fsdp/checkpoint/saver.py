"""One save beside the training steps: copy, write, gather, seal, prune. At most one is in flight.

The main thread hands over a snapshot and waits for the copy, for the end of the save, or reads its outcome.
All collectives here use a group of their own, from one background thread, in the same order on every rank. A
rank that cannot write reports that in the gather: every rank learns of it and nothing is sealed.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch

from fsdp.base.devices import WorkerThread
from fsdp.base.errors import CheckpointError, RefusedError, error_number, without_hint
from fsdp.checkpoint import file_names, inspect, manifest, pieces
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.rank_file import Image, Staging, StagingMemory, Written, write_file
from fsdp.checkpoint.save_plan import WritePlan, make_plan, metadata_bytes, pack_values, sum_digests
from fsdp.checkpoint.state import KeyPath, Snapshot
from fsdp.checkpoint.store import Store
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.lost_peer import is_lost_peer
from fsdp.rundir.lock import TWO_RUNS
from fsdp.rundir.paths import storage_advice, storage_shown

log = logging.getLogger(__name__)

NICE = 10  # the background thread yields to the step's threads


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank."""

    step: int
    path: str
    failure: str = ""
    fatal: bool = False
    """No later save can succeed: another job has the run directory, or the ranks are disconnected."""
    unseen: bool = False
    """Whether the checkpoint exists is unknown: the store did not answer after the failure, or rank 0."""
    doubt: str = ""
    """What failed in a save whose checkpoint exists all the same: a power cut may still lose it."""
    write_s: float = 0.0
    bytes: int = 0
    ranks: tuple[int, ...] = ()
    """The ranks whose part failed."""
    error_number: int = 0
    """`errno` of the first failure that has one."""
    cause: Exception | None = None
    """The error that ended the save outside of a part, on this rank: as a rule that of a collective."""

    @property
    def verdict(self) -> str:
        if self.path:
            return "is saved, but the run ends"
        return "may NOT be saved" if self.unseen else "was NOT saved"


@dataclass(frozen=True)
class PartFailure:
    """Why the part of one rank was not written."""

    rank: int
    line: str
    error_number: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.line}"


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
    """The background thread, and what it keeps between saves: plan, staging buffer, group."""

    def __init__(
        self,
        store: Store,
        group: ObjectGroup,
        device: torch.device,
        attempt: str,
        lock_lost: Callable[[], str | None],
        after_seal: Callable[[], None],
        memory: StagingMemory | None = None,
    ) -> None:
        self._store, self._group, self._attempt = store, group, attempt
        self._lock_lost, self._after_seal = lock_lost, after_seal
        self._staging, self._device = Staging(device, memory), device
        self._compared = False
        self._sealed_path = ""
        """Rank 0: the checkpoint of the save in flight, once it is sealed."""
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
            outcome = failed(job.step, [self._part_failure(error)])
            job.outcome = replace(
                outcome, path=self._sealed_path, fatal=True, cause=error, unseen=self._group.rank != 0
            )
        finally:
            job.copied.set()
            job.done.set()

    def _save(self, job: SaveJob) -> SaveOutcome:
        started, self._sealed_path = time.perf_counter(), ""
        self._plan = make_plan(job.snapshot, self._plan, self._group)
        image = self._staging.copy([job.snapshot.pieces[nth] for nth in self._plan.mine], job.ready)
        job.copies = self._staging.event()
        job.copied.set()
        folder, refused = self._begin(job)
        if refused is not None:
            return refused
        if job.copies is not None:
            job.copies.synchronize()
        report = self._try_write(folder, image, job)
        reports = self._group.gather(report)
        outcome = self._end(job, folder, reports)
        self._compared = True
        if outcome.path and not outcome.doubt and self._group.rank == 0:
            self._after_seal()
        return replace(outcome, write_s=time.perf_counter() - started)

    def _begin(self, job: SaveJob) -> tuple[str, SaveOutcome | None]:
        """The staging folder, made, or the outcome of a save that needs or gets none. Collective."""
        begun: tuple[str, SaveOutcome | None]
        begun = self._group.broadcast(self._open(job.step) if self._group.rank == 0 else None)
        return begun

    def _end(self, job: SaveJob, folder: str, reports: list[Written | PartFailure] | None) -> SaveOutcome:
        """The sealed checkpoint's outcome, or why there is none. Collective; rank 0 has the reports."""
        outcome: SaveOutcome
        closed = self._close(job, folder, reports) if reports is not None else None
        self._sealed_path = closed.path if closed is not None else ""
        outcome = self._group.broadcast(closed)
        return outcome

    def _open(self, step: int) -> tuple[str, SaveOutcome | None]:
        """Rank 0: makes an empty staging folder, or returns the outcome of a save that needs or gets none.

        A run that resumes and stops at once saves the step that it started from: the existing one stays.
        """
        folder = self._store.staging(step, self._attempt)
        try:
            if (why := self._lock_lost()) is not None:
                return "", SaveOutcome(step, "", why, fatal=True)
            if (whole := inspect.sealed_step(self._store, step)) is not None:
                return "", SaveOutcome(step, self._store.path(whole.folder))
            self._store.begin(folder)
        except Exception as error:  # the other ranks wait for it, whatever it is
            path = self._store.path(folder)
            line = f"rank 0 cannot make {path}: {one_line(error).removeprefix(f'{path}: ')}"
            return "", SaveOutcome(step, "", line, ranks=(0,), error_number=error_number(error))
        return folder, None

    def _try_write(self, folder: str, image: Image, job: SaveJob) -> Written | PartFailure:
        try:
            job.values = pack_values(job.snapshot) if self._group.rank == 0 else []
            values = [data for _, _, data in job.values]
            written = write_file(self._store, folder, self._group.rank, image, values, self._staging)
            if not self._compared:
                written.buffers = {
                    p.key: pieces.digest(p.local, p.offsets, p.size) for p in job.snapshot.pieces if p.buffer
                }
            return written
        except Exception as error:  # the other ranks wait for it, whatever it is
            return self._part_failure(
                error, f"{self._store.path(folder)}/{file_names.data_file(self._group.rank)}"
            )

    def _part_failure(self, error: BaseException, file: str = "") -> PartFailure:
        return PartFailure(self._group.rank, one_line(error, file), error_number(error))

    def _close(self, job: SaveJob, folder: str, reports: list[Written | PartFailure]) -> SaveOutcome:
        """Rank 0: seals the checkpoint if every rank has written its file, else deletes the files."""
        failures = [report for report in reports if isinstance(report, PartFailure)]
        written = [report for report in reports if isinstance(report, Written)]
        if not failures:
            try:
                self._compare_buffers(written)
                return self._seal(job, folder, written)
            except Exception as error:  # the other ranks wait for it, whatever it is
                failures.append(self._part_failure(error))
                if (there := self._outcome_near_seal(job, str(failures[0]))) is not None:
                    return replace(there, ranks=(0,), error_number=failures[0].error_number)
        try:
            self._store.remove(folder, self._attempt)
        except OSError as error:
            outcome = failed(job.step, failures)
            left = f"what was written could not be deleted: {one_line(error)}"
            return replace(outcome, failure=f"{outcome.failure}; {left}")
        return failed(job.step, failures)

    def _outcome_near_seal(self, job: SaveJob, failure: str) -> SaveOutcome | None:
        """Rank 0: the outcome of a save that failed at its seal and left a checkpoint; None if it left none.

        An fsync may fail after the rename, and a server's response may be lost after it stored the manifest.
        """
        final = self._store.final(job.step, self._attempt)
        try:
            found = inspect.maybe_sealed(self._store, final)
        except (CheckpointError, OSError) as error:
            # The checkpoint may exist: nothing is deleted.
            return SaveOutcome(job.step, "", f"{failure}; then {without_hint(error)}", unseen=True)
        if found is None or found.attempt != self._attempt:
            return None
        return SaveOutcome(job.step, self._store.path(final), doubt=failure, bytes=found.bytes)

    def _compare_buffers(self, written: list[Written]) -> None:
        """Once: logs buffers that differ between ranks (BatchNorm's statistics); rank 0's are kept."""
        differ = [
            key
            for key, mine in written[0].buffers.items()
            if any(one.buffers.get(key) != mine for one in written)
        ]
        if differ and not self._compared:
            log.warning(
                "%d buffers differ between ranks (%s, …): checkpoints keep rank 0's, "
                "and a resumed run loads them on every rank",
                len(differ),
                differ[0],
            )

    def _seal(self, job: SaveJob, folder: str, written: list[Written]) -> SaveOutcome:
        contents, about, total = self._contents(job, written)
        for file, data in contents.items():
            self._store.write(folder, file, [data])
        # An attempt that lost its connection for a while must not seal where another job has taken over.
        if (why := self._lock_lost()) is not None:
            return SaveOutcome(job.step, "", why, fatal=True)
        self._store.write(folder, file_names.MANIFEST, [about])
        final = self._store.final(job.step, self._attempt)
        self._store.seal(folder, final)
        return SaveOutcome(job.step, self._store.path(final), bytes=total)

    def _contents(self, job: SaveJob, written: list[Written]) -> tuple[dict[str, bytes], bytes, int]:
        """Rank 0: the file that names the places of all tensors, the manifest, and the checkpoint's bytes."""
        assert self._plan is not None
        places = metadata_bytes(self._plan, job.values)
        files = {report.file: (report.size, report.crc) for report in written}
        files[file_names.METADATA] = (len(places), crc32(places))
        total = sum(size for size, _ in files.values())
        digests = sum_digests(self._plan, (report.shares for report in written))
        about = replace(job.about, created=time.time(), files=files, digests=digests, bytes=total)
        return {file_names.METADATA: places}, manifest.encode(about), total


def _lower_priority() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)


def failed(step: int, failures: Sequence[PartFailure]) -> SaveOutcome:
    return SaveOutcome(
        step,
        "",
        "; ".join(map(str, failures)),
        ranks=tuple(sorted({one.rank for one in failures})),
        error_number=next((one.error_number for one in failures if one.error_number), 0),
    )


def one_line(error: BaseException, file: str = "") -> str:
    """File, error code and message of a failure, as far as it has them."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{file}: {type(error).__name__}: {str(error).partition(chr(10))[0]}".removeprefix(": ")
    number = errno.errorcode.get(error.errno, str(error.errno))
    return f"{error.filename or file}: {number}, {error.strerror}".removeprefix(": ")


def repeated(outcome: SaveOutcome, place: str) -> CheckpointError:
    return not_saved(outcome, f"the save of step {outcome.step} failed, as did the one before", place)


def not_saved(outcome: SaveOutcome, what: str, place: str) -> CheckpointError:
    """`what`, then why; with the ranks and the error number of the failed save. `place`: where it writes."""
    advice = storage_advice(outcome.error_number, place) or storage_shown(place)
    if outcome.fatal and outcome.cause is None:
        advice = TWO_RUNS
    hint = f"{advice}, then start the same command: it resumes from the newest whole checkpoint"
    if outcome.cause is not None and is_lost_peer(outcome.cause):
        # The cause tells the watch that another rank is at fault.
        error = CheckpointError(
            f"{what}: another rank ended during the save.",
            "the same command resumes from the newest whole checkpoint",
        )
    else:
        # The lock alone ends a run without an exception: another start would be refused, or begin anew.
        kind = RefusedError if outcome.fatal and outcome.cause is None else CheckpointError
        error = kind(
            f"{what}: {outcome.failure}.", hint, ranks=outcome.ranks, error_number=outcome.error_number
        )
    error.__cause__ = outcome.cause
    return error

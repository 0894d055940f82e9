"""One save, behind the steps: copy, write, gather, seal, prune. At most one is in flight.

The main thread hands over a snapshot and asks for three things: is the copy done, is the save done, how did
it end. All collectives here go over a group of their own, from the one background thread, in the same order
on every rank. A rank that cannot write says so in its turn, so that all hear and nothing is sealed.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from fsdp.base.devices import set_thread_device
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, inspect, manifest, pieces
from fsdp.checkpoint.crc import crc32
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.rank_file import Written, write_file
from fsdp.checkpoint.snapshot import KeyPath, Snapshot
from fsdp.checkpoint.staging import Image, Room, Staging
from fsdp.checkpoint.store import Store
from fsdp.checkpoint.write_plan import WritePlan, agree, metadata_bytes, pack_values
from fsdp.dist.collectives import ObjectGroup

log = logging.getLogger(__name__)

NICE = 10  # the background thread yields to the step's own threads


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank."""

    step: int
    path: str
    failure: str = ""
    fatal: bool = False
    """No later save can do better: the run directory is another's, or the ranks cannot speak."""
    unseen: bool = False
    """The store did not answer when the save had failed: whether the checkpoint is there is not known."""
    doubt: str = ""
    """What failed in a save whose checkpoint is there all the same: a power cut may still lose it."""
    write_s: float = 0.0
    bytes: int = 0

    @property
    def verdict(self) -> str:
        return "may NOT be saved" if self.unseen else "was NOT saved"


@dataclass
class SaveJob:
    """One save. The two events are how the main thread waits for it."""

    step: int
    snapshot: Snapshot
    about: Manifest
    ready: torch.cuda.Event | None = None
    values: list[tuple[str, KeyPath, bytes]] = field(default_factory=list)
    stall_s: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    copies: torch.cuda.Event | None = None
    done: threading.Event = field(default_factory=threading.Event)
    outcome: SaveOutcome | None = None
    settled: bool = False
    """A person has been told how it ended."""


class Saver:
    """The background thread and what it keeps between saves: plan, staging buffer, group."""

    def __init__(
        self,
        store: Store,
        group: ObjectGroup,
        device: torch.device,
        attempt: str,
        ours: Callable[[], str | None],
        after: Callable[[], None],
        room: Room | None = None,
    ) -> None:
        self._store, self._group, self._attempt = store, group, attempt
        self._ours, self._after = ours, after
        self._staging, self._device = Staging(device, room), device
        self._compared = False
        self._plan: WritePlan | None = None
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)
        self._thread.start()

    def put(self, job: SaveJob) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        set_thread_device(self._device)
        if hasattr(os, "setpriority"):
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE
            )
        while (job := self._jobs.get()) is not None:
            try:
                job.outcome = self._save(job)
            except Exception as error:
                # The ranks cannot speak any more: a peer has died, or this one cannot even copy.
                job.outcome = SaveOutcome(
                    job.step, "", f"rank {self._group.rank}: {one_line(error)}", fatal=True
                )
            finally:
                job.copied.set()
                job.done.set()

    def _save(self, job: SaveJob) -> SaveOutcome:
        started = time.perf_counter()
        self._plan = agree(job.snapshot, self._plan, self._group)
        image = self._staging.copy(job.snapshot.pieces, self._plan.mine, job.ready)
        job.copies = self._staging.event()
        job.copied.set()
        folder, refused = self._group.broadcast(self._open(job.step) if self._group.rank == 0 else None)
        if refused is not None:
            return refused
        if job.copies is not None:
            job.copies.synchronize()
        report = self._try_write(folder, image, job)
        reports = self._group.gather(report)
        outcome = self._close(job, folder, reports) if reports is not None else None
        outcome = self._group.broadcast(outcome)
        self._compared = True
        if outcome.path and not outcome.doubt and self._group.rank == 0:
            self._after()
        return replace(outcome, write_s=time.perf_counter() - started)

    def _open(self, step: int) -> tuple[str, SaveOutcome | None]:
        """Rank 0: an empty staging folder, or how the save has ended without one.

        A run that resumes and stops at once saves the step that it came from: the one that is there stays.
        """
        folder = self._store.staging(step, self._attempt)
        try:
            if (why := self._ours()) is not None:
                return "", SaveOutcome(step, "", why, fatal=True)
            if (whole := inspect.sealed_step(self._store, step)) is not None:
                return "", SaveOutcome(step, self._store.path(whole.folder))
            self._store.begin(folder)
        except Exception as error:  # the other ranks wait to hear of it, whatever it is
            return "", SaveOutcome(
                step, "", f"rank 0 cannot make {self._store.path(folder)}: {one_line(error)}"
            )
        return folder, None

    def _try_write(self, folder: str, image: Image, job: SaveJob) -> Written | str:
        try:
            job.values = pack_values(job.snapshot) if self._group.rank == 0 else []
            written = write_file(
                self._store, folder, self._group.rank, image, [data for _, _, data in job.values]
            )
            self._staging.forget(*(one.tensor for one in image.staged))
            if not self._compared:
                written.buffers = {
                    p.key: pieces.digest(p.local, p.offsets, p.size) for p in job.snapshot.pieces if p.buffer
                }
            return written
        except Exception as error:  # the other ranks wait to hear of it, whatever it is
            return f"rank {self._group.rank}: {one_line(error, self._store.path(folder) + '/' + file_names.data_file(self._group.rank))}"

    def _close(self, job: SaveJob, folder: str, reports: list[Written | str]) -> SaveOutcome:
        """Rank 0: seal what all have written, or clear it away."""
        failures = [report for report in reports if isinstance(report, str)]
        written = [report for report in reports if isinstance(report, Written)]
        if not failures:
            try:
                self._compare_buffers(written)
                return self._seal(job, folder, written)
            except Exception as error:  # the other ranks wait to hear of it, whatever it is
                failures.append(f"rank 0: {one_line(error)}")
                if (there := self._look_after(job, failures[0])) is not None:
                    return there
        try:
            self._store.remove(folder, self._attempt)
        except OSError as error:
            failures.append(f"what was written could not be removed: {one_line(error)}")
        return SaveOutcome(job.step, "", "; ".join(failures))

    def _look_after(self, job: SaveJob, failure: str) -> SaveOutcome | None:
        """Rank 0: what a save that failed near its seal has left; None where that is no checkpoint.

        An fsync may fail after the rename, and a server's answer may be lost after it has stored the
        manifest.
        """
        final = self._store.final(job.step, self._attempt)
        try:
            found = inspect.look(self._store, final).manifest
        except CheckpointError as error:
            # Nothing is deleted on a guess.
            return SaveOutcome(
                job.step, "", f"{failure}; then {str(error).partition(' HINT: ')[0]}", unseen=True
            )
        if found is None or found.attempt != self._attempt:
            return None
        return SaveOutcome(job.step, self._store.path(final), doubt=failure, bytes=found.bytes)

    def _compare_buffers(self, written: list[Written]) -> None:
        """Once: statistics that each rank gathers by itself (BatchNorm's) are kept as rank 0 has them, and
        that is said.
        """
        differ = [
            key
            for key, mine in written[0].buffers.items()
            if any(one.buffers.get(key) != mine for one in written)
        ]
        if differ and not self._compared:
            log.warning(
                "%d buffers differ between ranks (%s, …): checkpoints keep rank 0's, and a resumed run gives them to all",
                len(differ),
                differ[0],
            )

    def _seal(self, job: SaveJob, folder: str, written: list[Written]) -> SaveOutcome:
        assert self._plan is not None
        metadata = metadata_bytes(self._plan, job.values)
        self._store.write(folder, file_names.METADATA, [metadata])
        files = {one.file: (one.size, one.crc) for one in written} | {
            file_names.METADATA: (len(metadata), crc32(metadata))
        }
        total = sum(size for size, _ in files.values())
        about = replace(job.about, created=time.time(), files=files, digests=_digests(written), bytes=total)
        # An attempt that was cut off and came back must not seal into a directory that another has taken
        # over.
        if (why := self._ours()) is not None:
            return SaveOutcome(job.step, "", why, fatal=True)
        self._store.write(folder, file_names.MANIFEST, [manifest.encode(about)])
        final = self._store.final(job.step, self._attempt)
        self._store.seal(folder, final)
        return SaveOutcome(job.step, self._store.path(final), bytes=total)


def _digests(written: list[Written]) -> dict[str, tuple[int, str]]:
    sums: dict[str, tuple[int, int]] = {}
    for one in written:
        for key, (numel, share) in one.shares.items():
            sums[key] = (numel, (sums.get(key, (0, 0))[1] + share) % 2**64)
    return {key: (numel, f"{total:016x}") for key, (numel, total) in sums.items()}


def one_line(error: BaseException, file: str = "") -> str:
    """File, error number and words of a failure, as far as it has them."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{file}: {type(error).__name__}: {str(error).partition(chr(10))[0]}".removeprefix(": ")
    number = errno.errorcode.get(error.errno, str(error.errno))
    return f"{error.filename or file}: {number}, {error.strerror}".removeprefix(": ")


def repeated(outcome: SaveOutcome) -> CheckpointError:
    hint = "free the space or mend the folder, then start the same command: it goes on from the newest whole checkpoint"
    return CheckpointError(
        f"the save of step {outcome.step} failed, as did the one before: {outcome.failure}.", hint
    )

"""The Checkpointer, which the training loop calls: saves beside the steps, restores, reports the outcomes.

It holds the order of saves, the check of who may write, and the messages. save.py writes a save, restore.py
restores, inspect.py selects the checkpoints to keep.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdp.base.errors import CheckpointError, RefusedError, error_number
from fsdp.base.phases import Activity, methods_announce
from fsdp.base.text import listed
from fsdp.checkpoint import inspect, restore
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.restore import Restore, Restored
from fsdp.checkpoint.save import SaveJob, Saver, StagingMemory
from fsdp.checkpoint.sealing import SaveOutcome, Sealing
from fsdp.checkpoint.state import take_snapshot
from fsdp.checkpoint.store import Store, open_store
from fsdp.config import CheckpointSection
from fsdp.distributed.collectives import ObjectGroup
from fsdp.distributed.env import DistEnv, is_lost_peer
from fsdp.distributed.mesh import MeshSizes
from fsdp.optim.optimizer import TrainState
from fsdp.rundir.history import storage_advice
from fsdp.rundir.lock import TWO_RUNS, Lock

if TYPE_CHECKING:
    from fsdp.checkpoint.local_tier import LocalTier
    from fsdp.checkpoint.pretrained import Base
    from fsdp.models.hf import SourceFolder

log = logging.getLogger(__name__)

GUESSED_BYTES_PER_S = 200e6  # until a save has been measured


@dataclass(frozen=True)
class Sealed:
    """A finished save: `stall_s` is the time this rank's steps waited, `write_s` the time beside them."""

    step: int
    path: str
    stall_s: float
    write_s: float
    bytes: int


@methods_announce(Activity.SAVE)
class Checkpointer:
    """Its constructor, restore, save, export and close are collective; the other methods are local."""

    def __init__(
        self,
        section: CheckpointSection,
        run_dir: Path,
        env: DistEnv,
        sizes: MeshSizes,
        *,
        config_hash: str,
        locks: Lock | None = None,
        staging_memory: StagingMemory | None = None,
    ) -> None:
        self.base: Base | None = None
        """The frozen weights of a run with adapters, set before the first restore or save."""
        self.pretrained: SourceFolder | None = None
        self.resumed_step = -1
        """The step restored from this run's own store; -1 if none was."""
        self._section, self._run_dir, self._locks = section, run_dir, locks
        self._env, self._sizes, self._config = env, sizes, config_hash
        self._group = ObjectGroup()
        self._attempt: str = self._group.broadcast(secrets.token_hex(4))
        self._store: Store = open_store(section.dir or f"{self._run_dir}/checkpoints")
        restore.check_shared(self._store, self._group, self._attempt)
        self._tier: LocalTier | None = None
        common = self._attempt, self._before_seal, self._after_seal
        if section.local_dir:
            from fsdp.checkpoint.local_tier import LocalTier

            self._tier = LocalTier(Path(section.local_dir), self._store, env, self._group, *common)
            sealing = self._tier.sealing
        else:
            sealing = Sealing(self._store, self._group, *common, leads=env.is_main)
        self._saver = Saver(sealing, env.device, staging_memory)
        self.flight: SaveJob | None = None
        """The last save, from its call; `before_update` and `sealed` do nothing without one."""
        self.ended: list[Sealed] = []
        self._failed_before = self._closed = False
        self._save_seconds = 0.0
        self._folders: list[str] | None = None
        self._pruned_before: dict[str, CheckpointListing] = {}
        self._undeleted: set[int] = set()

    # ------------------------------------------------------------ saving

    def save(
        self, state: TrainState, *, metrics: Mapping[str, float], reason: str, wait: bool = False
    ) -> None:
        """Starts a save of this step; it is sealed during the next steps, or before this returns (`wait`)."""
        started, best = time.perf_counter(), self._section.keep_best_metric.lstrip("-")
        if self._section.keep_best and "eval_loss" in metrics and best not in metrics and self._env.is_main:
            names, flag = ", ".join(metrics), "--checkpoint.keep_best_metric"
            log.warning("no best is kept: %s %s is none of %s. HINT: %s eval_loss", flag, best, names, flag)
        self._finish()
        job = SaveJob(state.step, take_snapshot(state, self._group), self._about(state, metrics, reason))
        if self._env.device.type == "cuda":
            job.ready = torch.cuda.current_stream(self._env.device).record_event()
        if not self._save_seconds:
            size = sum(piece.local.nbytes for piece in job.snapshot.pieces)
            self._save_seconds = 1.0 + size / GUESSED_BYTES_PER_S
        self.flight = job
        self._saver.put(job)
        waits = wait or self._section.mode == "blocking"
        if waits:
            job.done.wait()
        job.stall_s += time.perf_counter() - started
        if waits:
            self._finish(must=wait)

    def before_update(self) -> None:
        """Delays the optimizer until the save's copy is made. On CUDA its stream waits, the host does not."""
        job = self.flight
        if job is None or job.settled:
            return
        started = time.perf_counter()
        job.copied.wait()
        if job.copies is not None:
            torch.cuda.current_stream(self._env.device).wait_event(job.copies)
        job.stall_s += time.perf_counter() - started

    def sealed(self) -> list[Sealed]:
        """The saves sealed since the last call. A failed save is logged here, once; the run continues."""
        if self.flight is not None and self.flight.done.is_set():
            self._settle(self.flight)
        done, self.ended = self.ended, []
        return done

    @property
    def save_seconds(self) -> float:
        """The duration of a save from its call to its seal in the shared store: the last one's, or a guess
        before the first.
        """
        copying = 0.0 if self._tier is None else self._tier.copy_seconds
        return (self._save_seconds or 5.0) + copying

    def close(self) -> None:
        """Waits for the save in flight, which `sealed` then returns, and for copies to the shared store.

        CheckpointError on every rank if it failed: the run's last state is lost.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish(must=True)
        finally:
            self._saver.stop()
            if self._tier is not None:
                self._tier.close()

    def _finish(self, must: bool = False) -> None:
        """Waits for the save in flight. All ranks are at the same step, so all of them raise or none does."""
        job, self.flight = self.flight, None
        if job is None:
            return
        job.done.wait()
        outcome, place = self._settle(job), self._section.local_dir or self._store.where
        if outcome.fatal or (must and outcome.failure):
            raise not_saved(outcome, f"step {outcome.step} {outcome.verdict.lower()}", place)
        if outcome.failure and self._failed_before:
            reason = f"the save of step {outcome.step} failed, as did the one before"
            raise not_saved(outcome, reason, place)
        self._failed_before = bool(outcome.failure)

    def _settle(self, job: SaveJob) -> SaveOutcome:
        """The outcome of a save, logged once."""
        outcome = job.outcome
        assert outcome is not None
        if job.settled:
            return outcome
        job.settled = True
        if not outcome.failure:
            self.ended.append(Sealed(outcome.step, outcome.path, job.stall_s, outcome.write_s, outcome.bytes))
            self._save_seconds = job.stall_s + outcome.write_s
        elif self._env.is_main:
            then = "" if outcome.fatal else " The run continues."
            log.error("CHECKPOINT of step %d %s: %s.%s", outcome.step, outcome.verdict, outcome.failure, then)
        return outcome

    def _about(self, state: TrainState, metrics: Mapping[str, float], reason: str) -> Manifest:
        """The manifest of this save without its files."""
        sizes = self._sizes
        return Manifest(
            step=state.step,
            attempt=self._attempt,
            created=0.0,
            torch=torch.__version__,
            **asdict(sizes),
            ranks=sizes.ranks,
            config=self._config,
            reason=reason,
            counters=state.counters(),
            files={},
            digests={},
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            base={} if self.base is None else self.base.for_manifest(),
            optimizer=state.optimizer_name,
            data=state.data,
        )

    def _before_seal(self) -> str | None:
        return self._locks.before_seal() if self._locks is not None else None

    def _after_seal(self, outcome: SaveOutcome) -> None:
        """Rank 0 prunes the shared store, in the background. What cannot be deleted is logged, once."""
        if not self._env.is_main:
            return
        left: dict[int, str] = {}
        try:
            if self._locks is not None and (why := self._locks.lost_now()) is not None:
                raise OSError(why)
            inspect.prune(self._store, self._section, self._attempt, self._pruned_before, left)
        except Exception as error:  # the save itself is sealed
            log.warning("old checkpoints in %s were not deleted: %s", self._store.where, error)
        if new := [why for step, why in left.items() if step not in self._undeleted]:
            log.warning("old checkpoints in %s were not deleted: %s", self._store.where, listed(new, 3))
        self._undeleted |= left.keys()

    # ------------------------------------------------------------ restoring

    def has_checkpoint(self) -> bool:
        """Whether this run has checkpoints: `restore` then fills the whole model, or raises. Collective."""
        if self._folders is None:
            if self._tier is not None:
                self._tier.catch_up()
            self._folders = self._group.on_main(
                lambda: restore.list_checkpoints(self._store, self._section, self._attempt)
            )
        return bool(self._folders)

    def restore(self, state: TrainState, *, weights_only: bool = False) -> Restored | None:
        """Loads the newest whole checkpoint into `state`; None for a run without checkpoints. With
        `weights_only` optimizer states are not read.
        """
        self.has_checkpoint()
        folders, self._folders = self._folders, None
        common = self._section, self._sizes, self._config, self.base, weights_only
        attempt = Restore(self._store, self._group, self._env, *common)
        if folders:
            restored = attempt.newest(state, folders)
            self.resumed_step = restored.step
            return restored
        if self._section.resume not in ("auto", "never"):
            return attempt.from_path(state, self._section.resume)
        return None

    # ------------------------------------------------------------ export

    def export(self, folder: Path, *, averaged: bool = False) -> list[Path]:
        """Rank 0 exports the newest checkpoint's model, or its moving average, while the others wait; returns
        the files.
        """
        return self._group.on_main(lambda: self._export(folder, averaged))

    def _export(self, folder: Path, averaged: bool) -> list[Path]:
        from fsdp.checkpoint.export import export, of_averages  # keeps it out of a run's start

        newest, section = inspect.newest_whole(self._store), self._section
        if newest is None:
            raise CheckpointError(
                f"{self._store.where} holds no whole checkpoint to export.", "--checkpoint.export false"
            )
        try:
            source = inspect.open_source(self._store, newest.folder, newest.manifest)
            if averaged:
                source = of_averages(source) or source
            weights = self.base, self.pretrained, section.export_dtype
            return export(source, folder, section.export_format, None, *weights)
        except (Broken, OSError) as error:
            command = "verify" if isinstance(error, Broken) else "export"
            hint = f"python -m fsdp.checkpoint {self._run_dir} {command}"
            reason = f"{newest.folder} was not exported to {folder}: {error}."
            raise CheckpointError(reason, hint, error_number=error_number(error)) from None


def not_saved(outcome: SaveOutcome, reason: str, place: str) -> CheckpointError:
    """`reason`, then why; with the ranks and the error number of the save. `place`: where it writes."""
    hint, why, kind = storage_advice(outcome.error_number, place), outcome.failure, CheckpointError
    if outcome.fatal and outcome.cause is None:
        # The lock alone ends a run without an exception: another start would be refused, or begin anew.
        hint, kind = TWO_RUNS, RefusedError
    elif outcome.cause is not None and is_lost_peer(outcome.cause):
        # The cause tells the watch that another rank is at fault.
        hint, why = "see the rank that ended first", "another rank ended during the save"
    hint += ", then start the same command: it resumes from the newest whole checkpoint"
    error = kind(f"{reason}: {why}.", hint, ranks=outcome.ranks, error_number=outcome.error_number)
    error.__cause__ = outcome.cause
    return error

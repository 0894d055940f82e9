"""The Checkpointer: what the loop calls. Save behind the steps, restore the newest that is whole, say how it
went.

Here live the order of saves, who may write, and the words to people. How a save is written is saver.py's, how
a restore goes restore.py's, which stay is keep.py's.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp.base.errors import CheckpointError
from fsdp.base.phases import Activity, methods_announce
from fsdp.checkpoint import discovery, inspect, load, retention, snapshot
from fsdp.checkpoint.adapter_weights import Base
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.lock import Lock
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.open_store import open_store
from fsdp.checkpoint.restore import Restore, Restored
from fsdp.checkpoint.saver import SaveJob, Saver, repeated
from fsdp.checkpoint.staging import Room
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.optim.train_state import TrainState

log = logging.getLogger(__name__)

LOST_HINT = "mend what it names, then start the same command: it goes on from the newest whole checkpoint"
PATIENCE_S = 10.0
GUESSED_BYTES_PER_S = 200e6  # until a first save has been measured


@dataclass(frozen=True)
class Sealed:
    """A save that is finished: `stall_s` is what it held this rank's steps up, `write_s` what it took behind
    them.
    """

    step: int
    path: str
    stall_s: float
    write_s: float
    bytes: int


@methods_announce(Activity.SAVE)
class Checkpointer:
    """Building, restore, save and close are collective; the rest is local."""

    def __init__(
        self,
        section: CheckpointSection,
        run_dir: Path,
        env: DistEnv,
        sizes: MeshSizes,
        *,
        config_hash: str,
        claim: Lock | None = None,
        room: Room | None = None,
    ) -> None:
        self.base: Base | None = None
        """What a run of adapters lies over, set before anything is restored or saved."""
        self._section, self._run_dir, self._env, self._sizes, self._config = (
            section,
            run_dir,
            env,
            sizes,
            config_hash,
        )
        self._group = ObjectGroup()
        self._attempt: str = self._group.broadcast(secrets.token_hex(4))
        self._store: Store = open_store(section.dir or str(run_dir / "checkpoints"))
        self._claim = claim
        self._saver = Saver(
            self._store, self._group, env.device, self._attempt, self._ousted, self._prune, room
        )
        self._flight: SaveJob | None = None
        self._ended: list[Sealed] = []
        self._failed_before = False
        self._save_seconds = 0.0
        self._founds: list[CheckpointListing] | None = None
        self._proven = False
        self._closed = False

    # ------------------------------------------------------------ saving

    def save(
        self, state: TrainState, *, metrics: Mapping[str, float], reason: str, wait: bool = False
    ) -> None:
        """Begin a save of this step; it is sealed behind the coming steps, or before this returns."""
        started = time.perf_counter()
        self._land()
        self._prove_shared()
        job = SaveJob(state.step, snapshot.take(state), self._about(state, metrics, reason))
        if self._env.device.type == "cuda":
            job.ready = torch.cuda.current_stream(self._env.device).record_event()
        if not self._save_seconds:
            self._save_seconds = (
                1.0 + sum(piece.nbytes for piece in job.snapshot.pieces) / GUESSED_BYTES_PER_S
            )
        self._flight = job
        self._saver.put(job)
        waits = wait or self._section.mode == "blocking"
        if waits:
            job.done.wait()
        job.stall_s += time.perf_counter() - started
        if waits:
            self._land(must=wait)

    def before_update(self) -> None:
        """Hold the optimizer until the last save's copy is taken. On CUDA its stream waits and the host does
        not.
        """
        job = self._flight
        if job is None or job.settled:
            return
        started = time.perf_counter()
        job.copied.wait()
        if job.copies is not None:
            torch.cuda.current_stream(self._env.device).wait_event(job.copies)
        job.stall_s += time.perf_counter() - started

    def sealed(self) -> list[Sealed]:
        """Saves sealed since last asked. One that failed is said here, loudly, once; the run goes on."""
        if self._flight is not None and self._flight.done.is_set():
            self._settle(self._flight)
        done, self._ended = self._ended, []
        return done

    @property
    def save_seconds(self) -> float:
        """What a save takes from its call to its seal: the last one's, or a guess before the first."""
        return self._save_seconds or 5.0

    def close(self) -> None:
        """Wait for what is in flight; `sealed` tells of it afterwards. If that was not sealed, the run's last
        state is lost: CheckpointError, on every rank.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._land(must=True)
        finally:
            self._saver.stop()

    def abandon(self) -> None:
        """Leave without raising, after close or instead of it on an exception's way out: a save in flight may
        still end, if the other ranks are there to end it with; it is not waited for long.
        """
        if self._closed:
            return
        self._closed = True
        if self._flight is not None and self._flight.done.wait(PATIENCE_S + 3 * self.save_seconds):
            self._settle(self._flight)

    def _land(self, must: bool = False) -> None:
        """Wait for the save before this one. All ranks are at the same step here, so all raise or none does."""
        job, self._flight = self._flight, None
        if job is None:
            return
        job.done.wait()
        self._settle(job)
        outcome = job.outcome
        assert outcome is not None
        if outcome.fatal or (must and outcome.failure):
            raise CheckpointError(
                f"step {outcome.step} {outcome.verdict.lower()}: {outcome.failure}.", LOST_HINT
            )
        if outcome.failure and self._failed_before:
            raise repeated(outcome)
        self._failed_before = bool(outcome.failure)

    def _settle(self, job: SaveJob) -> None:
        """Say once how a save ended."""
        if job.settled:
            return
        job.settled = True
        outcome = job.outcome
        assert outcome is not None
        if not outcome.failure:
            self._ended.append(Sealed(job.step, outcome.path, job.stall_s, outcome.write_s, outcome.bytes))
            self._save_seconds = job.stall_s + outcome.write_s
            if outcome.doubt and self._env.is_main:
                log.warning(
                    "checkpoint of step %d is whole in %s, but %s: a power cut may still lose it. Older ones are kept until "
                    "a later save succeeds.",
                    outcome.step,
                    outcome.path,
                    outcome.doubt,
                )
        elif self._env.is_main:
            log.error(
                "CHECKPOINT of step %d %s: %s. The run goes on.",
                outcome.step,
                outcome.verdict,
                outcome.failure,
            )

    def _about(self, state: TrainState, metrics: Mapping[str, float], reason: str) -> Manifest:
        """What the manifest says of this save, but for the files."""
        return Manifest(
            step=state.step,
            attempt=self._attempt,
            created=0.0,
            torch=torch.__version__,
            strategy=self._sizes.strategy,
            replicate=self._sizes.replicate,
            shard=self._sizes.shard,
            ranks=self._env.world_size,
            config=self._config,
            reason=reason,
            counters=state.counters(),
            files={},
            digests={},
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            base={} if self.base is None else self.base.said(),
        )

    def _ousted(self) -> str | None:
        return self._claim.ousted() if self._claim is not None else None

    def _prune(self) -> None:
        """After a seal, on rank 0's background thread. A folder that will not go is said and left."""
        try:
            if (why := self._ousted()) is not None:
                log.warning("old checkpoints were not removed: %s", why)
                return
            retention.prune(self._store, self._section, self._attempt)
        except Exception as error:  # the save itself is sealed
            log.warning("old checkpoints in %s could not be removed: %s", self._store.where, error)

    # ------------------------------------------------------------ restoring

    def finds(self) -> bool:
        """Whether this run has a checkpoint of its own: `restore` then fills the whole model, or raises.
        Collective.
        """
        if self._founds is None:
            self._prove_shared()
            self._founds = self._group.on_main(
                lambda: discovery.survey(self._store, self._section, self._attempt)
            )
        return bool(self._founds)

    def restore(self, state: TrainState) -> Restored | None:
        """The newest whole checkpoint into `state`; None where there is none and there never was."""
        self.finds()
        founds, self._founds = self._founds, None
        how = Restore(
            self._store, self._group, self._env, self._section, self._sizes, self._config, self.base
        )
        if founds:
            return how.newest(state, founds)
        if self._section.resume not in ("auto", "never"):
            return how.from_path(state, self._section.resume)
        return None

    def _prove_shared(self) -> None:
        """Once, before the first look or the first save."""
        if not self._proven:
            self._proven = True
            discovery.prove_shared(self._store, self._group, self._attempt)

    # ------------------------------------------------------------ out

    def export(self, folder: Path) -> list[Path]:
        """The newest sealed checkpoint's model as a state dict, made by rank 0 while the others wait. Returns
        the files.
        """
        return self._group.on_main(lambda: self._export(folder))

    def _export(self, folder: Path) -> list[Path]:
        from fsdp.checkpoint.export import export  # a start need not wait for it

        found = next((one for one in inspect.scan(self._store) if one.manifest is not None), None)
        if found is None:
            raise CheckpointError(
                f"{self._store.where} holds no whole checkpoint to export.", "--checkpoint.export false"
            )
        try:
            source = load.open_one(self._store, found.folder, found.manifest)
            return export(
                source, folder, self._section.export_format, self._section.export_shard_gib, base=self.base
            )
        except (Broken, OSError) as error:
            hint = f"python -m fsdp.checkpoint {self._run_dir} verify"
            raise CheckpointError(f"{found.folder} was not exported to {folder}: {error}.", hint) from None

"""The steps of a run: batch, training step, record, vote on stopping, evaluation and save where they are due.

loop.py builds its parts and restores the checkpoint; step.py holds the training step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fsdp.base.errors import CheckpointError, NotFiniteError, RefusedError
from fsdp.base.phases import Ending, Phases, StopReason
from fsdp.checkpoint import Checkpointer
from fsdp.config import Config
from fsdp.data import Loader, StepBatch
from fsdp.data.cursor import stream_key
from fsdp.data.loader import read_batch
from fsdp.data.types import Batch
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import data_rank
from fsdp.dist.stop import Stopper
from fsdp.models.init import seed_streams
from fsdp.models.loss import LossFunction
from fsdp.optim.custom_optimizer import StateCheck, is_custom
from fsdp.optim.ema import Ema
from fsdp.optim.gradients import InTurn
from fsdp.optim.loss_scale import LossScaler
from fsdp.optim.nonfinite import Verdicts
from fsdp.optim.train_state import TrainState
from fsdp.parallel.float8 import maybe_scales
from fsdp.parallel.shard import Sharded
from fsdp.parallel.update import Update, Whole
from fsdp.record.recorder import Pending, Recorder
from fsdp.run.epochs import Epochs
from fsdp.run.evaluate import Evaluation, Evaluator
from fsdp.run.job import Job
from fsdp.run.packed_rows import check_packed_rows
from fsdp.run.planned import Planned
from fsdp.run.source_losses import NOT_KNOWN, SourceLosses
from fsdp.run.step import StepParts, gradients_of, run_step
from fsdp.run.step_hooks import RunHooks
from fsdp.rundir import history
from fsdp.rundir.line_files import append_if_possible
from fsdp.rundir.lock import Locks
from fsdp.rundir.paths import RunDir
from fsdp.watch.branch_check import BranchCheck
from fsdp.watch.replica_checks import ReplicaChecks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a start ended. `stopped` is why it ended before its last step; None if it reached it."""

    run_dir: Path
    step: int
    stopped: str | None
    evaluation: Evaluation | None


@dataclass(frozen=True)
class StepResult:
    """Tensors may still be computing on the device."""

    loss: Tensor
    grad_norm: Tensor
    tokens: int
    sources: SourceLosses | None = None
    auxiliary: Tensor | None = None


def _named(result: StepResult, unit: str, more: list[float]) -> dict[str, float]:
    """The further numbers of a step as fields of its record."""
    found = {} if result.auxiliary is None else {"aux_loss": more.pop(0)}
    return found if result.sources is None else {**found, **result.sources.named(more, unit)}


@dataclass(kw_only=True)
class TrainingLoop:
    config: Config
    env: DistEnv
    job: Job
    run: RunDir
    sharded: Sharded
    state: TrainState
    loss_function: LossFunction
    loader: Loader
    checkpointer: Checkpointer
    stopper: Stopper
    recorder: Recorder
    phases: Phases
    locks: Locks | None
    update: Update
    in_turn: InTurn | None
    replica_checks: ReplicaChecks
    planned: Planned | None
    ema: Ema | None

    def __post_init__(self) -> None:
        mixed = self.job.data.sources
        self.labels = () if mixed is None else mixed.labels
        self.loss_function.per_row = mixed is not None
        self.sources_missing = False
        self.parts = self._step_parts()
        self.verdicts = self._verdicts()
        self.branches = BranchCheck(self.sharded)
        self.states: StateCheck | None = None
        if is_custom(self.config.optim):
            self.states = StateCheck(
                f"--optim.name {self.config.optim.name}", self.state.optimizer, self.sharded.root
            )
        self.hooks = self._hooks()
        self.evaluator = self._evaluator()
        self.epochs = Epochs(self.job.cursor)
        self.stopped: str | None = None
        self.evaluation: Evaluation | None = None
        self.last_saved = self.checkpointer.resumed_step

    def _step_parts(self) -> StepParts:
        return StepParts(
            sharded=self.sharded,
            loss_function=self.loss_function,
            gradients=gradients_of(self.sharded, self.in_turn),
            optimizer=self.state.optimizer,
            update=self.update,
            scaler=LossScaler(self.state) if self.job.dtypes.needs_loss_scale else None,
            clip_norm=self.config.train.clip_grad_norm,
            sources=len(self.labels),
        )

    def _verdicts(self) -> Verdicts:
        return Verdicts(
            self.config.train,
            self.parts.gradients,
            self.state.optimizer,
            self.sharded.root,
            scaler=self.parts.scaler,
            # the update of the moving average cannot be skipped on the device
            whole_update=isinstance(self.update, Whole)
            and (self.ema is None or self.config.train.nonfinite == "stop"),
        )

    def _hooks(self) -> RunHooks:
        return RunHooks(
            loss_function=self.loss_function,
            info=self.job.data.info,
            phases=self.phases,
            stopper=self.stopper,
            branches=self.branches,
            verdicts=self.verdicts,
            checkpointer=self.checkpointer,
            scales=maybe_scales(
                self.sharded.root, self.config.speed, sharded=self.job.sizes.strategy != "ddp"
            ),
            states=self.states,
            ema=self.ema,
            labels=self.labels,
        )

    def _evaluator(self) -> Evaluator:
        return Evaluator(
            config=self.config,
            sharded=self.sharded,
            loss_function=self.loss_function,
            data=self.job.data,
            batch=self.job.batch,
            rank=data_rank(self.env),
            ema=self.ema,
            before_swap=self.checkpointer.before_update,
            after_swap=self.hooks.refresh_scales,
            asked_to_stop=self._stop_reason,
        )

    def run_to_end(self) -> Outcome:
        try:
            return self._evaluate_only() if self.config.train.evaluate_only else self._train_to_end()
        except NotFiniteError:
            self._end_save_in_flight()
            raise

    def _end_save_in_flight(self) -> None:
        """Seals a save of an earlier step. Only after an error that every rank has at the same step: after
        another, ranks may be gone.
        """
        self.phases.enter("end")
        with contextlib.suppress(CheckpointError):  # the log names it
            self.checkpointer.close()
        self._record_sealed()

    def _evaluate_only(self) -> Outcome:
        self._try_custom_loss(0)
        self._evaluate()
        self._settle()
        self.phases.enter("end")
        self.checkpointer.close()
        return self._finish()

    def _train_to_end(self) -> Outcome:
        last = min(self.config.train.stop_after or self.job.total_steps, self.job.total_steps)
        self._try_custom_loss(self.state.step)
        first = self.state.step
        check_packed_rows(self.config, self.job, self.sharded, self.state.step, self.env.rank)
        while self.state.step < last and not self.stopped:
            self._one_step()
            if self.state.step == first + 1:
                log.info("%s", self.loss_function.objective)
        self._settle()
        if self.stopped is None and self.state.step < self.job.total_steps:
            self.stopped = f"{StopReason.STOP_AFTER} {last}"
        evaluated = self._evaluates_at(self.state.step) and self.evaluation is not None
        if self.stopped is None and self.job.data.heldout is not None and not evaluated:
            self._evaluate()
        wanted = (
            self.config.checkpoint.every_steps
            or self.config.checkpoint.every_minutes
            or self.config.checkpoint.every_epochs
            or self.config.checkpoint.export
        )
        if self.last_saved != self.state.step and (wanted or self.stopped):
            self._save(self.stopped or "the end", wait=True)
        self.phases.enter("end")
        self.checkpointer.close()
        self._record_sealed()
        return self._finish()

    def _try_custom_loss(self, at: int) -> None:
        """Whether a user's loss works with the model's output and returns what can be weighed, by a forward
        of one or two samples of step `at` on all ranks.
        """
        if self.loss_function.custom is None:
            return
        rows = self.job.cursor.indices(at)[:2]
        data = read_batch(self.job.data.train, rows, f"rank {self.env.rank}, before the first step")
        one = Batch(data, torch.ones(len(rows), dtype=torch.bool), len(rows)).to(self.env.device)
        with self.sharded.evaluating():
            self.loss_function.trial(self.sharded.called, one.data)

    def _one_step(self) -> None:
        step = self.state.step + 1
        self.phases.enter("data", step)
        began = time.perf_counter()
        seed_streams(stream_key(self.config.run.seed, step, self.env.rank) % 2**63, self.env.device)
        batch = self.loader.step(self.state.step)
        waited = time.perf_counter() - began
        if self.locks is not None and self.locks.lost is not None:
            raise RefusedError(f"step {step}: {self.locks.lost}.", self.locks.advice())
        self.stopper.begin(step)
        lr = self.job.schedule.lr(step)
        result = self.train_step(batch, lr)
        sums = None if result.sources is None else result.sources.sums
        more = [numbers for numbers in (result.auxiliary, sums) if numbers is not None]
        self._count(batch, result)
        self.replica_checks.compare(step)
        self.phases.enter("record")
        self.recorder.step(
            Pending(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                samples=batch.samples,
                tokens=result.tokens,
                epoch=self.epochs.at(step),
                began=began,
                step_time_s=time.perf_counter() - began,
                data_wait_s=waited,
                more=torch.cat(more) if more else None,
                named=partial(_named, result, self.loss_function.unit),
            )
        )
        if self.recorder.fetches(step):
            self._settle()
        agreed = self.stopper.agreed()
        if not self.stopper.on_host:
            self.branches.check(step - 1, self.stopper.signatures(), last=False)
        self.stopped = agreed.stop
        if self._evaluates_at(step) and not self.stopped:
            self._evaluate()
        every, epochs = self.config.checkpoint.every_steps, self.config.checkpoint.every_epochs
        if (every and step % every == 0) or self.epochs.due(step, epochs) or agreed.save:
            self._save("the interval", wait=False)
        self._record_sealed()

    def train_step(self, batch: StepBatch, lr: float) -> StepResult:
        """Forward and backward over the micro-batches, one verdict of all ranks, one update."""
        self.hooks.start(self.state.step + 1, batch)
        micro = (host.to(self.env.device) for host in batch.micro)
        norm = run_step(self.parts, micro, len(batch.micro), lr=lr, hooks=self.hooks)
        sources = self.hooks.source_losses
        if self.labels and sources is None and not self.sources_missing:
            self.sources_missing = True
            if self.env.is_main:
                log.warning("%s", NOT_KNOWN)
        return StepResult(self.hooks.loss, norm, self.hooks.tokens, sources, self.hooks.auxiliary)

    def _count(self, batch: StepBatch, result: StepResult) -> None:
        self.state.step += 1
        self.state.samples += batch.samples
        self.state.tokens += result.tokens

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Records the steps since the last call. On CUDA the host waits for the device here alone."""
        self.recorder.flush()
        self.verdicts.settle()

    def _evaluates_at(self, step: int) -> bool:
        every, epochs = self.config.train.eval_every_steps, self.config.train.eval_every_epochs
        return (every > 0 and step % every == 0) or self.epochs.due(step, epochs)

    def _evaluate(self) -> None:
        self._settle()  # the time of the steps before ends here
        self.phases.enter("evaluate")
        found = self.evaluator.evaluate()
        if found.stopped:
            self.stopped = found.stopped
            return
        self.evaluation = found
        step = self.state.step
        self.recorder.evaluation(step, found.values(), self.epochs.at(step))

    def _stop_reason(self) -> str | None:
        self.phases.enter("evaluate")
        return self.stopper.check_now().stop

    def _save(self, reason: str, *, wait: bool) -> None:
        self.phases.enter("save")
        self._settle()
        if self.states is not None:
            self.states.check()
        metrics = {} if self.recorder.last is None else {"loss": self.recorder.last.loss}
        metrics |= self.evaluation.values() if self.evaluation is not None else {}
        metrics |= self.epochs.fields(self.state.step)
        self.recorder.saving(self.state.step)
        self.state.data = self.job.cursor.saved(self.state.step)
        self.checkpointer.save(self.state, metrics=metrics, reason=reason, wait=wait)
        self.last_saved = self.state.step
        self.stopper.saved()

    def _record_sealed(self) -> None:
        for sealed in self.checkpointer.sealed():
            self.recorder.saved(
                sealed.step, sealed.path, stall_s=sealed.stall_s, write_s=sealed.write_s, size=sealed.bytes
            )

    def _finish(self) -> Outcome:
        if self.stopped is None and self.config.checkpoint.export and self.last_saved == self.state.step:
            self.checkpointer.export(self.run.full_model)
            if self.ema is not None:
                self.checkpointer.export(self.run.full_model_ema, averaged=True)
        if self.env.is_main:
            finished = "an evaluation" if self.config.train.evaluate_only else "the last step"
            why = self.stopped or finished
            marker = self.run.stopped if self.stopped else self.run.done
            history.write_marker(marker, f"{why} at step {self.state.step}\n")
            how = Ending.STOPPED if self.stopped else Ending.FINISHED
            history.record_end(self.run, step=self.state.step, why=why, how=how)
            if self.planned is not None and (compared := self.planned.compared()) is not None:
                log.info("%s", compared)
                append_if_possible(
                    self.run.history, {"event": "planned", "step": self.state.step, **compared.record()}
                )
        return Outcome(self.run.path, self.state.step, self.stopped, self.evaluation)

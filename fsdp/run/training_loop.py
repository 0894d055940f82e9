"""The steps of a run: batch, training step, record, vote on stopping, evaluation and save where they are due.

loop.py builds its parts and restores the checkpoint; step.py holds the training step.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import CheckpointError, NotFiniteError, RefusedError
from fsdp.base.phases import Ending, Phases, StopReason
from fsdp.checkpoint import Checkpointer
from fsdp.data import Loader, StepBatch
from fsdp.data.loader import read_batch
from fsdp.dist.mesh import data_rank
from fsdp.dist.stop import Stopper
from fsdp.models.loss import LossFunction, read_output
from fsdp.models.registry import PACKED, POSITIONS
from fsdp.optim.gradients import InTurn, LossScaler, Verdicts
from fsdp.optim.optimizer import StateCheck, is_custom
from fsdp.optim.state import Ema, TrainState
from fsdp.parallel.compute import refresh_of_scales
from fsdp.parallel.shard import Sharded
from fsdp.record.recorder import Pending, Recorder
from fsdp.run.build import RunStart
from fsdp.run.evaluate import Evaluation, Evaluator, Outcome
from fsdp.run.job import Job
from fsdp.run.step import BatchTotals, StepParts, gradients_of, train_step
from fsdp.run.summary import Planned
from fsdp.rundir import history
from fsdp.rundir.history import append_if_possible
from fsdp.rundir.lock import TWO_RUNS

if TYPE_CHECKING:
    from fsdp.watch.replica_checks import BranchCheck, ReplicaChecks

log = logging.getLogger(__name__)


def seed_streams(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, for this device only. If CUDA is not initialised, that keeps a stack trace per
    call: a fifth of a millisecond a step. The streams of Python and numpy too, from which a forward may draw
    (SpecAugment of transformers).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class StepResult:
    """Tensors may still be computing on the device."""

    loss: Tensor
    grad_norm: Tensor
    totals: BatchTotals


class TrainingLoop:
    """The parts of a run, and their order in a step."""

    def __init__(
        self,
        start: RunStart,
        job: Job,
        *,
        sharded: Sharded,
        state: TrainState,
        loss_function: LossFunction,
        loader: Loader,
        checkpointer: Checkpointer,
        stopper: Stopper,
        recorder: Recorder,
        phases: Phases,
        update: Callable[[], None],
        whole_update: bool,
        in_turn: InTurn | None,
        planned: Planned | None,
        ema: Ema | None,
    ) -> None:
        """`whole_update`: one call of the optimizer updates everything; it may then skip an update on the
        device.
        """
        config = start.config
        self.config, self.env, self.run, self.locks, self.job = config, start.env, start.run, start.locks, job
        self.sharded, self.state, self.loss_function = sharded, state, loss_function
        self.loader, self.checkpointer, self.stopper, self.recorder = loader, checkpointer, stopper, recorder
        self.phases, self.planned, self.ema = phases, planned, ema
        self.stopped: str | None = None
        self.evaluation: Evaluation | None = None
        self.last_saved = checkpointer.resumed_step
        mixed = job.data.sources
        self.labels = () if mixed is None else mixed.labels
        loss_function.per_row = mixed is not None
        self.sources_missing = False
        self.branches: BranchCheck | None = None
        self.replicas: ReplicaChecks | None = None
        if job.sizes.ranks > 1 or config.watch.divergence:
            from fsdp.watch.replica_checks import ReplicaChecks, maybe_branch_check

            self.branches = maybe_branch_check(sharded)
            self.replicas = ReplicaChecks(config.watch, sharded) if config.watch.divergence else None
        self.states: StateCheck | None = None
        if is_custom(config.optim):
            self.states = StateCheck(f"--optim.name {config.optim.name}", state.optimizer, sharded.root)
        refresh = refresh_of_scales(sharded.root, config.speed, sharded=job.sizes.strategy != "ddp")
        scaler = LossScaler(state) if job.dtypes.needs_loss_scale else None
        # the update of the moving average cannot be skipped on the device
        averages = ema is not None and config.train.nonfinite != "stop"
        gradients = gradients_of(sharded, in_turn)
        self.verdicts = Verdicts(
            config.train,
            gradients,
            state.optimizer,
            sharded.root,
            scaler=scaler,
            whole_update=whole_update and not averages,
        )
        after = [None if ema is None else ema.update, refresh]
        after.append(None if self.states is None else self.states.after_update)
        self.parts = StepParts(
            sharded=sharded,
            loss_function=loss_function,
            gradients=gradients,
            optimizer=state.optimizer,
            update=update,
            scaler=scaler,
            clip_norm=config.train.clip_grad_norm,
            verdicts=self.verdicts,
            enter=phases.enter,
            saves=checkpointer,
            after_update=tuple(act for act in after if act is not None),
        )
        self.evaluator = Evaluator(
            sections=(config.train, config.data),
            sharded=sharded,
            loss_function=loss_function,
            data=job.data,
            batch=job.batch,
            rank=data_rank(start.env),
            ema=ema,
            before_swap=checkpointer.before_update,
            after_swap=refresh or (lambda: None),
            asked_to_stop=self._stop_reason,
        )

    def run_to_end(self) -> Outcome:
        try:
            if self.config.train.evaluate_only:
                self._evaluate()
                self._settle()
            else:
                self._train_to_end()
            self._end_saves()
            return self._finish()
        except NotFiniteError:
            # Seals a save of an earlier step. Only after an error that every rank has at the same step: after
            # another, ranks may be gone.
            with contextlib.suppress(CheckpointError):  # the log names it
                self._end_saves()
            raise
        finally:
            if self.branches is not None:
                self.branches.close()

    def _end_saves(self) -> None:
        self.phases.enter("end")
        try:
            self.checkpointer.close()
        finally:
            self._record_sealed()

    def _train_to_end(self) -> None:
        last = min(self.config.train.stop_after or self.job.total_steps, self.job.total_steps)
        first = self.state.step
        self._check_packed_rows()
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
        section = self.config.checkpoint
        wanted = section.every_steps or section.every_minutes or section.every_epochs or section.export
        if self.last_saved != self.state.step and (wanted or self.stopped):
            self._save(self.stopped or "the end", wait=True)

    def _check_packed_rows(self) -> None:
        """Whether attention stays within the documents of packed rows: two forwards of one or two samples,
        the same on every rank. Collective. Not with float8: its scales depend on every token.
        """
        info, name, sharded = self.job.data.info, self.job.spec.name, self.sharded
        if not info.facts.get(PACKED):
            return
        from fsdp.models.packed import check_chunks, check_documents_apart

        check_chunks(sharded.root, name, info.tokens_per_sample)
        if self.config.speed.float8 != "off":
            return
        rows = self.job.cursor.indices(self.state.step)[: min(2, self.job.batch.micro_batch)]
        data = read_batch(self.job.data.train, rows, f"rank {self.env.rank}, before the first step")

        def logits_of(tokens: Tensor, positions: Tensor) -> Tensor | None:
            return read_output(sharded.called(tokens, **{POSITIONS: positions})).logits

        with sharded.evaluating():
            check_documents_apart(logits_of, data["inputs"].to(sharded.device), sharded.root, name)

    def _one_step(self) -> None:
        state, step, section = self.state, self.state.step + 1, self.config.checkpoint
        self.phases.enter("data", step)
        began = time.perf_counter()
        batch = self.loader.step(state.step)
        seed_streams(batch.seed, self.env.device)
        waited = time.perf_counter() - began
        if self.locks is not None and self.locks.lost is not None:
            raise RefusedError(f"step {step}: {self.locks.lost}.", TWO_RUNS)
        self.stopper.begin(step, 0 if self.branches is None else self.branches.signature)
        lr = self.job.schedule.lr(step)
        result = self.train_step(batch, lr)
        totals, tokens = result.totals, result.totals.tokens
        state.step, state.samples, state.tokens = (
            step,
            state.samples + batch.samples,
            state.tokens + tokens,
        )
        if self.replicas is not None:
            self.replicas.compare(step)
        self.phases.enter("record")
        epoch = {} if batch.epoch is None else {"epoch": batch.epoch}
        numbers = result.loss if totals.more is None else torch.cat([result.loss.view(1), totals.more])
        fetched = self.recorder.step(
            Pending(
                {
                    "step": step,
                    "lr": lr,
                    "samples": batch.samples,
                    "tokens": tokens,
                    "step_time_s": time.perf_counter() - began,
                    "data_wait_s": waited,
                    **epoch,
                },
                numbers,
                result.grad_norm,
                began,
                None if totals.more is None else totals.named,
            )
        )
        if fetched and self.verdicts.device_decides:  # as _settle
            self.verdicts.settle()
        agreed = self.stopper.agreed()
        if self.branches is not None:
            self.branches.check(step - 1, self.stopper.signatures)
        self.stopped = agreed.stop
        if not self.stopped and self._evaluates_at(step):
            self._evaluate()
        due = agreed.save or (section.every_steps > 0 and step % section.every_steps == 0)
        if due or (section.every_epochs > 0 and self.job.epoch_ends(step, section.every_epochs)):
            self._save("the interval", wait=False)
        if self.checkpointer.flight is not None or self.checkpointer.ended:
            self._record_sealed()

    def train_step(self, batch: StepBatch, lr: float) -> StepResult:
        """Forward and backward over the micro-batches, one verdict of all ranks, one update."""
        signed = None if self.branches is None else self.branches.sign
        totals = BatchTotals(self.loss_function, self.job.data.info, batch, self.labels, signed)
        micro = iter(batch.micro)
        if self.env.device.type != "cpu":
            micro = (host.to(self.env.device) for host in batch.micro)
        norm = train_step(self.parts, micro, len(batch.micro), step=self.state.step + 1, lr=lr, totals=totals)
        if totals.lacks_sources and not self.sources_missing:
            self.sources_missing = True
            if self.env.is_main:
                log.warning(
                    "the model returns its own loss and none for each row: losses of the sources of the "
                    "mixture are left out. HINT: return the logits"
                )
        assert totals.loss is not None
        return StepResult(totals.loss, norm, totals)

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Records the steps since the last call. On CUDA the host waits for the device here alone."""
        self.recorder.flush()
        self.verdicts.settle()

    def _evaluates_at(self, step: int) -> bool:
        every, epochs = self.config.train.eval_every_steps, self.config.train.eval_every_epochs
        return (every > 0 and step % every == 0) or (epochs > 0 and self.job.epoch_ends(step, epochs))

    def _evaluate(self) -> None:
        self._settle()  # the time of the steps before ends here
        self.phases.enter("evaluate")
        evaluation = self.evaluator.evaluate()
        if evaluation.stopped:
            self.stopped = evaluation.stopped
            return
        self.evaluation = evaluation
        step = self.state.step
        self.recorder.values("eval", step, evaluation.values(), self.job.epoch_at(step))

    def _stop_reason(self) -> str | None:
        self.phases.enter("evaluate")
        return self.stopper.check_now().stop

    def _save(self, reason: str, *, wait: bool) -> None:
        self.phases.enter("save")
        self._settle()
        if self.states is not None:
            self.states.check()
        step, epoch = self.state.step, self.job.epoch_at(self.state.step)
        metrics = {name: value for name, value in self.recorder.last.items() if name == "loss"}
        metrics |= self.evaluation.values() if self.evaluation is not None else {}
        metrics |= {} if epoch is None else {"epoch": epoch}
        self.recorder.checkpoint_note = f"saving {step}"
        self.state.data = self.job.cursor.saved(step)
        self.checkpointer.save(self.state, metrics=metrics, reason=reason, wait=wait)
        self.last_saved = step
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
            reason = self.stopped or finished
            marker = self.run.stopped if self.stopped else self.run.done
            history.write_marker(marker, f"{reason} at step {self.state.step}\n")
            how = Ending.STOPPED if self.stopped else Ending.FINISHED
            history.record_end(self.run, step=self.state.step, why=reason, how=how)
            if self.planned is not None and (figures := self.planned.compared()):
                append_if_possible(self.run.history, {"event": "planned", "step": self.state.step, **figures})
        return Outcome(self.run.path, self.state.step, self.stopped, self.evaluation)

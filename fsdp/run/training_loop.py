"""The steps of a run: batch, training step, record, vote on stopping, evaluation and save where they are due.

loop.py builds its parts and restores the checkpoint; step.py holds the training step.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import CheckpointError, NotFiniteError, RefusedError
from fsdp.base.phases import Ending, StopReason
from fsdp.data import StepBatch
from fsdp.data.loader import read_batch
from fsdp.models.loss import read_output
from fsdp.models.registry import PACKED, POSITIONS
from fsdp.optim.gradients import LossScaler, Verdicts
from fsdp.optim.optimizer import StateCheck, is_custom, update_of
from fsdp.record.recorder import Pending
from fsdp.run.build import RunParts
from fsdp.run.evaluate import Evaluation, Outcome, evaluate
from fsdp.run.step import BatchTotals, StepParts, gradients_of, train_step
from fsdp.run.summary import compare_plan
from fsdp.rundir import history
from fsdp.rundir.lock import TWO_RUNS
from fsdp.shard.compute import refresh_of_scales

if TYPE_CHECKING:
    from fsdp.run.answers import HeldOutAnswers
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


class TrainingLoop(RunParts):
    """The parts of a run, and their order in a step."""

    def set_up_steps(self) -> None:
        """What the parts decide for all steps, once they are built."""
        config, sharded, state, job = self.config, self.sharded, self.state, self.job
        self.stopped: str | None = None
        self.evaluation: Evaluation | None = None
        self.evaluated_step = -1
        self.last_saved = self.checkpointer.resumed_step
        self.labels = () if job.data.sources is None else job.data.sources.labels
        self.loss_function.per_row = bool(self.labels)
        self.sources_missing = False
        self.branches: BranchCheck | None = None
        self.replicas: ReplicaChecks | None = None
        if job.sizes.ranks > 1 or config.watch.divergence:
            from fsdp.watch.replica_checks import ReplicaChecks, maybe_branch_check

            self.branches = maybe_branch_check(sharded)
            self.replicas = ReplicaChecks(config.watch, sharded) if config.watch.divergence else None
        self.questions: HeldOutAnswers | None = None
        if (
            config.train.eval_answers
            and job.data.heldout is not None
            and "questions" in job.data.info.preprocess
        ):
            from fsdp.run.answers import maybe_answers

            self.questions = maybe_answers(self)
        self.padding_of = getattr(job.data.train, "padding_share", None)
        self.states: StateCheck | None = None
        after = [] if self.ema is None else [self.ema.update]
        refresh = refresh_of_scales(sharded.root, config.speed, sharded=job.sizes.strategy != "ddp")
        self.after_swap: Callable[[], None] | None = refresh
        if refresh is not None:
            after.append(refresh)
        if is_custom(config.optim):
            self.states = StateCheck(f"--optim.name {config.optim.name}", state.optimizer, sharded.root)
            after.append(self.states.after_update)
        summed = job.sizes.ranks // job.sizes.tensor // sharded.averaged_over
        scaler = LossScaler(state, summed) if job.dtypes.needs_loss_scale else None
        gradients = gradients_of(sharded, None if self.files is None else self.files.in_turn)
        # The device skips an update that is one call of the optimizer; it cannot skip that of the average.
        whole = self.store is None and (self.ema is None or config.train.nonfinite == "stop")
        self.verdicts = Verdicts(
            config.train, gradients, state.optimizer, sharded.root, scaler=scaler, whole_update=whole
        )
        self.verdicts.bad_sample = self._bad_sample
        self.parts = StepParts(
            sharded=sharded,
            loss_function=self.loss_function,
            gradients=gradients,
            optimizer=state.optimizer,
            update=update_of(state.optimizer, self.store),
            scaler=scaler,
            clip_norm=config.train.clip_grad_norm,
            verdicts=self.verdicts,
            enter=self.phases.enter,
            saves=self.checkpointer,
            after_update=tuple(after),
        )

    def run_to_end(self) -> Outcome:
        try:
            self._check_packed_rows()
            if self.config.train.evaluate_only:
                self._evaluate()
                self._settle()
            else:
                self._train_to_end()
            self.end_saves()
            return self._finish()
        except NotFiniteError:
            # Seals a save of an earlier step. Only after an error that every rank has at the same step: after
            # another, ranks may be gone.
            with contextlib.suppress(CheckpointError):  # the log names it
                self.end_saves()
            raise
        finally:
            if self.branches is not None:
                self.branches.close()

    def _train_to_end(self) -> None:
        state, total, section = self.state, self.job.total_steps, self.config.checkpoint
        last = min(self.config.train.stop_after or total, total)
        first = state.step
        while state.step < last and not self.stopped:
            self._one_step()
            if state.step == first + 1:
                log.info("%s", self.loss_function.objective)
        self._settle()
        if self.stopped is None and state.step < total:
            self.stopped = f"{StopReason.STOP_AFTER} {last}"
        if self.stopped is None and self.job.data.heldout is not None and self.evaluated_step != state.step:
            self._evaluate()
        wanted = section.every_steps or section.every_minutes or section.every_epochs or section.export
        if self.last_saved != state.step and (wanted or self.stopped):
            self._save(self.stopped or "the end", wait=True)

    def _check_packed_rows(self) -> None:
        """Whether attention stays within the documents of packed rows, and tokens meet in attention alone
        where rows are divided: forwards of one or two samples, the same on each rank. Collective. Not with
        float8: its scales depend on every token.
        """
        info, name, sharded = self.job.data.info, self.job.spec.name, self.sharded
        packed, divided = bool(info.facts.get(PACKED)), self.job.sizes.context > 1
        if not packed and not divided:
            return
        from fsdp.models.attention import check_chunks, check_documents_apart

        if packed:
            check_chunks(sharded.root, name, info.tokens_per_sample)
        if self.config.speed.float8 != "off":
            return
        rows = self.job.cursor.indices(self.state.step)[: min(2, self.job.batch.micro_batch)]
        data = read_batch(self.job.data.train, rows, f"rank {self.env.rank}, before the first step")

        def logits_of(tokens: Tensor, positions: Tensor, **more: Tensor) -> Tensor | None:
            return read_output(sharded.called(tokens, **{POSITIONS: positions, **more})).logits

        whole: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        with sharded.evaluating():
            tokens = data["inputs"].to(sharded.device)
            if divided:
                from fsdp.shard.context import MOST_CHECKED, check_context, undivided

                check_context(logits_of, tokens, sharded.root, name)
                tokens, whole = tokens[:, :MOST_CHECKED], undivided(sharded.root)
            with whole:
                if packed:
                    check_documents_apart(logits_of, tokens, sharded.root, name)

    def _one_step(self) -> None:
        state, step = self.state, self.state.step + 1
        train, section = self.config.train, self.config.checkpoint
        self.phases.enter("data", step)
        began = time.perf_counter()
        batch = self.loader.step(state.step)
        seed_streams(batch.seed, self.env.device)
        waited = time.perf_counter() - began
        if self.locks is not None and self.locks.lost is not None:
            raise RefusedError(f"step {step}: {self.locks.lost}.", TWO_RUNS)
        self.stopper.begin(step, 0 if self.branches is None else self.branches.signature)
        lr = self.job.schedule.lr(step)
        loss, norm, totals = self.train_step(batch, lr)
        state.step = step
        state.samples += batch.samples
        state.tokens += totals.tokens
        if self.replicas is not None:
            self.replicas.compare(step)
        self.phases.enter("record")
        record = {"step": step, "lr": lr, "samples": batch.samples, "tokens": totals.tokens}
        record |= {"step_time_s": time.perf_counter() - began, "data_wait_s": waited}
        if batch.epoch is not None:
            record["epoch"] = batch.epoch
        if self.padding_of is not None:
            record["padding"] = self.padding_of(self.job.cursor.indices(step - 1))
        named = None
        if totals.more is not None:
            loss, named = torch.cat([loss.view(1), totals.more]), totals.named
        fetched = self.recorder.step(Pending(record, loss, norm, began, named))
        if fetched and self.verdicts.device_decides:  # as _settle
            self.verdicts.settle()
        agreed = self.stopper.agreed()
        if self.branches is not None:
            self.branches.check(step - 1, self.stopper.signatures)
        self.stopped = agreed.stop
        if not self.stopped and self._due(step, train.eval_every_steps, train.eval_every_epochs):
            self._evaluate()
        if agreed.save or self._due(step, section.every_steps, section.every_epochs):
            self._save("the interval", wait=False)
        if self.checkpointer.flight is not None or self.checkpointer.ended:
            self.record_sealed()

    def _due(self, step: int, every_steps: int, every_epochs: float) -> bool:
        return (every_steps > 0 and step % every_steps == 0) or (
            every_epochs > 0 and self.job.epoch_ends(step, every_epochs)
        )

    def train_step(self, batch: StepBatch, lr: float) -> tuple[Tensor, Tensor, BatchTotals]:
        """Forward and backward over the micro-batches, one verdict of all ranks, one update. Returns loss and
        gradient norm, which may still be computing on the device, and the sums.
        """
        signed = None if self.branches is None else self.branches.sign
        counts, info = not self.job.place.tensor, self.job.data.info
        experts = self.sharded.experts
        totals = BatchTotals(
            self.loss_function, info, batch, self.labels, signed, counts=counts, experts=experts
        )
        micro = iter(batch.micro)
        if self.env.device.type != "cpu":
            micro = (host.to(self.env.device) for host in batch.micro)
        norm = train_step(self.parts, micro, len(batch.micro), step=self.state.step + 1, lr=lr, totals=totals)
        if totals.lacks_sources and not self.sources_missing and self.env.is_main:
            log.warning(
                "the model returns its own loss and none for each row: losses of the sources of the "
                "mixture are left out. HINT: return the logits"
            )
        self.sources_missing |= totals.lacks_sources
        assert totals.loss is not None
        return totals.loss, norm, totals

    def _bad_sample(self, step: int) -> str:
        """The first of this rank's samples of a step, read again, with a number that is not finite."""
        data, rank = self.job.data, self.job.place.data
        if data.stream is not None:
            return ""
        for index in np.array_split(self.job.cursor.indices(step - 1), rank.count)[rank.index]:
            for name, value in data.train.batch(index[None]).items():
                if value.is_floating_point() and not value.isfinite().all():
                    return f"{name} of sample {index}"
        return ""

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Records the steps since the last call. On CUDA the host waits for the device here alone."""
        self.recorder.flush()
        self.verdicts.settle()

    def _evaluate(self) -> None:
        self._settle()  # the time of the steps before ends here
        self.phases.enter("evaluate")
        evaluation, step = evaluate(self, self.after_swap, self._stop_reason), self.state.step
        if evaluation.stopped:
            self.stopped = evaluation.stopped
            return
        self.evaluation, self.evaluated_step = evaluation, step
        self.recorder.values("eval", step, evaluation.values(), self.job.epoch_at(step))
        if self.questions is not None:
            self.questions.record(step)

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
        metrics |= {} if self.evaluation is None else self.evaluation.values()
        metrics |= {} if epoch is None else {"epoch": epoch}
        self.recorder.checkpoint_note = f"saving {step}"
        self.state.data = self.job.cursor.saved(step)
        self.checkpointer.save(self.state, metrics=metrics, reason=reason, wait=wait)
        self.last_saved = step
        self.stopper.saved()

    def _finish(self) -> Outcome:
        step, run = self.state.step, self.run
        if self.stopped is None and self.config.checkpoint.export and self.last_saved == step:
            self.checkpointer.export(run.full_model)
            if self.ema is not None:
                self.checkpointer.export(run.full_model_ema, averaged=True)
        if self.env.is_main:
            finished = "an evaluation" if self.config.train.evaluate_only else "the last step"
            reason, how = self.stopped or finished, Ending.STOPPED if self.stopped else Ending.FINISHED
            history.write_marker(run.stopped if self.stopped else run.done, f"{reason} at step {step}\n")
            history.record_end(run, step=step, why=reason, how=how)
            if figures := compare_plan(self.config.plan, self.env.device, run):
                history.append_if_possible(run.history, {"event": "planned", "step": step, **figures})
        return Outcome(run.path, step, self.stopped, self.evaluation)

"""train(): the run on one page, in the order that data meets it. The only file that sees everything.

Config → DistEnv → mesh → model → optimizer → loader → TrainState → restore → loop → sealed checkpoint →
export
"""

from __future__ import annotations

import linecache
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp.base import garbage
from fsdp.base.errors import CheckpointError
from fsdp.base.phases import Ending, Phases, StopReason
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.lock import Locks
from fsdp.config import Config, config_hash
from fsdp.data import Loader, StepBatch
from fsdp.data.cursor import stream_key
from fsdp.data.loader import read_batch
from fsdp.data.types import Batch
from fsdp.data.unreadable_samples import maybe_skipping
from fsdp.dist import preflight
from fsdp.dist.env import DistEnv, check_torch, unused_allocation
from fsdp.dist.mesh import build_mesh, data_rank
from fsdp.dist.process_group import process_group
from fsdp.dist.stop import Stopper
from fsdp.memory.oom import OutOfMemoryHandler
from fsdp.memory.startup import StartupMemory
from fsdp.models.loss import LossFunction
from fsdp.models.unsharded import seed_streams
from fsdp.optim.custom_optimizer import StateCheck, is_custom
from fsdp.optim.ema import Ema, maybe_ema
from fsdp.optim.gradients import InTurn
from fsdp.optim.loss_scale import LossScaler
from fsdp.optim.nonfinite import Verdicts
from fsdp.optim.optimizer import apply_hyperparameters, build_optimizer
from fsdp.optim.train_state import TrainState
from fsdp.parallel.attention import attention_kernel
from fsdp.parallel.compile_cache import CompileCache, maybe_compile_cache
from fsdp.parallel.float8 import maybe_scales
from fsdp.parallel.nvme import maybe_nvme_files
from fsdp.parallel.shard import Sharded
from fsdp.parallel.update import Update, Whole, build_update
from fsdp.record.console import set_up_logging
from fsdp.record.custom_sinks import load_sinks
from fsdp.record.metrics import NoReporter, Reporter
from fsdp.record.mlflow_sink import check_mlflow
from fsdp.record.recorder import Pending, Recorder
from fsdp.record.wandb_sink import check_wandb
from fsdp.run import setup, weights
from fsdp.run.epochs import Epochs, with_imported_epoch
from fsdp.run.evaluate import Evaluation, Evaluator
from fsdp.run.frozen_base import maybe_base
from fsdp.run.job import Job, describe, prepare, resumed, steps_line, trained_model
from fsdp.run.packed_rows import check_packed_rows
from fsdp.run.planned import Planned, maybe_planned
from fsdp.run.source_losses import NOT_KNOWN, SourceLosses
from fsdp.run.step import StepParts, gradients_of, run_step
from fsdp.run.step_hooks import RunHooks
from fsdp.rundir import history
from fsdp.rundir.line_files import append_if_possible
from fsdp.rundir.paths import RunDir
from fsdp.watch.branch_check import BranchCheck
from fsdp.watch.rank import Watch
from fsdp.watch.replica_checks import ReplicaChecks, make_deterministic

if TYPE_CHECKING:
    from fsdp.memory.profile import Profile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a start ended. `stopped` is why it ended before its last step; None if it reached it."""

    run_dir: Path
    step: int
    stopped: str | None
    evaluation: Evaluation | None


def train(config: Config, env: DistEnv, reporter: Reporter | None = None) -> Outcome:
    """One rank's whole run. Raises a ShardrunError, from which the launcher makes message and exit code."""
    check_torch()
    set_up_logging(env)
    check_wandb(config.run.wandb)
    check_mlflow(config.run.mlflow)
    load_sinks(config.run.sinks)
    torch.set_float32_matmul_precision(config.run.matmul_precision)
    if config.watch.deterministic:
        make_deterministic()
    job = prepare(config, world_size=env.world_size, num_nodes=env.num_nodes, device=env.device)
    if env.local_rank == 0:
        log.info("%s", env)
    if warning := unused_allocation(env):
        log.warning("%s", warning)
    preflight.check_names(env)
    with (
        attention_kernel(config.speed),
        process_group(env, config.run.process_group_timeout_s),
        setup.locked_run(config, env) as (run, claim),
        Watch(config.watch, env, run.path) as watch,
        OutOfMemoryHandler(config, env, run.path) as oom,
    ):
        return _train(config, env, reporter or NoReporter(), job, run, claim, watch, oom)


def _train(
    config: Config,
    env: DistEnv,
    reporter: Reporter,
    job: Job,
    run: RunDir,
    claim: Locks | None,
    watch: Watch,
    oom: OutOfMemoryHandler,
) -> Outcome:
    with garbage.held():
        loop = _set_up(config, env, reporter, job, run, claim, oom)
    # 1.5 MiB of source, read for traces of the fake tensors from which FSDP2 infers shapes
    linecache.clearcache()
    loop.phases.listen(watch.phase)
    profile = _maybe_profile(loop)
    try:
        with oom:
            outcome = loop.run_to_end()
        if profile is not None:
            profile.finish()
    except BaseException as error:
        if env.is_main and (claim is None or claim.ousted() is None):
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            history.record_end(run, step=loop.state.step, why=said, how=Ending.FAILED)
        raise
    finally:
        if profile is not None:
            profile.close()
        loop.branches.close()
        loop.loader.close()
        loop.recorder.close()
        loop.numbers.close()
        loop.stopper.close()
    return outcome


def _set_up(
    config: Config,
    env: DistEnv,
    reporter: Reporter,
    job: Job,
    run: RunDir,
    claim: Locks | None,
    oom: OutOfMemoryHandler,
) -> _Loop:
    """Builds everything before the first step and restores the newest checkpoint. Collective."""
    planned = maybe_planned(config.plan, env.device.type)
    job = replace(job, data=maybe_skipping(job.data, config.data.skip_unreadable, run.path, env.rank))
    mesh = build_mesh(job.sizes, env.device, config.run.process_group_timeout_s)
    kernels = maybe_compile_cache(config.speed, env)
    startup = StartupMemory(config.profile, env, run.path)
    startup.mark()
    model = trained_model(config, job)
    startup.mark()
    facts, mfu_of = describe(config, job, model), setup.mfu_of(model, job, env)
    loss_function = setup.loss_function(config, env, job, model)
    sharded = setup.sharded(config, env, job, model, mesh)
    shelf = maybe_nvme_files(config.memory, config.optim, sharded.root, sharded.units, sharded.dtypes.master)
    checkpointer = Checkpointer(
        config.checkpoint, run.path, env, job.sizes, config_hash=config_hash(config), claim=claim, room=shelf
    )
    # A checkpoint of adapters alone has no frozen weights.
    setup.fill_weights(
        config, env, job, sharded, shelf, restored=not config.lora.rank and checkpointer.finds()
    )
    startup.mark()
    checkpointer.base = maybe_base(config, job.spec, job.dtypes, sharded.root)
    checkpointer.pretrained = weights.saved_as(config, job.spec)
    oom_context = setup.oom_context(config, job, sharded)
    oom.sees(oom_context)
    optimizer = build_optimizer(config.optim, sharded.root)
    startup.mark()
    state = TrainState(
        model=sharded.root,
        optimizer=optimizer,
        loss_scale=config.precision.loss_scale,
        optimizer_name=config.optim.name,
    )
    ema = maybe_ema(config.optim, sharded.root, optimizer)
    with shelf.offered(optimizer) if shelf is not None else nullcontext():
        restored = checkpointer.restore(state)
    apply_hyperparameters(config.optim, optimizer)
    restored = with_imported_epoch(restored, state, job.cursor, job.total_steps)
    job = resumed(job, config, state.data, state.step)
    loader = setup.loader(config, env, job)
    stopper = setup.stopper(config, env, run, reporter, checkpointer)
    setup.records(config, env, run, state.step, job.data_identity)
    recorder = setup.recorder(config, env, run, reporter, job, planned, mfu_of=mfu_of, step=state.step)
    if env.is_main:
        facts = {**facts, "steps": steps_line(job)}
        setup.log_start(run, facts, restored, job.cursor.note() if restored is not None else "")
    oom_context.optimizer, oom_context.phases = optimizer, Phases()
    return _Loop(
        config=config,
        env=env,
        job=job,
        run=run,
        sharded=sharded,
        state=state,
        loss_function=loss_function,
        loader=loader,
        checkpointer=checkpointer,
        stopper=stopper,
        recorder=recorder,
        phases=oom_context.phases,
        update=build_update(optimizer, shelf),
        in_turn=None if shelf is None else shelf.in_turn,
        claim=claim,
        numbers=ReplicaChecks(config.watch, env, run.path, sharded),
        planned=planned,
        kernels=kernels,
        ema=ema,
    )


def _maybe_profile(loop: _Loop) -> Profile | None:
    """Imported only if a flag turns it on: other starts do not pay for the import."""
    section = loop.config.profile
    if not (section.memory or section.trace):
        return None
    from fsdp.memory import profile

    return profile.start(
        section, loop.run.path, loop.env, loop.sharded.root, loop.state.optimizer, loop.phases
    )


# ---------------------------------------------------------------- the loop


@dataclass(frozen=True)
class StepResult:
    """Tensors may still be computing on the device; `applied` is False for a skipped update."""

    loss: Tensor
    grad_norm: Tensor
    tokens: int
    applied: bool
    sources: SourceLosses | None = None


@dataclass(kw_only=True)
class _Loop:
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
    claim: Locks | None
    update: Update
    in_turn: InTurn | None
    numbers: ReplicaChecks
    planned: Planned | None
    kernels: CompileCache | None
    ema: Ema | None

    def __post_init__(self) -> None:
        mixed = self.job.data.sources
        self.labels = () if mixed is None else mixed.labels
        self.loss_function.per_row = mixed is not None
        self.sources_missing = False
        scaler = LossScaler(self.state) if self.job.dtypes.needs_loss_scale else None
        self.parts = StepParts(
            sharded=self.sharded,
            loss_function=self.loss_function,
            gradients=gradients_of(self.sharded, self.in_turn),
            optimizer=self.state.optimizer,
            update=self.update,
            scaler=scaler,
            clip_norm=self.config.train.clip_grad_norm,
            sources=len(self.labels),
        )
        self.verdicts = Verdicts(
            self.config.train,
            self.parts.gradients,
            self.state.optimizer,
            self.sharded.root,
            scaler=scaler,
            # the update of the moving average cannot be skipped on the device
            whole_update=isinstance(self.update, Whole)
            and (self.ema is None or self.config.train.nonfinite == "stop"),
        )
        self.branches = BranchCheck(self.sharded)
        self.states: StateCheck | None = None
        if is_custom(self.config.optim):
            self.states = StateCheck(self.config.optim, self.state.optimizer, self.sharded.root)
        self.hooks = RunHooks(
            loss_function=self.loss_function,
            info=self.job.data.info,
            phases=self.phases,
            stopper=self.stopper,
            numbers=self.numbers,
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
        self.evaluator = Evaluator(
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
        self.epochs = Epochs(self.job.cursor)
        self.stopped: str | None = None
        self.evaluation: Evaluation | None = None
        self.last_saved = self.checkpointer.resumed_step

    def run_to_end(self) -> Outcome:
        last = min(self.config.train.stop_after or self.job.total_steps, self.job.total_steps)
        self._inspect_loss(resumed=0 < self.state.step < last)
        check_packed_rows(self.config, self.job, self.sharded, self.state.step, self.env.rank)
        while self.state.step < last and not self.stopped:
            self._one_step()
        self._settle()
        if self.stopped is None and self.state.step < self.job.total_steps:
            self.stopped = f"{StopReason.STOP_AFTER} {last}"
        if self.stopped is None and self.job.data.heldout is not None and not self._evaluated_now():
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
        if self.kernels is not None:
            self.kernels.publish(wait=True)
        return self._finish()

    def _first_batch_is_short(self) -> bool:
        batch = self.job.batch
        whole = batch.micro_batch * batch.accumulation * self.env.world_size
        return len(self.job.cursor.indices(self.state.step)) < whole

    def _inspect_loss(self, *, resumed: bool) -> None:
        """Runs a forward of one or two samples on all ranks before the first step that depends on its result.

        For a user's loss: whether it works with the model's output and returns what can be weighed.
        For a model that receives its labels: what its own loss is a mean over. For a resumed run with a short
        first batch: whether the model has a loss of its own (short batches are cut for one and masked
        otherwise, which differs in the last bits).
        """
        custom = self.loss_function.custom is not None
        short = resumed and self._first_batch_is_short()
        if not (self.loss_function.may_own or custom or short):
            return
        rows = self.job.cursor.indices(self.state.step)[:2]
        data = read_batch(self.job.data.train, rows, f"rank {self.env.rank}, before the first step")
        if not (self.loss_function.gives_labels(data) or custom or short):
            return
        one = Batch(data, torch.ones(len(rows), dtype=torch.bool), len(rows)).to(self.env.device)
        with self.sharded.evaluating():
            said = self.loss_function.learn(self.sharded.called, one.data)
        if said and self.env.is_main:
            log.warning("%s", said)

    def _one_step(self) -> None:
        step = self.state.step + 1
        self.phases.enter("data", step)
        began = time.perf_counter()
        seed_streams(stream_key(self.config.run.seed, step, self.env.rank) % 2**63, self.env.device)
        batch = self.loader.step(self.state.step)
        waited = time.perf_counter() - began
        if self.claim is not None and self.claim.lost is not None:
            raise CheckpointError(
                f"step {step}: {self.claim.lost}.", "squeue or ps shows both runs: end one of them"
            )
        self.stopper.begin(step)
        lr = self.job.schedule.lr(step)
        result = self.train_step(batch, lr)
        sources, unit = result.sources, self.loss_function.unit
        self._count(batch, result)
        self.numbers.compare(step)
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
                more=None if sources is None else sources.sums,
                named=None if sources is None else partial(sources.named, unit=unit),
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
        norm, applied = run_step(self.parts, micro, len(batch.micro), lr=lr, hooks=self.hooks)
        sources = self.hooks.source_losses
        if self.labels and sources is None and not self.sources_missing:
            self.sources_missing = True
            if self.env.is_main:
                log.warning("%s", NOT_KNOWN)
        return StepResult(self.hooks.loss, norm, self.hooks.tokens, applied, sources)

    def _count(self, batch: StepBatch, result: StepResult) -> None:
        self.state.step += 1
        self.state.samples += batch.samples
        self.state.tokens += result.tokens

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Records the steps since the last call. On CUDA the host waits for the device here alone."""
        self.recorder.flush()
        self.verdicts.settle()

    def _evaluated_now(self) -> bool:
        return self._evaluates_at(self.state.step) and self.evaluation is not None

    def _evaluates_at(self, step: int) -> bool:
        every, epochs = self.config.train.eval_every_steps, self.config.train.eval_every_epochs
        return (every > 0 and step % every == 0) or self.epochs.due(step, epochs)

    def _evaluate(self) -> None:
        self.phases.enter("evaluate")
        found = self.evaluator.evaluate()
        if found.stopped:
            self.stopped = found.stopped
            return
        self.evaluation = found
        self._settle()
        self.recorder.evaluation(self.state.step, found.values() | self.epochs.fields(self.state.step))

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
        if self.kernels is not None:
            self.kernels.publish(wait=False)

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
            why = self.stopped or "the last step"
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

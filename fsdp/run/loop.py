"""train(): the run on one page, in the order that data meets it. The only file that sees everything.

Config → DistEnv → mesh → model → optimizer → loader → TrainState → restore → loop → sealed checkpoint →
export
"""

from __future__ import annotations

import linecache
import logging
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdp.base import proc
from fsdp.base.errors import exception_line
from fsdp.base.object_client import last_request_failed
from fsdp.base.phases import Ending, Phases
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.checkpointer import Restored
from fsdp.config import Config, config_hash
from fsdp.dist.env import DistEnv, check_torch, set_allocator, unused_allocation
from fsdp.dist.mesh import build_mesh
from fsdp.dist.process_group import process_group
from fsdp.memory.oom import OutOfMemoryHandler
from fsdp.models.loss import LossFunction
from fsdp.optim.ema import maybe_ema
from fsdp.optim.optimizer import apply_hyperparameters, build_optimizer
from fsdp.optim.train_state import TrainState
from fsdp.parallel.attention import attention_kernel
from fsdp.parallel.host_states import maybe_host_states
from fsdp.parallel.nvme import NvmeFiles, maybe_nvme_files
from fsdp.parallel.shard import Sharded, shard_model
from fsdp.parallel.update import StateStore, build_update
from fsdp.record.console import set_up_logging, start_facts
from fsdp.record.metrics import NoReporter, Reporter
from fsdp.record.sinks import check_sinks
from fsdp.run import setup, weights
from fsdp.run.epochs import with_imported_epoch
from fsdp.run.evaluate import as_evaluated, check_own_directory
from fsdp.run.frozen_base import maybe_base
from fsdp.run.job import Job, describe, prepare, resumed, steps_line, trained_model
from fsdp.run.planned import maybe_planned
from fsdp.run.training_loop import Outcome, TrainingLoop
from fsdp.rundir import history
from fsdp.rundir.lock import Locks
from fsdp.rundir.paths import RunDir
from fsdp.watch.rank import Watch
from fsdp.watch.replica_checks import ReplicaChecks, make_deterministic

if TYPE_CHECKING:
    from fsdp.memory.profile import Profile

log = logging.getLogger(__name__)


def train(
    config: Config, env: DistEnv, reporter: Reporter | None = None, *, process_ends: bool = False
) -> Outcome:
    """One rank's whole run. Raises a ShardrunError, from which the launcher makes message and exit code.

    `process_ends`: the caller ends the process after a failure, unlike a notebook. The watch then ends one
    whose teardown hangs.
    """
    check_torch()
    set_up_logging(env)
    config = as_evaluated(config) if config.train.evaluate_only else config
    check_sinks(config)
    torch.set_float32_matmul_precision(config.run.matmul_precision)
    set_allocator(config.run.allocator, env.device)
    if config.watch.deterministic:
        make_deterministic()
    job = prepare(config, world_size=env.world_size, num_nodes=env.num_nodes, device=env.device)
    if env.local_rank == 0:
        log.info("%s", env)
    if warning := unused_allocation(env):
        log.warning("%s", warning)
    with (
        attention_kernel(config.speed),
        process_group(env, config.run.process_group_timeout_s),
        setup.locked_run(config, env) as (run, locks),
        Watch(config.watch, env, run.path, process_ends=process_ends) as watch,
        OutOfMemoryHandler(config, env, run.path) as oom,
    ):
        return _train(
            _Start(config, env, reporter or NoReporter(), job, run, locks, process_ends), watch, oom
        )


@dataclass(frozen=True)
class _Start:
    """What a rank has before its model: the run's directory, locked, and the job."""

    config: Config
    env: DistEnv
    reporter: Reporter
    job: Job
    run: RunDir
    locks: Locks | None
    process_ends: bool


def _train(start: _Start, watch: Watch, oom: OutOfMemoryHandler) -> Outcome:
    # A start that fails too closes what it has: a notebook's signal handlers and threads.
    with ExitStack() as parts:
        with proc.collection_paused():
            loop = _set_up(start, oom, parts)
        # 1.5 MiB of source, read for traces of the fake tensors from which FSDP2 infers shapes
        linecache.clearcache()
        loop.phases.listen(watch.phase)
        profile = _maybe_profile(loop)
        if profile is not None:
            parts.enter_context(closing(profile))
        try:
            with oom:
                outcome = loop.run_to_end()
            if profile is not None:
                profile.finish()
        except BaseException as error:
            if start.env.is_main and _may_record(start.locks):
                why = exception_line(error)
                history.record_end(start.run, step=loop.state.step, why=why, how=Ending.FAILED)
            raise
    return outcome


def _may_record(locks: Locks | None) -> bool:
    """Whether this start still has the run directory; if its locks cannot be read, as it was last known."""
    if locks is None:
        return True
    if last_request_failed():  # asking again takes a minute and a half, and a launcher kills rank 0 meanwhile
        return locks.lost is None
    try:
        return locks.lost_now() is None
    except OSError as error:
        log.warning("the lock of this run cannot be read: %s", error)
        return locks.lost is None


def _set_up(start: _Start, oom: OutOfMemoryHandler, parts: ExitStack) -> TrainingLoop:
    """Builds everything before the first step and restores the newest checkpoint. Collective.

    `parts` receives what is to be closed.
    """
    config, env, run = start.config, start.env, start.run
    planned = maybe_planned(config.plan, env.device.type)
    job = start.job
    built = _build_model(start, job)
    sharded, checkpointer = built.sharded, built.checkpointer
    oom_context = setup.oom_context(config, job, sharded)
    oom.set_context(oom_context)
    optimizer = build_optimizer(config.optim, sharded.root, compiled=setup.compiles_update(config, env))
    scale = config.precision.loss_scale
    state = TrainState(sharded.root, optimizer, loss_scale=scale, optimizer_name=config.optim.name)
    ema = maybe_ema(config.optim, sharded.root, optimizer)
    states = built.nvme_files or maybe_host_states(
        config.memory, config.optim, sharded.dtypes.master, env.device
    )
    restored, job = _restore(config, job, checkpointer, state, states)
    setup.check_saves_are_there(config, env, run, checkpointer, state.step)
    stopper = setup.stopper(config, env, run, start.reporter, checkpointer, process_ends=start.process_ends)
    parts.enter_context(closing(stopper))
    loader = parts.enter_context(closing(setup.loader(config, env, job)))
    setup.records(config, env, run, state.step, job.data_identity)
    recorder = setup.recorder(config, env, run, start.reporter, job, mfu_of=built.mfu_of, step=state.step)
    parts.enter_context(closing(recorder))
    setup.add_sinks(recorder, config, env, run, job, planned, state.step)
    if env.is_main:
        facts = start_facts({**built.facts, "steps": steps_line(job)})
        setup.log_start(run, facts, restored, job.cursor.note() if restored is not None else "")
    oom_context.optimizer, oom_context.phases = optimizer, Phases()
    loop = TrainingLoop(
        config=config,
        env=env,
        job=job,
        run=run,
        sharded=sharded,
        state=state,
        loss_function=built.loss_function,
        loader=loader,
        checkpointer=checkpointer,
        stopper=stopper,
        recorder=recorder,
        phases=oom_context.phases,
        update=build_update(optimizer, states),
        in_turn=None if built.nvme_files is None else built.nvme_files.in_turn,
        locks=start.locks,
        replica_checks=ReplicaChecks(config.watch, sharded),
        planned=planned,
        ema=ema,
    )
    parts.enter_context(closing(loop.branches))
    return loop


@dataclass(frozen=True, kw_only=True)
class _Built:
    """The sharded model with its first weights, the place of its checkpoints, and the whole model's facts."""

    sharded: Sharded
    loss_function: LossFunction
    nvme_files: NvmeFiles | None
    checkpointer: Checkpointer
    facts: Mapping[str, str]
    mfu_of: float


def _build_model(start: _Start, job: Job) -> _Built:
    """Collective."""
    config, env = start.config, start.env
    mesh = build_mesh(job.sizes, env.device, config.run.process_group_timeout_s)
    model = trained_model(config, job)
    facts, mfu_of = describe(config, job, model), setup.mfu_of(model, job, env)
    loss_function = setup.loss_function(config, env, job, model)
    sharded = shard_model(model, config, sizes=job.sizes, mesh=mesh, device=env.device, hooks=job.hooks)
    nvme_files = maybe_nvme_files(
        config.memory, config.optim, sharded.root, sharded.units, sharded.dtypes.master
    )
    checkpointer = Checkpointer(
        config.checkpoint,
        start.run.path,
        env,
        job.sizes,
        config_hash=config_hash(config),
        locks=start.locks,
        staging_memory=nvme_files,
    )
    # A checkpoint of adapters alone has no frozen weights.
    restored = not config.lora.rank and checkpointer.has_checkpoint()
    setup.fill_weights(config, env, job, sharded, nvme_files, restored=restored)
    checkpointer.base = maybe_base(config, job.spec, job.dtypes, sharded.root)
    checkpointer.pretrained = weights.saved_as(config, job.spec)
    if config.train.evaluate_only:
        check_own_directory(checkpointer.has_checkpoint(), str(start.run.path))
    return _Built(
        sharded=sharded,
        loss_function=loss_function,
        nvme_files=nvme_files,
        checkpointer=checkpointer,
        facts=facts,
        mfu_of=mfu_of,
    )


def _restore(
    config: Config,
    job: Job,
    checkpointer: Checkpointer,
    state: TrainState,
    states: StateStore | None,
) -> tuple[Restored | None, Job]:
    """Fills `state` from the newest checkpoint; None without one. The job starts from its position."""
    with states.preallocated(state.optimizer) if states is not None else nullcontext():
        restored = checkpointer.restore(state, weights_only=config.train.evaluate_only)
    apply_hyperparameters(config.optim, state.optimizer)
    if config.train.evaluate_only:
        return restored, job
    restored = with_imported_epoch(restored, state, job.cursor, job.total_steps)
    return restored, resumed(job, config, state)


def _maybe_profile(loop: TrainingLoop) -> Profile | None:
    """Imported only if a flag turns it on: other starts do not pay for the import."""
    section = loop.config.profile
    if not (section.memory or section.trace):
        return None
    from fsdp.memory import profile

    return profile.start(
        loop.config, loop.run.path, loop.env, loop.sharded.root, loop.state.optimizer, loop.phases
    )

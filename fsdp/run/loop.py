"""train(): the run on one page, in the order that data meets it.

Config → DistEnv → mesh → model → optimizer → loader → TrainState → restore → loop → sealed checkpoint →
export
"""

from __future__ import annotations

import linecache
import logging
from contextlib import ExitStack, closing

from fsdp.base.phases import Phases
from fsdp.base.proc import collection_paused
from fsdp.config import Config
from fsdp.dist.env import DistEnv
from fsdp.memory.oom import OutOfMemoryHandler
from fsdp.optim.optimizer import update_of
from fsdp.optim.state import TrainState, maybe_ema
from fsdp.record.recorder import Reporter
from fsdp.run import build
from fsdp.run.evaluate import Outcome, as_evaluated
from fsdp.run.job import prepare, resumed, trained_model
from fsdp.run.summary import describe, maybe_planned
from fsdp.run.training_loop import TrainingLoop
from fsdp.watch.rank import Watch

log = logging.getLogger(__name__)


def train(
    config: Config, env: DistEnv, reporter: Reporter | None = None, *, process_ends: bool = False
) -> Outcome:
    """One rank's whole run. Raises a ShardrunError, from which the launcher makes message and exit code.

    `process_ends`: the caller ends the process after a failure, unlike a notebook. The watch then ends one
    whose teardown hangs.
    """
    config = as_evaluated(config) if config.train.evaluate_only else config
    build.set_up_process(config, env)
    job = prepare(config, world_size=env.world_size, num_nodes=env.num_nodes, device=env.device)
    if env.local_rank == 0:
        log.info("%s", env)
    with (
        build.process(config, env),
        build.locked_run(config, env) as (run, locks),
        Watch(config.watch, env, run.path, process_ends=process_ends) as watch,
        OutOfMemoryHandler(config, env, run.path) as oom,
        ExitStack() as parts,  # a start that fails too closes what it has: a notebook's signals and threads
    ):
        start = build.RunStart(config, env, reporter or Reporter(), job, run, locks, process_ends)
        with collection_paused():
            loop = _set_up(start, oom, parts)
        # 1.5 MiB of source, read for traces of the fake tensors from which FSDP2 infers shapes
        linecache.clearcache()
        loop.phases.listen(watch.phase)
        profile = build.maybe_profile(start, loop.sharded.root, loop.state.optimizer, loop.phases)
        try:
            with profile, oom:
                return loop.run_to_end()
        except BaseException as error:
            build.record_failure(start, loop.state.step, error)
            raise


def _set_up(start: build.RunStart, oom: OutOfMemoryHandler, parts: ExitStack) -> TrainingLoop:
    """Builds everything before the first step and restores the newest checkpoint. Collective.

    `parts` receives what is to be closed.
    """
    config, env, job = start.config, start.env, start.job
    planned = maybe_planned(config.plan, env.device.type)
    model = trained_model(config, job)
    facts, flops = describe(config, job, model), build.maybe_flops(start, model)
    loss_function = build.loss_function(start, model)
    sharded = build.sharded(start, model)
    files = build.nvme_files(start, sharded)
    checkpointer = build.checkpointer(config, env, start.run, job.sizes, start.locks, files)
    build.fill_weights(start, sharded, checkpointer, files)
    store = files or build.host_states(start, sharded)
    context = build.oom_context(start, sharded)
    oom.set_context(context)
    optimizer = build.optimizer(start, sharded)
    scale = config.precision.loss_scale
    state = TrainState(sharded.root, optimizer, loss_scale=scale, optimizer_name=config.optim.name)
    ema = maybe_ema(config.optim, sharded.root, optimizer)
    restored = build.restore(start, checkpointer, state, store)
    if not config.train.evaluate_only:
        job = resumed(job, config, state)
    build.check_saves_are_there(config, env, start.run, checkpointer, state.step)
    stopper = parts.enter_context(closing(build.stopper(start, checkpointer)))
    loader = parts.enter_context(closing(build.loader(start, job)))
    build.records(start, state.step)
    recorder = parts.enter_context(
        closing(build.recorder(start, job, state.step, flops=flops, planned=planned))
    )
    build.log_start(start, job, facts, restored)
    context.optimizer, context.phases = optimizer, Phases()
    return TrainingLoop(
        start,
        job,
        sharded=sharded,
        state=state,
        loss_function=loss_function,
        loader=loader,
        checkpointer=checkpointer,
        stopper=stopper,
        recorder=recorder,
        phases=context.phases,
        update=update_of(optimizer, store),
        whole_update=store is None,
        in_turn=None if files is None else files.in_turn,
        planned=planned,
        ema=ema,
    )

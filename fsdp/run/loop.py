"""train(): the run on one page, in the order that data meets it.

Config → DistEnv → mesh → model → optimizer → loader → TrainState → restore → loop → sealed checkpoint →
export
"""

from __future__ import annotations

import linecache
import logging
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

from fsdp.base.errors import exception_line
from fsdp.base.phases import Ending, Phases
from fsdp.base.proc import collection_paused
from fsdp.config import Config, replace
from fsdp.distributed.env import DistEnv
from fsdp.memory.account import OomContext
from fsdp.memory.oom import OutOfMemoryHandler
from fsdp.optim.optimizer import TrainState, maybe_ema
from fsdp.record.recorder import Reporter
from fsdp.run import build
from fsdp.run.evaluate import Outcome
from fsdp.run.job import prepare, resumed, trained_model
from fsdp.run.summary import describe, log_start
from fsdp.run.training_loop import TrainingLoop
from fsdp.rundir import history
from fsdp.watch.rank import Watch

log = logging.getLogger(__name__)


def train(
    config: Config, env: DistEnv, reporter: Reporter | None = None, *, process_ends: bool = False
) -> Outcome:
    """One rank's whole run. Raises a ShardrunError, from which the launcher makes message and exit code.

    `process_ends`: the caller ends the process after a failure, unlike a notebook. The watch then ends one
    whose teardown hangs.
    """
    if config.train.evaluate_only:  # the run that it may come from keeps its checkpoints
        config = replace(config, checkpoint__dir="", checkpoint__local_dir="", checkpoint__export=False)
    build.set_up_process(config, env)
    ranks, nodes = env.world_size, env.num_nodes
    job = prepare(config, world_size=ranks, num_nodes=nodes, device=env.device, rank=env.rank)
    if env.local_rank == 0:
        log.info("%s", env)
    loop = TrainingLoop()
    loop.config, loop.env, loop.reporter, loop.job = config, env, reporter or Reporter(), job
    loop.process_ends, loop.phases = process_ends, Phases()
    with (
        build.process(config, env),
        build.locked_run(config, env) as (loop.run, loop.locks),
        Watch(config.watch, env, loop.run.path, process_ends=process_ends) as watch,
        OutOfMemoryHandler(config, env, loop.run.path) as oom,
        ExitStack() as parts,  # a start that fails too closes what it has: a notebook's signals and threads
    ):
        with collection_paused():
            _set_up(loop, oom, parts)
        # 1.5 MiB of source, read for traces of the fake tensors from which FSDP2 infers shapes
        linecache.clearcache()
        loop.phases.listen(watch.phase)
        profile: AbstractContextManager[object] = nullcontext()
        if config.profile.memory or config.profile.trace:
            from fsdp.memory.profile import Profile

            root, optimizer = loop.sharded.root, loop.state.optimizer
            profile = Profile(config.profile, loop.run.path / "profile", env, root, optimizer, loop.phases)
        try:
            with profile, oom:
                return loop.run_to_end()
        except BaseException as error:
            vars(error)["run_dir"] = loop.run.path  # for the last lines
            if env.is_main and (loop.locks is None or loop.locks.lost is None):
                step, line = loop.state.step, exception_line(error)
                history.record_end(loop.run, step=step, why=line, how=Ending.FAILED)
            raise


def _set_up(loop: TrainingLoop, oom: OutOfMemoryHandler, parts: ExitStack) -> None:
    """Builds everything before the first step and restores the newest checkpoint. Collective.

    `parts` receives what is to be closed.
    """
    config, env, job = loop.config, loop.env, loop.job
    model = trained_model(config, job)
    facts, mfu = describe(config, job, model), build.maybe_mfu(loop, model)
    loop.loss_function = build.loss_function(loop, model)
    loop.sharded = build.sharded(config, env, job.sharding, model)
    loop.loss_function.vocabulary = loop.sharded.vocabulary
    loop.files, loop.store = build.stores(loop)
    loop.checkpointer = build.checkpointer(loop)
    build.fill_weights(loop)
    context = OomContext(
        sharded=loop.sharded,
        batch=job.batch,
        build=lambda: trained_model(config, job),
        samples=job.data.train,
        loss=job.loss,
        phases=loop.phases,
    )
    oom.set_context(context)
    context.optimizer = optimizer = build.optimizer(loop)
    scale, name = config.precision.loss_scale, config.optim.name
    loop.state = TrainState(loop.sharded.root, optimizer, loss_scale=scale, optimizer_name=name)
    loop.ema = maybe_ema(config.optim, loop.sharded.root, optimizer)
    restored = build.restore(loop)
    if not config.train.evaluate_only:
        loop.job = resumed(job, config, loop.state)
    build.check_saves_are_there(loop)
    loop.stopper = parts.enter_context(closing(build.stopper(loop)))
    loop.loader = parts.enter_context(closing(build.loader(loop)))
    build.records(loop)
    info = loop.job.data.info
    positions = info.tokens_per_sample if info.masks_targets else 0
    recorder = build.recorder(loop, build.console(loop), mfu, positions)
    loop.recorder = parts.enter_context(closing(recorder))
    log_start(loop, facts, restored)
    loop.set_up_steps()

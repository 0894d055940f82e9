"""The parts of a run, one function a noun. Their order is in fsdp/run/loop.py."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp.base.errors import CheckpointError, ConfigError, RefusedError, exception_line
from fsdp.base.object_client import impatient, is_url, without_secrets
from fsdp.base.phases import Ending, Phases
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.checkpointer import Restored
from fsdp.checkpoint.store import lock_place, open_store
from fsdp.config import Config, config_hash
from fsdp.data import Loader
from fsdp.data.cursor import stream_key
from fsdp.dist import collectives, preflight
from fsdp.dist.env import DistEnv, check_torch, end_time, set_allocator, unused_allocation
from fsdp.dist.mesh import MeshSizes, build_mesh, data_rank
from fsdp.dist.process_group import process_group
from fsdp.dist.stop import Stopper
from fsdp.memory.account import OomContext
from fsdp.models.loss import LossFunction, summed_entropy
from fsdp.optim.optimizer import StateStore, apply_hyperparameters, build_optimizer
from fsdp.optim.state import TrainState
from fsdp.parallel.checks import check_first_forward
from fsdp.parallel.compute import attention_kernel
from fsdp.parallel.materialize import materialize
from fsdp.parallel.shard import Sharded, replicate, shard_model
from fsdp.record.recorder import Console, Recorder, Reporter, set_up_logging
from fsdp.run import weights
from fsdp.run.job import Job, flops_per_sample, peak_flops, trained_model
from fsdp.run.summary import Planned, steps_line
from fsdp.rundir import history, paths
from fsdp.rundir.history import open_lines
from fsdp.rundir.lock import TWO_RUNS, Folder, Lock, hold
from fsdp.rundir.paths import RunDir, writing

if TYPE_CHECKING:
    from fsdp.checkpoint.pretrained import PretrainedWeights
    from fsdp.models import ModelSpec
    from fsdp.parallel.nvme import NvmeFiles
    from fsdp.parallel.offload import HostStates

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """What a rank has before its model: the run's directory, locked, and the job."""

    config: Config
    env: DistEnv
    reporter: Reporter
    job: Job
    run: RunDir
    locks: Lock | None
    process_ends: bool


# ---------------------------------------------------------------- the process and the run directory


def set_up_process(config: Config, env: DistEnv) -> None:
    """The settings of this process, before a process group exists. ConfigError if a tracker cannot be
    used."""
    check_torch()
    set_up_logging(env)
    if config.run.sinks or config.run.wandb or config.run.mlflow:
        from fsdp.record.sinks import check_sinks

        check_sinks(config)
    torch.set_float32_matmul_precision(config.run.matmul_precision)
    set_allocator(config.run.allocator, env.device)
    if config.watch.deterministic:
        from fsdp.watch.replica_checks import make_deterministic

        make_deterministic()
    if warning := unused_allocation(env):
        log.warning("%s", warning)


@contextmanager
def process(config: Config, env: DistEnv) -> Iterator[None]:
    """The attention kernel and the process group."""
    with attention_kernel(config.speed), process_group(env, config.run.process_group_timeout_s):
        yield


@contextmanager
def locked_run(config: Config, env: DistEnv) -> Iterator[tuple[RunDir, Lock | None]]:
    """Rank 0 creates and locks the run directory and its checkpoint store; the other ranks receive the path,
    or the holder of the lock.
    """
    held: list[Lock] = []

    def lock_run() -> str:
        run = paths.create(paths.choose(config).path)
        store = open_store(config.checkpoint.dir or f"{run.path}/checkpoints")
        copy_records = partial(store.put_records, run.path)
        held.append(hold(Folder(run.path), lock_place(store), env.launcher, env.job, copy_records))
        store.fetch_records(run.path)
        return str(run.path)

    try:
        run = paths.open_run(collectives.on_main(env.rank, lock_run))
        if in_store := is_url(config.checkpoint.dir):
            run.path.mkdir(parents=True, exist_ok=True)  # each node may have one
        preflight.check(env, None if in_store else run.path)
        yield run, held[0] if held else None
    except BaseException:
        with impatient():
            _release(held)
        raise
    else:
        _release(held)


def _release(held: list[Lock]) -> None:
    for locks in held:
        locks.release()


def record_failure(start: RunStart, step: int, error: BaseException) -> None:
    """In the history, while this start still has the run directory."""
    if start.env.is_main and (start.locks is None or start.locks.lost is None):
        history.record_end(start.run, step=step, why=exception_line(error), how=Ending.FAILED)


# ---------------------------------------------------------------- model, optimizer, data


def loss_function(start: RunStart, model: nn.Module) -> LossFunction:
    config, job = start.config, start.job
    z_loss = config.train.z_loss
    if "transformers" in sys.modules and start.env.is_main and job.loss is None:
        from fsdp.models.hf import remarks

        for line in remarks(model):
            log.warning("%s", line)
    head = None
    if config.memory.loss_chunk:
        from fsdp.models.chunked_loss import maybe_chunked

        head = maybe_chunked(model, config.memory.loss_chunk, compiled=job.sharding.compiled, z_loss=z_loss)
    summed = torch.compile(summed_entropy) if job.sharding.compiled else summed_entropy
    return LossFunction(model, job.loss, head, summed=summed, z_loss=z_loss)


def sharded(start: RunStart, model: nn.Module) -> Sharded:
    """Collective."""
    config, job, env = start.config, start.job, start.env
    mesh = build_mesh(job.sizes, env.device, config.run.process_group_timeout_s)
    return shard_model(model, job.sharding, mesh)


def nvme_files(start: RunStart, model: Sharded) -> NvmeFiles | None:
    """The files of --memory.nvme. Collective if there are any."""
    memory = start.config.memory
    if memory.nvme == "off":
        return None
    from fsdp.parallel.nvme import NvmeFiles

    return NvmeFiles(memory, start.config.optim, model.root, model.units, state_dtype=model.dtypes.master)


def host_states(start: RunStart, model: Sharded) -> HostStates | None:
    if not start.config.memory.optimizer_offload:
        return None
    from fsdp.parallel.offload import HostStates

    return HostStates(start.config.optim, model.dtypes.master, start.env.device)


def checkpointer(
    config: Config,
    env: DistEnv,
    run: RunDir,
    sizes: MeshSizes,
    locks: Lock | None,
    files: NvmeFiles | None = None,
) -> Checkpointer:
    return Checkpointer(
        config.checkpoint,
        run.path,
        env,
        sizes,
        config_hash=config_hash(config),
        locks=locks,
        staging_memory=files,
    )


def real_weights(
    config: Config,
    model: Sharded,
    spec: ModelSpec,
    rank: int,
    *,
    pretrained: Callable[[], PretrainedWeights] | None = None,
    files: NvmeFiles | None = None,
    restored: bool = False,
    later_too: bool = False,
) -> None:
    """Makes meta weights real; for a restored run only allocates them. Collective. `later_too`: forwards
    after the first are checked as well.
    """
    materialize(
        model,
        spec=spec,
        seed=config.run.seed,
        init=config.model.init,
        rank=rank,
        weights=partial(weights.open_state, config) if weights.names_state(config) else None,
        pretrained=pretrained,
        rest_device=torch.device("cpu") if config.memory.cpu_offload else None,
        nvme_files=files,
        restored=restored,
    )
    if files is not None:
        files.watch()
    gathers_own = bool(config.comm.all_gather)
    check_first_forward(model.root, model.compiled, gathers_own=gathers_own, later_too=later_too)
    replicate(model)


def fill_weights(start: RunStart, model: Sharded, saves: Checkpointer, files: NvmeFiles | None) -> None:
    """The run's initial weights, or memory for those of its checkpoint. Collective."""
    config, spec = start.config, start.job.spec
    folder = partial(weights.open_folder, config, spec, quiet=not start.env.is_main)
    real_weights(
        config,
        model,
        spec,
        start.env.rank,
        pretrained=folder if weights.reads_folder(config, spec) else None,
        files=files,
        # A checkpoint of adapters alone has no frozen weights.
        restored=not config.lora.rank and saves.has_checkpoint(),
    )
    saves.base = weights.maybe_base(config, spec, start.job.dtypes, model.root)
    saves.pretrained = weights.saved_as(config, spec)
    if config.train.evaluate_only and saves.has_checkpoint():
        run = start.run.path
        raise ConfigError(
            f"--train.evaluate_only true in --run.dir {run}, which has checkpoints of its own: "
            "its configuration and records would be replaced.",
            f"--checkpoint.resume {run} --run.dir {run}-evaluated",
        )


def optimizer(start: RunStart, model: Sharded) -> torch.optim.Optimizer:
    memory, on_cuda = start.config.memory, start.env.device.type == "cuda"
    on_host = (memory.cpu_offload or memory.nvme != "off") and on_cuda
    # The update of small states is compiled where blocks are, and states rest on the device.
    return build_optimizer(
        start.config.optim, model.root, compiled=start.job.sharding.compiled and not on_host
    )


def restore(
    start: RunStart, saves: Checkpointer, state: TrainState, store: StateStore | None
) -> Restored | None:
    """Fills `state` from the newest checkpoint; None without one. Collective."""
    config = start.config
    with store.preallocated(state.optimizer) if store is not None else nullcontext():
        restored = saves.restore(state, weights_only=config.train.evaluate_only)
    apply_hyperparameters(config.optim, state.optimizer)
    return restored


def check_saves_are_there(config: Config, env: DistEnv, run: RunDir, saves: Checkpointer, step: int) -> None:
    """CheckpointError if the run has saved a later step than the one it starts from, and its store is empty:
    a disk is not mounted, or the checkpoints were deleted. Collective.
    """
    if saves.resumed_step >= 0 or config.checkpoint.resume == "never":
        return

    def check() -> None:
        saved = history.last_step(run.saves)
        if saved <= step:
            return
        place = config.checkpoint.dir or f"{run.path}/checkpoints"
        place = without_secrets(place) if is_url(place) else str(Path(place).absolute())
        over = "--checkpoint.resume never starts over at step 0"
        if config.checkpoint.resume != "auto":
            over = f"another --run.dir starts from {config.checkpoint.resume}"
        raise CheckpointError(
            f"{run.path} has saved step {saved}, but {place} holds no checkpoint: "
            f"this start would go back to step {step} and delete the records after it.",
            f"mount or copy the checkpoints to {place} and start the same command; {over}",
        )

    collectives.on_main(env.rank, check)


def loader(start: RunStart, job: Job) -> Loader:
    section, env, seed = start.config.data, start.env, start.config.run.seed

    def about(step: int) -> tuple[int, float | None]:
        return stream_key(seed, step + 1, env.rank) % 2**63, job.epoch_at(step + 1)

    return Loader(
        job.data.train,
        job.cursor,
        micro_batch=job.batch.micro_batch,
        accumulation=job.batch.accumulation,
        rank=data_rank(env),
        workers=section.workers,
        prefetch=section.prefetch,
        pin=env.device.type == "cuda",
        device=env.device,
        source_of=None if job.data.sources is None else job.data.sources.of_train,
        about=about,
    )


# ---------------------------------------------------------------- stop requests, records, memory


def stopper(start: RunStart, saves: Checkpointer) -> Stopper:
    return Stopper(
        start.config.stop,
        start.env,
        start.run.path,
        None if type(start.reporter) is Reporter else start.reporter.should_stop,
        end_time=end_time(),
        every_minutes=start.config.checkpoint.every_minutes,
        save_seconds=lambda: saves.save_seconds,
        process_ends=start.process_ends,
    )


def oom_context(start: RunStart, model: Sharded) -> OomContext:
    job, build = start.job, partial(trained_model, start.config, start.job)
    return OomContext(sharded=model, batch=job.batch, build=build, samples=job.data.train, loss=job.loss)


def records(start: RunStart, step: int) -> None:
    """What a start cannot do without: where it cannot be written no rank trains. Collective."""
    run, data = start.run, start.job.data_identity
    nodes = list(dict.fromkeys(collectives.all_gather_objects(socket.gethostname())))

    def write() -> None:
        if start.locks is not None and (reason := start.locks.lost_now()) is not None:
            raise RefusedError(f"{reason}.", TWO_RUNS)
        with writing(run.history):  # another user's: before config.toml is replaced
            open_lines(run.history).close()
        for file in (run.metrics, run.saves):
            with writing(file):
                history.truncate(file, step)
        with writing(run.config):
            changed = paths.write_config(run, start.config) + history.data_changes(run, data)
        with writing(run.history):
            history.record_start(run, start.env, from_step=step, changed=changed, nodes=nodes, data=data)
        for line in changed:
            log.warning("changed since the last start: %s", line)

    collectives.on_main(start.env.rank, write)


def recorder(start: RunStart, job: Job, step: int, *, flops: float, planned: Planned | None) -> Recorder:
    """With its sinks on rank 0. Collective: every rank raises what rank 0 does. `flops` are those of a
    sample."""
    config, env, run = start.config, start.env, start.run
    every = config.run.log_every_steps or (10 if env.device.type == "cuda" else max(1, job.total_steps // 40))
    peak = peak_flops(env.device, env.world_size)
    made = Recorder(
        run,
        env,
        start.reporter,
        Console(total_steps=job.total_steps, every=every, unit=job.unit),
        from_step=step,
        mfu_of=flops / peak if peak else 0.0,
    )

    def add_sinks() -> None:
        if planned is not None:
            made.add(planned)
        if config.run.sinks or config.run.wandb or config.run.mlflow:
            from fsdp.record.sinks import build_sinks

            for sink, label in build_sinks(config, run.path, step):
                made.add(sink, label)

    collectives.on_main(env.rank, add_sinks)
    return made


def log_start(start: RunStart, job: Job, facts: Mapping[str, str], restored: Restored | None) -> None:
    if not start.env.is_main:
        return
    log.info("run %s", start.run.path)
    if restored is not None:
        for line in (*restored.notes, f"resumes from step {restored.step}", job.cursor.note()):
            if line:
                log.info("%s", line)
    shown = {**facts, "steps": steps_line(job)}
    log.info("%s", "; ".join(f"{name} {text}" for name, text in shown.items()))


def maybe_profile(
    start: RunStart, model: nn.Module, adam: torch.optim.Optimizer, phases: Phases
) -> AbstractContextManager[object]:
    """Context of the steps, whose memory or trace is recorded if a flag asks for it."""
    if not (start.config.profile.memory or start.config.profile.trace):
        return nullcontext()
    from fsdp.memory.profile import Profile

    return Profile(start.config.profile, start.run.path / "profile", start.env, model, adam, phases)


# ---------------------------------------------------------------- operations of a sample


def maybe_flops(start: RunStart, model: nn.Module) -> float:
    """Counted where the device's peak is known, which makes them an MFU."""
    known = peak_flops(start.env.device, start.env.world_size) > 0
    return flops_per_sample(model, start.job.data, start.job.loss) if known else 0.0

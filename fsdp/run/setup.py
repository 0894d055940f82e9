"""The parts of a start: the run directory's lock, model, data and stop requests, records, real weights.

The order of a start is in fsdp/run/loop.py.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fsdp.base.errors import CheckpointError
from fsdp.base.object_client import impatient, is_url, without_secrets
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.checkpointer import Restored
from fsdp.checkpoint.full_state import open_full_state
from fsdp.checkpoint.open_store import lock_place, open_store
from fsdp.config import Config
from fsdp.data import Loader
from fsdp.dist import collectives, preflight
from fsdp.dist.env import DistEnv, end_time
from fsdp.dist.mesh import data_rank
from fsdp.dist.stop import Stopper
from fsdp.memory.oom_advice import OomContext
from fsdp.models.chunked_loss import maybe_chunked
from fsdp.models.cross_entropy import remarks, summed_entropy
from fsdp.models.loss import LossFunction
from fsdp.parallel.compiler import compiles
from fsdp.parallel.ddp import replicate
from fsdp.parallel.forward_check import check_first_forward
from fsdp.parallel.materialize import materialize
from fsdp.parallel.nvme import NvmeFiles
from fsdp.parallel.shard import Sharded
from fsdp.record.console import Console
from fsdp.record.metrics import Reporter
from fsdp.record.recorder import Recorder
from fsdp.record.sinks import build_sinks
from fsdp.run import weights
from fsdp.run.flops import flops_per_sample, peak_flops
from fsdp.run.job import Job, trained_model
from fsdp.run.planned import Planned
from fsdp.rundir import history, paths
from fsdp.rundir.atomic_write import writing
from fsdp.rundir.line_files import check_appendable
from fsdp.rundir.lock import Folder, Locks, hold
from fsdp.rundir.paths import RunDir
from fsdp.watch.replica_checks import SpikeRecorder

log = logging.getLogger(__name__)


@contextmanager
def locked_run(config: Config, env: DistEnv) -> Iterator[tuple[RunDir, Locks | None]]:
    """Rank 0 creates and locks the run directory and its checkpoint store; the other ranks receive the path,
    or the holder of the lock.
    """
    held: list[Locks] = []

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


def _release(held: list[Locks]) -> None:
    for locks in held:
        locks.release()


def loss_function(config: Config, env: DistEnv, job: Job, model: nn.Module) -> LossFunction:
    compiled = compiles(config.speed, env.device)
    z_loss = config.train.z_loss
    for line in remarks(model) if env.is_main and job.loss is None else ():
        log.warning("%s", line)
    head = maybe_chunked(model, config.memory.loss_chunk, compiled=compiled, z_loss=z_loss)
    summed = torch.compile(summed_entropy) if compiled else summed_entropy
    return LossFunction(model, job.loss, head, summed=summed, z_loss=z_loss)


def compiles_update(config: Config, env: DistEnv) -> bool:
    """Whether the update of small states is compiled: where blocks are, and states rest on the device."""
    on_host = config.memory.cpu_offload or config.memory.nvme != "off"
    return compiles(config.speed, env.device) and not (on_host and env.device.type == "cuda")


def oom_context(config: Config, job: Job, model: Sharded) -> OomContext:
    return OomContext(
        sizes=job.sizes,
        batch=job.batch,
        dtypes=model.dtypes,
        build=partial(trained_model, config, job),
        samples=job.data.train,
        root=model.root,
        units=model.units,
        loss=job.loss,
    )


def loader(config: Config, env: DistEnv, job: Job) -> Loader:
    return Loader(
        job.data.train,
        job.cursor,
        micro_batch=job.batch.micro_batch,
        accumulation=job.batch.accumulation,
        rank=data_rank(env),
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin=env.device.type == "cuda",
        device=env.device,
        source_of=None if job.data.sources is None else job.data.sources.of_train,
    )


def stopper(
    config: Config,
    env: DistEnv,
    run: RunDir,
    reporter: Reporter,
    checkpointer: Checkpointer,
    *,
    process_ends: bool,
) -> Stopper:
    return Stopper(
        config.stop,
        env,
        run.path,
        reporter.should_stop,
        end_time=end_time(),
        every_minutes=config.checkpoint.every_minutes,
        save_seconds=lambda: checkpointer.save_seconds,
        process_ends=process_ends,
    )


def check_saves_are_there(
    config: Config, env: DistEnv, run: RunDir, checkpointer: Checkpointer, step: int
) -> None:
    """CheckpointError if the run has saved a later step than the one it starts from, and its store is empty:
    a disk is not mounted, or the checkpoints were deleted. Collective.
    """
    if checkpointer.resumed_step >= 0 or config.checkpoint.resume == "never":
        return

    def check() -> None:
        saved = history.last_save(run)
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


def records(config: Config, env: DistEnv, run: RunDir, step: int, data: Mapping[str, object]) -> None:
    """What a start cannot do without: where it cannot be written no rank trains. Collective."""
    nodes = list(dict.fromkeys(collectives.all_gather_objects(socket.gethostname())))

    def write() -> None:
        with writing(run.history):  # another user's: before config.toml is replaced
            check_appendable(run.history)
        with writing(run.metrics):
            history.truncate_metrics(run, step)
        with writing(run.saves):
            history.truncate_saves(run, step)
        with writing(run.config):
            changed = paths.write_config(run, config) + history.data_changes(run, data)
        with writing(run.history):
            history.record_start(run, env, from_step=step, changed=changed, nodes=nodes, data=data)
        for line in changed:
            log.warning("changed since the last start: %s", line)

    collectives.on_main(env.rank, write)


def recorder(
    config: Config, env: DistEnv, run: RunDir, reporter: Reporter, job: Job, *, mfu_of: float, step: int
) -> Recorder:
    every = 10 if env.device.type == "cuda" else max(1, job.total_steps // 40)
    return Recorder(
        run,
        env,
        reporter,
        Console(total_steps=job.total_steps, every=config.run.log_every_steps or every, unit=job.unit),
        from_step=step,
        mfu_of=mfu_of,
    )


def add_sinks(
    recorder: Recorder,
    config: Config,
    env: DistEnv,
    run: RunDir,
    job: Job,
    planned: Planned | None,
    step: int,
) -> None:
    """On rank 0; the other ranks have none. Collective: every rank raises what rank 0 does."""

    def add() -> None:
        recorder.add(SpikeRecorder(config.watch.spike, run.path, job.cursor.indices))
        if planned is not None:
            recorder.add(planned)
        for sink in build_sinks(config, run.path, step):
            recorder.add(sink)

    collectives.on_main(env.rank, add)


def log_start(run: RunDir, facts: Mapping[str, str], restored: Restored | None, data_note: str) -> None:
    log.info("run %s", run.path)
    for note in restored.notes if restored is not None else ():
        log.info("%s", note)
    if restored is not None:
        log.info("resumes from step %d", restored.step)
    if data_note:
        log.info("%s", data_note)
    log.info("%s", "; ".join(f"{name} {text}" for name, text in facts.items()))


def fill_weights(
    config: Config, env: DistEnv, job: Job, sharded: Sharded, nvme_files: NvmeFiles | None, *, restored: bool
) -> None:
    """Makes meta weights real; for a restored run only allocates them."""
    folder_read = weights.reads_folder(config, job.spec)
    state_named = not folder_read and config.model.weights not in ("", weights.NONE)
    materialize(
        sharded,
        spec=job.spec,
        seed=config.run.seed,
        init=config.model.init,
        rank=env.rank,
        weights=(lambda: open_full_state(config.model.weights)) if state_named else None,
        pretrained=(lambda: weights.open_folder(config, job.spec, quiet=not env.is_main))
        if folder_read
        else None,
        rest_device=torch.device("cpu") if config.memory.cpu_offload else None,
        nvme_files=nvme_files,
        restored=restored,
    )
    if nvme_files is not None:
        nvme_files.watch()
    check_first_forward(sharded, config)
    replicate(sharded)


def mfu_of(model: nn.Module, job: Job, env: DistEnv) -> float:
    """MFU of one sample a second; 0 if the device's peak is unknown."""
    peak = peak_flops(env.device, env.world_size)
    return flops_per_sample(model, job.data, job.loss) / peak if peak else 0.0

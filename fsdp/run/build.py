"""The parts of a run, one function a noun. Their order is in fsdp/run/loop.py."""

from __future__ import annotations

import logging
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fsdp.base.errors import CheckpointError, ConfigError, RefusedError
from fsdp.base.object_client import impatient, is_url, without_secrets
from fsdp.base.phases import Phases
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.checkpointer import Restored
from fsdp.checkpoint.store import lock_place, open_store
from fsdp.config import Config, config_hash
from fsdp.data import Loader
from fsdp.data.types import stream_key
from fsdp.distributed import collectives
from fsdp.distributed.env import DistEnv, end_time, set_allocator, unused_allocation
from fsdp.distributed.mesh import build_mesh
from fsdp.distributed.process_group import check as check_ranks
from fsdp.distributed.process_group import process_group
from fsdp.distributed.stop import Stopper
from fsdp.models import ModelSpec, build_real
from fsdp.models.loss import LossFunction, summed_entropy
from fsdp.models.units import names_in_state
from fsdp.optim.optimizer import Ema, StateStore, TrainState, apply_hyperparameters, build_optimizer
from fsdp.record.recorder import Console, Recorder, Reporter, set_up_logging
from fsdp.run.job import Job, flops_per_sample, peak_flops
from fsdp.rundir import history
from fsdp.rundir.history import RunDir, writing
from fsdp.rundir.lock import TWO_RUNS, Folder, Lock, hold
from fsdp.shard.checks import check_first_forward, state_digest
from fsdp.shard.compute import attention_kernel, missing, set_kernel_folders
from fsdp.shard.ddp import replicate
from fsdp.shard.materialize import build_on_host, materialize
from fsdp.shard.shard import Dtypes, Sharded, Sharding, shard_model

if TYPE_CHECKING:
    from fsdp.checkpoint.pretrained import Base, PretrainedWeights
    from fsdp.shard.nvme import NvmeFiles

log = logging.getLogger(__name__)


class RunParts:
    """What a loop works with, its own or one of the user's; set in the order in which it is built."""

    config: Config
    env: DistEnv
    reporter: Reporter
    run: RunDir
    locks: Lock | None
    process_ends: bool
    job: Job
    loss_function: LossFunction
    sharded: Sharded
    files: NvmeFiles | None
    store: StateStore | None
    checkpointer: Checkpointer
    state: TrainState
    ema: Ema | None
    stopper: Stopper
    loader: Loader
    recorder: Recorder
    phases: Phases

    def record_sealed(self) -> None:
        for sealed in self.checkpointer.sealed():
            self.recorder.saved(
                sealed.step, sealed.path, stall_s=sealed.stall_s, write_s=sealed.write_s, size=sealed.bytes
            )

    def end_saves(self) -> None:
        self.phases.enter("end")
        try:
            self.checkpointer.close()
        finally:
            self.record_sealed()


# ---------------------------------------------------------------- the process and the run directory


def set_up_process(config: Config, env: DistEnv) -> None:
    """The settings of this process, before a process group exists. ConfigError if a tracker cannot be
    used."""
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
        run = history.create(history.choose(config).path)
        store = open_store(config.checkpoint.dir or f"{run.path}/checkpoints")
        copy_records = partial(store.put_records, run.path)
        held.append(hold(Folder(run.path), lock_place(store), env.launcher, env.job, copy_records))
        store.fetch_records(run.path)
        return str(run.path)

    ending: AbstractContextManager[None] = impatient()
    try:
        run = history.open_run(collectives.on_main(env.rank, lock_run))
        if in_store := is_url(config.checkpoint.dir):
            run.path.mkdir(parents=True, exist_ok=True)  # each node may have one
        check_ranks(env, None if in_store else run.path)
        yield run, held[0] if held else None
        ending = nullcontext()
    finally:
        with ending:
            for locks in held:
                locks.release()


# ---------------------------------------------------------------- model, weights, optimizer, data


def loss_function(parts: RunParts, model: nn.Module) -> LossFunction:
    train, memory, job = parts.config.train, parts.config.memory, parts.job
    if "transformers" in sys.modules and job.loss is None and parts.env.is_main:
        from fsdp.models.hf import remarks

        for line in remarks(model):
            log.warning("%s", line)
    head = None
    if memory.loss_chunk:
        from fsdp.models.chunked_loss import ChunkedHead

        compiled = job.sharding.compiled
        head = ChunkedHead(model, memory.loss_chunk, compiled=compiled, z_loss=train.z_loss)
    summed = torch.compile(summed_entropy) if job.sharding.compiled else summed_entropy
    return LossFunction(model, job.loss, head, summed=summed, z_loss=train.z_loss)


def sharded(config: Config, env: DistEnv, sharding: Sharding, model: nn.Module) -> Sharded:
    """Collective."""
    sizes, of_node = sharding.sizes, env.local_world_size
    if env.is_main and of_node % (sizes.context * sizes.tensor):
        tensor = math.gcd(sizes.tensor, of_node)
        within = f"--mesh.tensor {tensor} --mesh.context {math.gcd(sizes.context, of_node // tensor)}"
        log.warning(
            "%s: context × tensor goes beyond the %d ranks of a node, so that every layer waits for the "
            "network between nodes. HINT: %s --mesh.shard 0",
            sizes.equation,
            of_node,
            within,
        )
    mesh = build_mesh(sizes, env.device, config.run.process_group_timeout_s)
    return shard_model(model, sharding, mesh)


def stores(parts: RunParts) -> tuple[NvmeFiles | None, StateStore | None]:
    """The files of --memory.nvme, and what holds the optimizer's states beside the device. Collective."""
    memory, optim, model = parts.config.memory, parts.config.optim, parts.sharded
    if memory.nvme != "off":
        from fsdp.shard.nvme import NvmeFiles

        files = NvmeFiles(memory, optim, model.root, model.units, state_dtype=model.dtypes.master)
        return files, files
    if memory.optimizer_offload:
        from fsdp.shard.offload import HostStates

        return None, HostStates(optim, model.dtypes.master, parts.env.device)
    return None, None


def checkpointer(parts: RunParts) -> Checkpointer:
    """Collective."""
    config, env, sizes, digest = parts.config, parts.env, parts.sharded.sizes, config_hash(parts.config)
    common = config.checkpoint, parts.run.path, env, sizes
    return Checkpointer(*common, config_hash=digest, locks=parts.locks, staging_memory=parts.files)


def maybe_state(config: Config) -> Callable[[], dict[str, Tensor]] | None:
    """Opens the state dict of --model.weights; `none` is random weights where --model.name has its own."""
    if config.model.weights in ("", "none"):
        return None
    from fsdp.checkpoint.pretrained import open_full_state

    return partial(open_full_state, config.model.weights)


def maybe_folder(
    config: Config, spec: ModelSpec, *, quiet: bool = True
) -> Callable[[], PretrainedWeights] | None:
    """Opens the model's folder of transformers, unless --model.weights names other weights."""
    if spec.pretrained is None or config.model.weights:
        return None
    from fsdp.checkpoint.pretrained import PretrainedWeights

    return partial(PretrainedWeights, spec.pretrained, config.run.seed, quiet)


def real_weights(
    config: Config,
    env: DistEnv,
    model: Sharded,
    spec: ModelSpec,
    *,
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
        rank=env.rank,
        weights=maybe_state(config),
        pretrained=maybe_folder(config, spec, quiet=not env.is_main),
        rest_device=torch.device("cpu") if config.memory.cpu_offload else None,
        nvme_files=files,
        restored=restored,
    )
    if files is not None:
        files.watch()
    gathers_own = bool(config.comm.all_gather)
    check_first_forward(model.root, model.compiled, gathers_own=gathers_own, later_too=later_too)
    replicate(model)


def fill_weights(parts: RunParts) -> None:
    """The run's initial weights, or memory for those of its checkpoint. Collective."""
    config, job, saves = parts.config, parts.job, parts.checkpointer
    has_checkpoint = saves.has_checkpoint()
    # A checkpoint of adapters alone has no frozen weights.
    restored = has_checkpoint and not config.lora.rank
    real_weights(config, parts.env, parts.sharded, job.spec, files=parts.files, restored=restored)
    saves.pretrained = job.exported
    if config.lora.rank:
        saves.base = base_of(config, job.spec, parts.sharded)
    if config.train.evaluate_only and has_checkpoint:
        run = parts.run.path
        raise ConfigError(
            f"--train.evaluate_only true in --run.dir {run}, which has checkpoints of its own: "
            "its configuration and records would be replaced.",
            f"--checkpoint.resume {run} --run.dir {run}-evaluated",
        )


def base_of(config: Config, spec: ModelSpec, sharded: Sharded) -> Base:
    """The frozen weights of a sharded model with adapters. Collective."""
    from fsdp.checkpoint.pretrained import digest_of
    from fsdp.models.lora import base_names

    frozen = base_names(sharded.root)
    digests = {name: value for name, value in state_digest(sharded.root).items() if name in frozen}
    return frozen_base(config, spec, sharded.dtypes, digest_of(digests))


def frozen_base(config: Config, spec: ModelSpec, dtypes: Dtypes, digest: str) -> Base:
    """The frozen weights under adapters by the flags, whatever their digest."""
    from fsdp.checkpoint.pretrained import Base

    folder, state = maybe_folder(config, spec), maybe_state(config)
    origin = f"--model.weights {config.model.weights}" if state else f"--run.seed {config.run.seed}"
    if folder is not None and spec.pretrained is not None:
        origin = spec.pretrained.flag

    def build() -> nn.Module:
        with torch.device("meta"):
            return spec.build()

    def read() -> Mapping[str, Tensor]:
        if folder is not None:
            return folder()
        if state is not None:  # a tied weight may have any of its names
            tensors, names = state(), names_in_state(build()).items()
            return {name: tensors[a] for name, aliases in names for a in aliases[::-1] if a in tensors}
        if spec.knows_inits:
            return build_real(spec, config.run.seed).state_dict()
        draws = spec.draws(config.run.seed)
        return build_on_host(spec, config.run.seed).state_dict() if draws is None else draws

    stored = dtypes.frozen or dtypes.master
    return Base(digest, origin, config.lora, dtypes.master, stored, build, read)


def optimizer(parts: RunParts) -> torch.optim.Optimizer:
    memory, on_cuda = parts.config.memory, parts.env.device.type == "cuda"
    on_host = (memory.cpu_offload or memory.nvme != "off") and on_cuda
    # The update of small states is compiled where blocks are, and on CUDA, where eager takes far longer.
    small = parts.config.optim.state != "master" or parts.job.dtypes.master == torch.bfloat16
    compiled = not on_host and (parts.job.sharding.compiled or (small and on_cuda and not missing()))
    if small and compiled:
        set_kernel_folders()
    return build_optimizer(parts.config.optim, parts.sharded.root, compiled=compiled)


def restore(parts: RunParts) -> Restored | None:
    """Fills the state from the newest checkpoint; None without one. Collective."""
    config, state, store = parts.config, parts.state, parts.store
    with store.preallocated(state.optimizer) if store is not None else nullcontext():
        restored = parts.checkpointer.restore(state, weights_only=config.train.evaluate_only)
    apply_hyperparameters(config.optim, state.optimizer)
    return restored


def check_saves_are_there(parts: RunParts) -> None:
    """CheckpointError if the run has saved a later step than the one it starts from, and its store is empty:
    a disk is not mounted, or the checkpoints were deleted. Collective.
    """
    section, run, step = parts.config.checkpoint, parts.run, parts.state.step

    def check() -> None:
        if (saved := history.last_step(run.saves)) <= step:
            return
        store = section.dir or f"{run.path}/checkpoints"
        store = without_secrets(store) if is_url(store) else str(Path(store).absolute())
        raise CheckpointError(
            f"{run.path} has saved step {saved}, but {store} holds no checkpoint: "
            f"this start would go back to step {step} and delete the records after it.",
            f"mount or copy the checkpoints to {store} and start the same command; "
            "--checkpoint.resume never starts over at step 0",
        )

    if parts.checkpointer.resumed_step < 0 and section.resume != "never":
        collectives.on_main(parts.env.rank, check)


def loader(parts: RunParts) -> Loader:
    section, env, job, seed = parts.config.data, parts.env, parts.job, parts.config.run.seed
    stream = env.rank // job.sizes.tensor  # tensor ranks draw the same
    return Loader(
        job.data.train,
        job.cursor,
        micro_batch=job.batch.micro_batch,
        accumulation=job.batch.accumulation,
        rank=job.place.data,
        workers=section.workers,
        prefetch=section.prefetch,
        pin=env.device.type == "cuda",
        device=env.device,
        source_of=None if job.data.sources is None else job.data.sources.of_train,
        about=lambda step: (stream_key(seed, step + 1, stream) % 2**63, job.epoch_at(step + 1)),
        cut=maybe_cut(parts),
    )


def maybe_cut(parts: RunParts) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """What takes a context rank's part of each row."""
    job, function = parts.job, parts.loss_function
    if job.sizes.context == 1:
        return None
    from fsdp.shard.context import cut_rows

    sizes = {"contexts": job.sizes.context, "context": job.place.context}
    return lambda data: cut_rows(data, **sizes, shifts=function.shifts(data))


# ---------------------------------------------------------------- stop requests, records


def stopper(parts: RunParts) -> Stopper:
    """Collective."""
    config, reporter, saves = parts.config, parts.reporter, parts.checkpointer
    return Stopper(
        config.stop,
        parts.env,
        parts.run.path,
        None if type(reporter) is Reporter else reporter.should_stop,
        end_time=end_time(),
        every_minutes=config.checkpoint.every_minutes,
        save_seconds=lambda: saves.save_seconds,
        process_ends=parts.process_ends,
    )


def records(parts: RunParts) -> None:
    """What a start cannot do without: where it cannot be written no rank trains. Collective."""
    run, data, step, env = parts.run, parts.job.data_identity, parts.state.step, parts.env
    nodes = list(dict.fromkeys(collectives.all_gather_objects(socket.gethostname())))

    def write() -> None:
        if parts.locks is not None and (reason := parts.locks.lost_now()) is not None:
            raise RefusedError(f"{reason}.", TWO_RUNS)
        with writing(run.history):  # another user's: before config.toml is replaced
            history.open_lines(run.history).close()
        truncate(run, step)
        with writing(run.config):
            changed = history.write_config(run, parts.config) + history.data_changes(run, data)
        with writing(run.history):
            history.record_start(run, env, from_step=step, changed=changed, nodes=nodes, data=data)
        for line in changed:
            log.warning("changed since the last start: %s", line)

    collectives.on_main(env.rank, write)


def truncate(run: RunDir, step: int) -> None:
    for file in (run.metrics, run.saves, run.answers):
        with writing(file):
            history.truncate(file, step)


def recorder(parts: RunParts, console: Console, mfu_of: float = 0.0, positions: int = 0) -> Recorder:
    """With its sinks on rank 0. Collective: every rank raises what rank 0 does."""
    config, env, run, step = parts.config, parts.env, parts.run, parts.state.step
    made = Recorder(run, env, parts.reporter, console, from_step=step, mfu_of=mfu_of, positions=positions)
    if config.run.sinks or config.run.wandb or config.run.mlflow:
        from fsdp.record.sinks import build_sinks

        def add_sinks() -> None:
            for sink, label in build_sinks(config, run.path, step):
                made.add(sink, label)

        collectives.on_main(env.rank, add_sinks)
    return made


def console(parts: RunParts) -> Console:
    total, info = parts.job.total_steps, parts.job.data.info
    every = 10 if parts.env.device.type == "cuda" else max(1, total // 40)
    unit = "tok" if info.tokens_per_sample else "sample"
    return Console(total_steps=total, every=parts.config.run.log_every_steps or every, unit=unit)


def maybe_mfu(parts: RunParts, model: nn.Module) -> float:
    """That of one sample a second, counted where the device's peak is known; else 0."""
    peak = peak_flops(parts.env.device, parts.env.world_size)
    return flops_per_sample(model, parts.job.data, parts.job.loss) / peak if peak else 0.0

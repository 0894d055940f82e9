"""Checks for fields that conflict, before anything starts: length, mesh, precision, checkpoints, watch, Ray.

`check` runs them all. Checks of fields that save memory or time: checks_memory.py. Not here: checks that need
the number of ranks (fsdp/dist/mesh.py) or the device (fsdp/parallel/device_check.py).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import OBJECT_STORES
from fsdp.base.text import parse_count
from fsdp.config.checks_memory import MEMORY_CHECKS, refuse_beside
from fsdp.config.fields import FIELDS
from fsdp.config.limits import OddFile, check_values
from fsdp.config.sections import (
    DECAYING,
    IN_PARTS,
    OPTIMIZERS,
    READS,
    Config,
    OptimSection,
    ProfileSection,
)
from fsdp.config.values import exists, profile_steps, reshard_policy, worker_range


def check(config: Config) -> None:
    """Raises ConfigError for the first conflict between two fields. Needs no number of ranks."""
    for one in (
        _check_args,
        _check_sources,
        _check_profile,
        _check_train,
        _check_mesh,
        _check_unsharded,
        _check_precision,
        _check_checkpoint,
        _check_run_dir,
        _check_ray,
        _check_watch,
        *MEMORY_CHECKS,
    ):
        one(config)


def _check_args(config: Config) -> None:
    """Values that no recipe may hold, so that config.toml can be read again."""
    for name in (name for name, spec in FIELDS.items() if spec.is_args):
        section, _, key = name.partition(".")
        for arg, value in getattr(getattr(config, section), key).items():
            try:
                check_values([[[value]]])  # as deep as in the file, below [section.args]
            except OddFile as error:
                flag = f"--{name}.{arg}"
                raise ConfigError(f"{flag} cannot be used: {error}.", f"leave it out, or {flag} 1") from None


def _check_train(config: Config) -> None:
    train = config.train
    if train.steps and train.epochs:
        raise ConfigError(
            f"--train.steps {train.steps} and --train.epochs {train.epochs} both set the length of the run.",
            "give one of the two",
        )
    if train.micro_batch > train.global_batch:
        raise ConfigError(
            f"--train.micro_batch {train.micro_batch} is more than "
            f"--train.global_batch {train.global_batch}.",
            f"--train.micro_batch {train.global_batch}",
        )
    if train.steps and train.stop_after > train.steps:
        raise ConfigError(
            f"--train.stop_after {train.stop_after} is after the last step, --train.steps {train.steps}.",
            f"--train.stop_after {train.steps}",
        )
    if train.evaluate_only and config.checkpoint.resume in ("auto", "never") and not config.model.weights:
        raise ConfigError(
            f"--train.evaluate_only true with --checkpoint.resume {config.checkpoint.resume} "
            "names no weights.",
            "--checkpoint.resume RUN, or the folder of one checkpoint",
        )
    _check_schedule(config)
    _check_decay(config)
    _check_moments(config)
    _check_own_settings(config)
    if train.steps and config.optim.warmup_steps > train.steps:
        raise ConfigError(
            f"--optim.warmup_steps {config.optim.warmup_steps} is longer than --train.steps {train.steps}.",
            f"--optim.warmup_steps {train.steps // 20}",
        )


def _check_sources(config: Config) -> None:
    data, sources = config.data, config.data.sources
    if not sources:
        return
    if data.name not in ("", "digits"):  # older runs' config.toml has the second
        raise ConfigError(
            f"--data.name {data.name} and [[data.sources]] ({', '.join(data.names)}) both set the data.",
            f'leave one out: --data.sources none, or [[data.sources]] with name = "{data.name}"',
        )
    for field, value in (("dir", data.dir), ("args", dict(data.args))):
        if value:
            raise ConfigError(
                f"--data.{field} {value} has no effect beside [[data.sources]].",
                f"{field} in the table of the source that it belongs to",
            )
    by_weight = [one for one in sources if one.weight]
    if by_weight and len(by_weight) < len(sources):
        other = next(one for one in sources if not one.weight)
        raise ConfigError(
            f"[[data.sources]] {by_weight[0].label} has weight = {by_weight[0].weight} and {other.label} "
            f"{f'epochs = {other.epochs}' if other.epochs else 'no weight'}.",
            f"weight in every source, or in none: weight = 1 for {other.label}",
        )
    if config.train.epochs and (by_epochs := [one for one in sources if one.epochs]):
        one = by_epochs[0]
        raise ConfigError(
            f"--train.epochs {config.train.epochs} and epochs = {one.epochs} of [[data.sources]] {one.label} "
            "both set how often the data is seen.",
            f"--train.epochs 0, and epochs = {one.epochs * config.train.epochs:g} for {one.label}",
        )


def _check_schedule(config: Config) -> None:
    optim = config.optim
    reads_share = ":" in optim.schedule or optim.schedule == "wsd"
    if optim.decay_share != OptimSection().decay_share and not reads_share:
        raise ConfigError(
            f"--optim.decay_share {optim.decay_share:g} has no effect under "
            f"--optim.schedule {optim.schedule}.",
            "--optim.schedule wsd",
        )


def _check_decay(config: Config) -> None:
    optim = config.optim
    decays = ":" in optim.name or optim.name in DECAYING
    if not decays and optim.weight_decay not in (0, OptimSection().weight_decay):
        raise ConfigError(
            f"--optim.weight_decay {optim.weight_decay:g} has no effect under --optim.name {optim.name}.",
            "--optim.name adamw, or --optim.weight_decay 0",
        )


def _check_moments(config: Config) -> None:
    optim, usual = config.optim, OptimSection()
    if ":" in optim.name:
        return  # its factory says what it accepts
    read = READS.get(optim.name, ())
    for name in ("beta1", "beta2", "eps", "momentum"):
        if name not in read and getattr(optim, name) != getattr(usual, name):
            raise ConfigError(
                f"--optim.{name} {getattr(optim, name):g} has no effect under --optim.name {optim.name}.",
                "--optim.name adamw, or leave it out" if name != "momentum" else _own_momentum(optim),
            )


def _own_momentum(optim: OptimSection) -> str:
    """The hint that names what takes the place of --optim.momentum, SGD's."""
    own = f"{optim.name}_momentum"
    if not hasattr(optim, own):
        if "beta1" not in READS.get(optim.name, ()):
            return "--optim.name sgd, or leave it out"
        own = "beta1"
    return f"leave it out, and give --optim.{own} {optim.momentum:g}"


def _check_own_settings(config: Config) -> None:
    optim, usual = config.optim, OptimSection()
    for field in dataclasses.fields(OptimSection):
        value = getattr(optim, field.name)
        owner = field.name.partition("_")[0]
        if owner in OPTIMIZERS and optim.name != owner and value != getattr(usual, field.name):
            raise ConfigError(
                f"--optim.{field.name} {value} has no effect under --optim.name {optim.name}.",
                f"--optim.name {owner}",
            )


def _check_mesh(config: Config) -> None:
    mesh = config.mesh
    policy = reshard_policy(mesh.reshard_after_forward)
    if mesh.strategy == "fsdp" and mesh.replicate > 1:
        raise ConfigError(
            f"--mesh.strategy fsdp has no replicas, but --mesh.replicate is {mesh.replicate}.",
            "--mesh.strategy hsdp",
        )
    if mesh.strategy == "ddp" and mesh.shard > 1:
        raise ConfigError(
            f"--mesh.strategy ddp has no shards, but --mesh.shard is {mesh.shard}.", "--mesh.strategy hsdp"
        )
    if mesh.strategy == "ddp" and mesh.reshard_after_forward != "true":
        raise ConfigError(
            f"--mesh.reshard_after_forward {policy} has no effect under --mesh.strategy ddp: "
            "nothing is sharded.",
            "leave it out, or --mesh.strategy fsdp",
        )
    kind, _, what = mesh.wrap.partition(":")
    with_value = ("class", "size", "every")
    if kind not in ("auto", "root", *with_value) or (kind in with_value) != bool(what):
        raise ConfigError(
            f"--mesh.wrap {mesh.wrap} is not auto, every:N, class:NAME, size:PARAMETERS or root.",
            "--mesh.wrap auto",
        )
    if kind == "every" and not parse_count(what):
        raise ConfigError(
            f"--mesh.wrap {mesh.wrap}: {what} is not a number of blocks from 1.", "--mesh.wrap every:2"
        )
    if kind == "size" and not parse_count(what):
        raise ConfigError(
            f"--mesh.wrap {mesh.wrap}: {what} is not a number of parameters.", "--mesh.wrap size:1000000"
        )


def _check_unsharded(config: Config) -> None:
    """What FSDP's ignored parameters cannot be combined with."""
    if not config.mesh.unsharded:
        return
    mesh, memory, optim = config.mesh, config.memory, config.optim
    others = (
        ("mesh.strategy", mesh.strategy, mesh.strategy == "ddp"),
        ("memory.cpu_offload", "true", memory.cpu_offload),
        ("memory.nvme", memory.nvme, memory.nvme != "off"),
        ("optim.name", optim.name, ":" not in optim.name and optim.name not in IN_PARTS),
    )
    refuse_beside(f"mesh.unsharded {mesh.unsharded}", others, "leave out --mesh.unsharded")


def _check_precision(config: Config) -> None:
    precision = config.precision
    if precision.param == "fp64" and precision.master != "fp64":
        raise ConfigError(
            f"--precision.param fp64 is finer than the stored --precision.master {precision.master}.",
            "--precision.master fp64",
        )
    if config.mesh.strategy == "ddp" and precision.reduce not in ("auto", precision.master):
        raise ConfigError(
            f"--precision.reduce {precision.reduce}: --mesh.strategy ddp reduces gradients "
            "in the master dtype.",
            f"--precision.reduce {precision.master}",
        )
    if config.mesh.strategy == "ddp" and precision.output != "auto":
        raise ConfigError(
            f"--precision.output {precision.output} has no effect under --mesh.strategy ddp: "
            "outputs are not cast.",
            "--precision.output auto",
        )


def _check_watch(config: Config) -> None:
    """A run that repeats bit for bit needs one number of ranks: sums over another are rounded differently."""
    low, high = worker_range(config.ray.num_workers)
    if config.watch.deterministic and config.backend == "ray" and low != high:
        raise ConfigError(
            "--watch.deterministic needs a fixed number of ranks, "
            f"but --ray.num_workers is {config.ray.num_workers}.",
            f"--ray.num_workers {high}",
        )
    if config.watch.divergence and config.mesh.strategy == "fsdp":
        raise ConfigError(
            f"--watch.divergence {config.watch.divergence} compares replicas, "
            "but --mesh.strategy fsdp has only one.",
            "--watch.divergence 0, or --mesh.strategy hsdp",
        )
    hang = config.watch.hang_s
    if -1 < hang < 0:
        raise ConfigError(f"--watch.hang_s {hang:g} is neither -1, 0 nor a time.", "--watch.hang_s -1")
    if hang > 0 and not config.watch.enabled:
        raise ConfigError(
            f"--watch.hang_s {hang:g} has no effect under --watch.enabled false.",
            "--watch.enabled true",
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and not checkpoint.keep_best_metric.lstrip("-"):
        raise ConfigError(
            "--checkpoint.keep_best_metric is empty.", "--checkpoint.keep_best_metric eval_loss"
        )
    if checkpoint.keep_best and "eval_ema_" in checkpoint.keep_best_metric and not config.optim.ema:
        raise ConfigError(
            f"--checkpoint.keep_best_metric {checkpoint.keep_best_metric} is that of a moving average, and "
            "--optim.ema is 0.",
            "--optim.ema 0.999",
        )
    evaluates = config.train.eval_every_steps or config.train.eval_every_epochs
    if checkpoint.keep_best and not evaluates and "eval" in checkpoint.keep_best_metric:
        raise ConfigError(
            f"--checkpoint.keep_best {checkpoint.keep_best} by {checkpoint.keep_best_metric} "
            "needs evaluations during the run.",
            f"--train.eval_every_steps {checkpoint.every_steps or 100}",
        )
    if (
        checkpoint.resume not in ("auto", "never")
        and "://" not in checkpoint.resume
        and not exists(checkpoint.resume)
    ):
        raise ConfigError(
            f"--checkpoint.resume {checkpoint.resume} does not exist.",
            "--checkpoint.resume auto, never, or the folder of a checkpoint",
        )
    weights = config.model.weights
    of_hub = weights.startswith("hf:") and config.model.name == "transformer"
    if weights not in ("", "none") and not of_hub and not exists(weights):
        raise ConfigError(f"--model.weights {weights} does not exist.", _weights_hint(config))


def _weights_hint(config: Config) -> str:
    run = Path(config.run.dir)
    if not config.run.dir or not exists(run / "config.toml"):
        return "a .pt or .safetensors file, or a folder"
    if not config.lora.rank and exists(run / "full_model" / "config.json"):
        return (
            f"--model.weights {run / 'full_model'}"  # adapters belong to the weights that they started from
        )
    return "put it back: each start of the run reads it"


def _check_run_dir(config: Config) -> None:
    scheme, separator, prefix = config.run.dir.partition("://")
    if separator:
        scheme = scheme if scheme in OBJECT_STORES else "s3"
        place = prefix.rpartition("@")[2] or "bucket/runs/mine"
        raise ConfigError(
            f"--run.dir {scheme}://{place} is not a folder, and run directories are.",
            f"--checkpoint.dir {shlex.quote(f'{scheme}://{place}')}, from which any machine resumes",
        )


def _check_ray(config: Config) -> None:
    low, high = worker_range(config.ray.num_workers)
    if config.backend == "ray" and config.mesh.replicate and config.mesh.shard:
        size = config.mesh.replicate * config.mesh.shard
        if not low <= size <= high:
            raise ConfigError(
                f"--mesh.replicate {config.mesh.replicate} × --mesh.shard {config.mesh.shard} = "
                f"{size} ranks, "
                f"but --ray.num_workers is {config.ray.num_workers}.",
                f"--ray.num_workers {size}",
            )
    for name in config.ray.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(
                f"--ray.env {name}: not a name of an environment variable.", "--ray.env NAME=VALUE"
            )
    threads = config.ray.env.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch(r"0*[1-9]\d*(,\d+)*", threads, re.ASCII):
        raise ConfigError(
            f"--ray.env OMP_NUM_THREADS={threads} is not a number of threads.", "--ray.env OMP_NUM_THREADS=4"
        )
    gpus = config.ray.gpus_per_worker
    if gpus != "auto" and not gpus.replace(".", "", 1).isdigit():
        raise ConfigError(
            f"--ray.gpus_per_worker {gpus} is not auto or a number.", "--ray.gpus_per_worker auto"
        )


def _check_profile(config: Config) -> None:
    profile, steps = config.profile, config.train.stop_after or config.train.steps
    first, _ = profile_steps(profile.steps)
    for name in ("shapes", "stacks"):
        if getattr(profile, name) and not profile.trace:
            raise ConfigError(f"--profile.{name} true has no effect alone.", "--profile.trace true")
    if profile.memory or profile.trace:
        if steps and first > steps:
            raise ConfigError(
                f"--profile.steps {profile.steps} starts after the last step, {steps}.",
                f"--profile.steps {max(1, steps - 1)}",
            )
    elif profile.steps != ProfileSection().steps:
        raise ConfigError(
            f"--profile.steps {profile.steps} has no effect alone.",
            "--profile.memory true, or --profile.trace true",
        )

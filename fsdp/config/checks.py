"""Fields that conflict, as a table, before anything starts. Needs neither the number of ranks nor a device.

A row is (fields, message, hint, condition): the message is shown if the condition holds. In texts `{a.b}` is
the value of that field, and `{flag a.b}` the flag with its value. Rows of `PAIRS` are fields that do not go
together. Not here: checks that need the number of ranks (fsdp/dist/mesh.py) or the device
(fsdp/parallel/checks.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import OBJECT_STORES
from fsdp.base.text import parse_count
from fsdp.config.sections import (
    ADAMS,
    DECAYING,
    FIELDS,
    FUSED,
    IN_PARTS,
    OPTIMIZERS,
    READS,
    Config,
    exists,
    profile_steps,
    reshard_policy,
    shown_value,
    value_of,
    worker_range,
)

Condition = Callable[[Config], Any]


def check(config: Config) -> None:
    """Raises ConfigError for the first conflict between two fields."""
    for row in ROWS:
        message, hint, condition = row
        if condition(config):
            raise ConfigError(_filled(message, config), _filled(hint, config))
    for first, applies, others, hint in PAIRS:
        if applies(config):
            _refuse_beside(config, first, others, hint)
    for check_more in (_unread, _sources, _wrap, _weights, _ray):
        for message, hint in check_more(config):
            raise ConfigError(message, hint)


def _filled(text: str, config: Config) -> str:
    def value(found: re.Match[str]) -> str:
        field = value_of(config, found[2])
        text = f"{field:g}" if isinstance(field, float) else shown_value(field)
        return f"--{found[2]} {text}" if found[1] else text

    return re.sub(r"\{(flag )?([a-z_]+\.[a-z_0-9]+)\}", value, text)


def _refuse_beside(config: Config, first: str, others: dict[str, Condition], hint: str) -> None:
    for name, condition in others.items():
        if condition(config):
            pair = f"{{flag {first}}} and {{flag {name}}} do not go together."
            raise ConfigError(_filled(pair, config), hint)


def _changed(name: str) -> Condition:
    """Whether a field differs from its default."""
    return lambda config: value_of(config, name) != FIELDS[name].default


def _is(name: str, *values: object) -> Condition:
    return lambda config: value_of(config, name) in values


def _ddp(config: Config) -> bool:
    return config.mesh.strategy == "ddp"


def _user_optimizer(config: Config) -> bool:
    return ":" in config.optim.name


def _no_states(config: Config) -> bool:
    return config.optim.name == "sgd" and not config.optim.momentum


# ---------------------------------------------------------------- (message, hint, condition)

_LENGTH: tuple[tuple[str, str, Condition], ...] = (
    (
        "{flag train.steps} and {flag train.epochs} both set the length of the run.",
        "give one of the two",
        lambda c: c.train.steps and c.train.epochs,
    ),
    (
        "{flag train.micro_batch} is more than {flag train.global_batch}.",
        "--train.micro_batch {train.global_batch}",
        lambda c: c.train.micro_batch > c.train.global_batch,
    ),
    (
        "{flag train.stop_after} is after the last step, {flag train.steps}.",
        "--train.stop_after {train.steps}",
        lambda c: 0 < c.train.steps < c.train.stop_after,
    ),
    (
        "--train.evaluate_only true with {flag checkpoint.resume} names no weights.",
        "--checkpoint.resume RUN, or the folder of one checkpoint",
        lambda c: c.train.evaluate_only and c.checkpoint.resume in ("auto", "never") and not c.model.weights,
    ),
    (
        "{flag optim.warmup_steps} is longer than {flag train.steps}.",
        "--optim.warmup_steps 1",
        lambda c: 0 < c.train.steps < c.optim.warmup_steps,
    ),
    (
        "{flag profile.steps} has no effect alone.",
        "--profile.memory true, or --profile.trace true",
        lambda c: _changed("profile.steps")(c) and not (c.profile.memory or c.profile.trace),
    ),
    (
        "{flag profile.steps} starts after the last step.",
        "--profile.steps 1",
        lambda c: (
            (c.profile.memory or c.profile.trace)
            and 0 < (c.train.stop_after or c.train.steps) < profile_steps(c.profile.steps)[0]
        ),
    ),
)

_MESH: tuple[tuple[str, str, Condition], ...] = (
    (
        "--mesh.strategy fsdp has no replicas, but --mesh.replicate is {mesh.replicate}.",
        "--mesh.strategy hsdp",
        lambda c: c.mesh.strategy == "fsdp" and c.mesh.replicate > 1,
    ),
    (
        "--mesh.strategy ddp has no shards, but --mesh.shard is {mesh.shard}.",
        "--mesh.strategy hsdp",
        lambda c: _ddp(c) and c.mesh.shard > 1,
    ),
    (
        "{flag precision.reduce}: --mesh.strategy ddp reduces gradients in the master dtype.",
        "--precision.reduce {precision.master}",
        lambda c: _ddp(c) and c.precision.reduce not in ("auto", c.precision.master),
    ),
    (
        "{flag precision.param} is finer than the stored {flag precision.master}.",
        "--precision.master fp64",
        lambda c: c.precision.param == "fp64" and c.precision.master != "fp64",
    ),
    (
        "{flag watch.divergence} compares replicas, but --mesh.strategy fsdp has only one.",
        "--watch.divergence 0, or --mesh.strategy hsdp",
        lambda c: c.watch.divergence and c.mesh.strategy == "fsdp",
    ),
    (
        "--memory.nvme {memory.nvme} needs a folder for its files.",
        "--memory.nvme_dir /tmp/nvme",
        lambda c: c.memory.nvme != "off" and not c.memory.nvme_dir,
    ),
    (
        "{flag memory.nvme_dir} has no effect alone.",
        "--memory.nvme optimizer",
        lambda c: c.memory.nvme == "off" and c.memory.nvme_dir,
    ),
    (
        "--memory.nvme optimizer: --optim.name sgd has no states without momentum.",
        "--memory.nvme off",
        lambda c: c.memory.nvme == "optimizer" and _no_states(c),
    ),
    (
        "--memory.optimizer_offload true: --optim.name sgd has no states without momentum.",
        "--memory.optimizer_offload false",
        lambda c: c.memory.optimizer_offload and _no_states(c),
    ),
    (
        "--optim.fused true: torch has no fused SGD for sharded parameters ({flag mesh.strategy}).",
        "--optim.fused auto",
        lambda c: c.optim.name == "sgd" and c.optim.fused == "true" and not _ddp(c),
    ),
    (
        "{flag memory.activation_budget} and {flag memory.activation_checkpointing} both select what stays.",
        "--memory.activation_checkpointing none",
        lambda c: c.memory.activation_budget < 1 and c.memory.activation_checkpointing != "none",
    ),
    (
        "{flag memory.activation_checkpointing_every} has no effect under "
        "--memory.activation_checkpointing none.",
        "--memory.activation_checkpointing full",
        lambda c: c.memory.activation_checkpointing_every > 1 and c.memory.activation_checkpointing == "none",
    ),
    (
        "--speed.float8_emulate true has no effect alone.",
        "--speed.float8 tensorwise",
        lambda c: c.speed.float8_emulate and c.speed.float8 == "off",
    ),
    (
        "{flag data.prefetch} is read by threads, but --data.workers is 0.",
        "--data.workers 1",
        lambda c: not c.data.workers and _changed("data.prefetch")(c),
    ),
    (
        "{flag model.frozen} has no effect beside {flag lora.rank}: LoRA freezes the whole model.",
        "give one of the two",
        lambda c: c.lora.rank and c.model.frozen,
    ),
    (
        "{flag precision.frozen} has no effect: every parameter is trained.",
        "--lora.rank 8",
        lambda c: c.precision.frozen != "auto" and not c.lora.rank and not c.model.frozen,
    ),
)

_WATCH: tuple[tuple[str, str, Condition], ...] = (
    (
        "--watch.deterministic needs a fixed number of ranks, but --ray.num_workers is {ray.num_workers}.",
        "--ray.num_workers 2",
        # Sums over another number of ranks are rounded differently.
        lambda c: (
            c.watch.deterministic and c.backend == "ray" and len({*worker_range(c.ray.num_workers)}) > 1
        ),
    ),
    (
        "{flag watch.hang_s} is neither -1, 0 nor a time.",
        "--watch.hang_s -1",
        lambda c: -1 < c.watch.hang_s < 0,
    ),
    (
        "{flag watch.hang_s} has no effect under --watch.enabled false.",
        "--watch.enabled true",
        lambda c: c.watch.hang_s > 0 and not c.watch.enabled,
    ),
    (
        "--checkpoint.keep_best_metric is empty.",
        "--checkpoint.keep_best_metric eval_loss",
        lambda c: c.checkpoint.keep_best and not c.checkpoint.keep_best_metric.lstrip("-"),
    ),
    (
        "{flag checkpoint.keep_best_metric} is that of a moving average, and --optim.ema is 0.",
        "--optim.ema 0.999",
        lambda c: c.checkpoint.keep_best and "eval_ema_" in c.checkpoint.keep_best_metric and not c.optim.ema,
    ),
    (
        "{flag checkpoint.keep_best} by {checkpoint.keep_best_metric} needs evaluations during the run.",
        "--train.eval_every_steps 100",
        lambda c: (
            c.checkpoint.keep_best
            and "eval" in c.checkpoint.keep_best_metric
            and not (c.train.eval_every_steps or c.train.eval_every_epochs)
        ),
    ),
    (
        "{flag checkpoint.resume} does not exist.",
        "--checkpoint.resume auto, never, or the folder of a checkpoint",
        lambda c: (
            c.checkpoint.resume not in ("auto", "never")
            and "://" not in c.checkpoint.resume
            and not exists(c.checkpoint.resume)
        ),
    ),
)
_OF_FSDP = ("all_reduce_hook", "all_gather", "reduce_scatter", "divide_by")
_UNDER_DDP: tuple[tuple[str, Condition], ...] = (
    *((f"comm.{name}", _changed(f"comm.{name}")) for name in _OF_FSDP),
    ("mesh.reshard_after_forward", _changed("mesh.reshard_after_forward")),
    ("mesh.accumulate", _is("mesh.accumulate", "shard")),
    ("mesh.unsharded", _changed("mesh.unsharded")),
    ("precision.output", _changed("precision.output")),
    ("precision.frozen", _changed("precision.frozen")),
    ("memory.cpu_offload", _changed("memory.cpu_offload")),
    ("memory.nvme", _is("memory.nvme", "all")),
    ("speed.prefetch_forward", lambda c: c.speed.prefetch_forward > 1),
    ("speed.prefetch_backward", lambda c: c.speed.prefetch_backward > 1),
)
ROWS: tuple[tuple[str, str, Condition], ...] = (
    *_LENGTH,
    *_MESH,
    *(
        (
            f"{{flag {name}}} applies to shards, and --mesh.strategy ddp has none.",
            "--mesh.strategy fsdp",
            lambda c, applies=applies: _ddp(c) and applies(c),
        )
        for name, applies in _UNDER_DDP
    ),
    *_WATCH,
)

# ---------------------------------------------------------------- fields that do not go together


def _nvme(config: Config) -> bool:
    return config.memory.nvme != "off"


def _on_user_loss(config: Config) -> bool:
    return bool(config.train.loss)


PAIRS: tuple[tuple[str, Condition, dict[str, Condition], str], ...] = (
    (
        "memory.activation_offload",
        _is("memory.activation_offload", True),  # torch passes what these keep to no hook
        {
            "memory.activation_checkpointing": _is("memory.activation_checkpointing", "ops"),
            "memory.activation_budget": lambda c: c.memory.activation_budget < 1,
        },
        "--memory.activation_checkpointing full",
    ),
    (
        "memory.loss_chunk",
        _changed("memory.loss_chunk"),
        {"train.loss": _on_user_loss, "precision.output": _changed("precision.output")},
        "--memory.loss_chunk 0",
    ),
    ("train.z_loss", _changed("train.z_loss"), {"train.loss": _on_user_loss}, "--train.z_loss 0"),
    ("optim.ema", _changed("optim.ema"), {"memory.nvme": _nvme}, "--memory.nvme off"),
    (
        "memory.optimizer_offload",  # its update goes part by part; an average follows whole updates
        _changed("memory.optimizer_offload"),
        {
            "memory.cpu_offload": _changed("memory.cpu_offload"),
            "memory.nvme": _nvme,
            "optim.name": lambda c: c.optim.name not in IN_PARTS,
            "optim.state": _is("optim.state", "8bit"),
            "optim.ema": _changed("optim.ema"),
        },
        "--memory.optimizer_offload false",
    ),
    (
        "optim.name",
        lambda c: True,
        {
            "memory.nvme": lambda c: _nvme(c) and c.optim.name not in IN_PARTS,
            "optim.fused": lambda c: c.optim.fused != "auto" and c.optim.name not in FUSED,
        },
        "--optim.name adamw",
    ),
    (
        "mesh.unsharded",
        _changed("mesh.unsharded"),
        {
            "memory.cpu_offload": _changed("memory.cpu_offload"),
            "memory.nvme": _nvme,
            "optim.name": lambda c: not _user_optimizer(c) and c.optim.name not in IN_PARTS,
        },
        "leave out --mesh.unsharded",
    ),
    (
        "precision.frozen",
        _changed("precision.frozen"),
        {"memory.nvme": _is("memory.nvme", "all"), "speed.float8": _changed("speed.float8")},
        "--precision.frozen auto",
    ),
    (
        "precision.master",  # bf16 needs an update that rounds stochastically: Adam's
        _is("precision.master", "bf16"),
        {
            "optim.name": lambda c: c.optim.name not in ADAMS,
            "optim.fused": _is("optim.fused", "true"),
            "optim.ema": _changed("optim.ema"),
            "precision.param": _is("precision.param", "fp16"),
            "mesh.strategy": _ddp,  # it reduces gradients in the dtype of the parameters
            "memory.nvme": _is("memory.nvme", "all"),
            "speed.float8": _changed("speed.float8"),
        },
        "--precision.master fp32",
    ),
    (
        "speed.float8",
        _changed("speed.float8"),
        {
            "lora.rank": _changed("lora.rank"),
            "memory.cpu_offload": _changed("memory.cpu_offload"),
            "memory.nvme": _is("memory.nvme", "all"),
            "precision.master": _is("precision.master", "fp64"),
            "precision.param": _is("precision.param", "fp16"),
            # torch gathers a float8 weight again only from all of its shards
            "mesh.reshard_after_forward": lambda c: (
                c.speed.float8 == "tensorwise"
                and reshard_policy(c.mesh.reshard_after_forward) not in (True, False, "step")
            ),
        },
        "--speed.float8 off",
    ),
    (
        "optim.state",
        _changed("optim.state"),
        {
            "optim.name": lambda c: c.optim.name not in ADAMS,
            "optim.fused": _is("optim.fused", "true"),
            "precision.master": _is("precision.master", "fp64"),
            "memory.nvme": lambda c: c.optim.state == "8bit" and _nvme(c),
        },
        "--optim.state master",
    ),
)


# ---------------------------------------------------------------- what is no row

Problems = Iterator[tuple[str, str]]


def _unread(config: Config) -> Problems:
    """Settings that what was chosen does not read."""
    optim = config.optim
    if not config.lora.rank:
        for name in ("alpha", "targets", "dropout"):
            if _changed(f"lora.{name}")(config):
                yield (
                    f"--lora.{name} {getattr(config.lora, name)} has no effect without adapters.",
                    "--lora.rank 8",
                )
    if ":" not in optim.schedule and optim.schedule != "wsd" and _changed("optim.decay_share")(config):
        flag = f"--optim.decay_share {optim.decay_share:g}"
        yield f"{flag} has no effect under --optim.schedule {optim.schedule}.", "--optim.schedule wsd"
    unread = "--optim.{} {} has no effect under --optim.name " + f"{optim.name}."
    for name in (name.removeprefix("optim.") for name in FIELDS if name.startswith("optim.")):
        value, owner = getattr(optim, name), name.partition("_")[0]
        if not _changed(f"optim.{name}")(config):
            continue
        if owner in OPTIMIZERS and optim.name != owner:
            yield unread.format(name, value), f"--optim.name {owner}"
        if _user_optimizer(config):
            continue  # its factory says what it accepts
        if name == "weight_decay" and value and optim.name not in DECAYING:
            yield unread.format(name, value), "--optim.name adamw, or --optim.weight_decay 0"
        if name == "momentum" and name not in READS.get(optim.name, ()):
            other = "muon_momentum" if optim.name == "muon" else "beta1"
            yield unread.format(name, value), f"leave it out, and give --optim.{other} {value:g}"
        if name in ("beta1", "beta2", "eps") and name not in READS.get(optim.name, ()):
            yield unread.format(name, value), "--optim.name adamw, or leave it out"


def _sources(config: Config) -> Problems:
    data, sources = config.data, config.data.sources
    if not sources:
        return
    if data.name not in ("", "digits"):  # older runs' config.toml has the second
        yield (
            f"--data.name {data.name} and [[data.sources]] ({', '.join(data.names)}) both set the data.",
            f'leave one out: --data.sources none, or [[data.sources]] with name = "{data.name}"',
        )
    for field, value in (("dir", data.dir), ("args", dict(data.args))):
        if value:
            yield (
                f"--data.{field} {value} has no effect beside [[data.sources]].",
                f"{field} in the table of the source that it belongs to",
            )
    by_weight = [source for source in sources if source.weight]
    if by_weight and len(by_weight) < len(sources):
        other = next(source for source in sources if not source.weight)
        epochs = f"epochs = {other.epochs}" if other.epochs else "no weight"
        yield (
            f"[[data.sources]] {by_weight[0].label} has weight = {by_weight[0].weight} and {other.label} "
            f"{epochs}.",
            f"weight in every source, or in none: weight = 1 for {other.label}",
        )
    source = next((source for source in sources if source.epochs and config.train.epochs), None)
    if source is not None:
        yield (
            f"--train.epochs {config.train.epochs} and epochs = {source.epochs} of [[data.sources]] "
            f"{source.label} both set how often the data is seen.",
            f"--train.epochs 0, and epochs = {source.epochs * config.train.epochs:g} for {source.label}",
        )


def _wrap(config: Config) -> Problems:
    reshard_policy(config.mesh.reshard_after_forward)
    wrap = config.mesh.wrap
    kind, _, value = wrap.partition(":")
    if kind in ("every", "size") and not parse_count(value):
        counted = "blocks from 1" if kind == "every" else "parameters"
        example = "every:2" if kind == "every" else "size:1000000"
        yield f"--mesh.wrap {wrap}: {value} is not a number of {counted}.", f"--mesh.wrap {example}"
    if not (wrap in ("auto", "root") or (kind in ("class", "every", "size") and value)):
        yield (
            f"--mesh.wrap {wrap} is not auto, every:N, class:NAME, size:PARAMETERS or root.",
            "--mesh.wrap auto",
        )


def _weights(config: Config) -> Problems:
    weights, run = config.model.weights, Path(config.run.dir)
    of_hub = weights.startswith("hf:") and config.model.name == "transformer"  # refused with its own hint
    if weights not in ("", "none") and not of_hub and not exists(weights):
        hint = "a .pt or .safetensors file, or a folder"
        if config.run.dir and exists(run / "config.toml"):
            hint = "put it back: each start of the run reads it"
        yield f"--model.weights {weights} does not exist.", hint
    scheme, separator, prefix = config.run.dir.partition("://")
    if separator:
        scheme = scheme if scheme in OBJECT_STORES else "s3"
        place = prefix.rpartition("@")[2] or "bucket/runs/mine"
        yield (
            f"--run.dir {scheme}://{place} is not a folder, and run directories are.",
            f"--checkpoint.dir {shlex.quote(f'{scheme}://{place}')}, from which any machine resumes",
        )


def _ray(config: Config) -> Problems:
    ray, mesh = config.ray, config.mesh
    profile_steps(config.profile.steps)
    low, high = worker_range(ray.num_workers)
    size = mesh.replicate * mesh.shard
    if config.backend == "ray" and size and not low <= size <= high:
        yield (
            f"--mesh.replicate {mesh.replicate} × --mesh.shard {mesh.shard} = {size} ranks, but "
            f"--ray.num_workers is {ray.num_workers}.",
            f"--ray.num_workers {size}",
        )
    for name in ray.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield f"--ray.env {name}: not a name of an environment variable.", "--ray.env NAME=VALUE"
    threads = ray.env.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch(r"0*[1-9]\d*(,\d+)*", threads, re.ASCII):
        yield (
            f"--ray.env OMP_NUM_THREADS={threads} is not a number of threads.",
            "--ray.env OMP_NUM_THREADS=4",
        )
    if ray.gpus_per_worker != "auto" and not ray.gpus_per_worker.replace(".", "", 1).isdigit():
        yield (
            f"--ray.gpus_per_worker {ray.gpus_per_worker} is not auto or a number.",
            "--ray.gpus_per_worker auto",
        )

"""Fields that conflict, as a table, before anything starts. Needs neither the number of ranks nor a device.

A row is (field, another, condition, hint, reason): if the condition holds, the two as they are given do not
go together. In hints `{a.b}` is the value of that field. Not here: checks that need the number of ranks
(fsdp/distributed/mesh.py) or the device (fsdp/shard/checks.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config.sections import (
    ADAMS,
    DECAYING,
    FIELDS,
    Config,
    exists,
    profile_steps,
    reshard_policy,
    shown_value,
    value_of,
    worker_range,
)

Condition = Callable[[Config], Any]
Row = tuple[str, str, Condition, str, str]


def check(config: Config) -> None:
    """Raises ConfigError for the first conflict between two fields."""
    for field, other, condition, hint, reason in ROWS:
        if condition(config):
            pair = f"{_flag(config, field)} and {_flag(config, other)} do not go together"
            hint = re.sub(r"\{(\w+\.\w+)\}", lambda name: shown_value(value_of(config, name[1])), hint)
            raise ConfigError(f"{pair}{reason and f': {reason}'}.", hint)
    for check_more in (_sources, _texts, _ray):
        for message, hint in check_more(config):
            raise ConfigError(message, hint)


def _flag(config: Config, name: str) -> str:
    value = value_of(config, name)
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {shown_value(value)}"


def _changed(name: str) -> Condition:
    """Whether a field differs from its default."""
    return lambda config: value_of(config, name) != FIELDS[name].default


def _is(name: str, *values: object) -> Condition:
    return lambda config: value_of(config, name) in values


def _both(first: Condition, second: Condition) -> Condition:
    return lambda config: first(config) and second(config)


def _beside(
    field: str, applies: Condition, hint: str, others: dict[str, Condition], reason: str = ""
) -> Iterator[Row]:
    """A field that does not go together with several others."""
    for other, condition in others.items():
        yield field, other, _both(applies, condition), hint, reason


def _of(name: str, *values: object) -> dict[str, Condition]:
    """Another field: if it has one of these values, or differs from its default."""
    return {name: _is(name, *values) if values else _changed(name)}


_ddp = _is("mesh.strategy", "ddp")
_nvme = _is("memory.nvme", "optimizer", "all")
_RECOMPUTED = "memory.activation_checkpointing"
_NO_EFFECT = "the first has no effect"
_NO_NVME = "--memory.nvme off --memory.nvme_dir ''"


def _no_adam(config: Config) -> bool:
    return config.optim.name not in ADAMS


def _whole(config: Config) -> bool:
    """An optimizer whose update does not go part by part."""
    return config.optim.name not in (*ADAMS, "sgd")


def _no_states(config: Config) -> bool:
    return config.optim.name == "sgd" and not config.optim.momentum


def _names_no_weights(config: Config) -> bool:
    named = config.model.weights or config.model.name.startswith("hf:")
    return config.checkpoint.resume in ("auto", "never") and not named


def _profiled(config: Config) -> bool:
    return config.profile.memory or config.profile.trace


def _best_of_evaluations(config: Config) -> bool:
    return bool(config.checkpoint.keep_best) and "eval" in config.checkpoint.keep_best_metric


def _elastic(config: Config) -> bool:
    return config.backend == "ray" and len({*worker_range(config.ray.num_workers)}) > 1


def _part_resharded(config: Config) -> bool:
    """torch gathers a float8 weight again only from all of its shards."""
    policy = reshard_policy(config.mesh.reshard_after_forward)
    return config.speed.float8 == "tensorwise" and policy not in (True, False, "step", "auto")


READERS = {
    **dict.fromkeys(("optim.beta1", "optim.beta2", "optim.eps"), (*ADAMS, "muon")),
    **dict.fromkeys(("optim.muon_lr", "optim.muon_momentum", "optim.muon_parameters"), ("muon",)),
    "optim.momentum": ("sgd",),
    "optim.weight_decay": DECAYING,
}
"""Settings of some optimizers. A user's factory says what it accepts of those that are not Muon's."""


def _unread(name: str, readers: tuple[str, ...]) -> Condition:
    def condition(config: Config) -> bool:
        is_factory = ":" in config.optim.name and "muon" not in name
        is_set = _changed(name)(config) and bool(value_of(config, name))
        return is_set and not is_factory and config.optim.name not in readers

    return condition


ROWS: tuple[Row, ...] = (
    ("train.steps", "train.epochs", lambda c: c.train.steps and c.train.epochs,
     "--train.steps 0, or --train.epochs 0", ""),
    ("train.micro_batch", "train.global_batch", lambda c: c.train.micro_batch > c.train.global_batch,
     "--train.micro_batch {train.global_batch}", "the first is larger"),
    ("train.evaluate_only", "checkpoint.resume", lambda c: c.train.evaluate_only and _names_no_weights(c),
     "--checkpoint.resume RUN, or the folder of one checkpoint", "no weights are named"),
    ("optim.warmup_steps", "train.steps", lambda c: 0 < c.train.steps < c.optim.warmup_steps,
     "--optim.warmup_steps 1", "the warm-up is longer"),
    ("profile.steps", "profile.trace", lambda c: _changed("profile.steps")(c) and not _profiled(c),
     "--profile.memory true, or --profile.trace true", _NO_EFFECT),
    ("mesh.strategy", "mesh.replicate", lambda c: c.mesh.strategy == "fsdp" and c.mesh.replicate > 1,
     "--mesh.strategy hsdp", "fsdp has no replicas"),
    ("mesh.strategy", "mesh.shard", lambda c: _ddp(c) and c.mesh.shard > 1,
     "--mesh.strategy hsdp", "ddp has no shards"),
    ("precision.reduce", "mesh.strategy",
     lambda c: _ddp(c) and c.precision.reduce not in ("auto", c.precision.master),
     "--precision.reduce {precision.master}", "ddp reduces gradients in the master dtype"),
    ("precision.param", "precision.master",
     lambda c: c.precision.param == "fp64" and c.precision.master != "fp64",
     "--precision.master fp64", "the first is finer than what is stored"),
    ("watch.divergence", "mesh.strategy",
     lambda c: c.watch.divergence and c.mesh.strategy == "fsdp" and c.mesh.tensor == 1,
     "--watch.divergence 0, or --mesh.strategy hsdp", "fsdp has only one replica to compare"),
    ("memory.nvme", "memory.nvme_dir", lambda c: _nvme(c) and not c.memory.nvme_dir,
     "--memory.nvme_dir /tmp/nvme", "its files need a folder"),
    ("memory.nvme_dir", "memory.nvme", lambda c: c.memory.nvme_dir and not _nvme(c),
     "--memory.nvme optimizer", _NO_EFFECT),
    ("memory.nvme", "optim.momentum", lambda c: c.memory.nvme == "optimizer" and _no_states(c),
     _NO_NVME, "sgd has no states without momentum"),
    ("memory.optimizer_offload", "optim.momentum", lambda c: c.memory.optimizer_offload and _no_states(c),
     "--memory.optimizer_offload false", "sgd has no states without momentum"),
    ("optim.fused", "mesh.strategy",
     lambda c: c.optim.name == "sgd" and c.optim.fused == "true" and not _ddp(c),
     "--optim.fused auto", "torch has no fused SGD for sharded parameters"),
    ("memory.activation_budget", _RECOMPUTED,
     lambda c: c.memory.activation_budget < 1 and c.memory.activation_checkpointing != "none",
     "--memory.activation_checkpointing none", "both select what stays"),
    ("memory.activation_checkpointing_every", _RECOMPUTED,
     lambda c: c.memory.activation_checkpointing_every > 1 and c.memory.activation_checkpointing == "none",
     "--memory.activation_checkpointing full", _NO_EFFECT),
    ("speed.float8_emulate", "speed.float8", lambda c: c.speed.float8_emulate and c.speed.float8 == "off",
     "--speed.float8 tensorwise", _NO_EFFECT),
    ("data.validation", "data.args", lambda c: c.data.validation and "heldout" in c.data.args,
     "leave heldout out of the second", "both select what is held out"),
    ("data.prefetch", "data.workers", lambda c: not c.data.workers and _changed("data.prefetch")(c),
     "--data.workers 1", "threads read ahead"),
    ("model.frozen", "lora.rank", lambda c: c.lora.rank and c.model.frozen,
     "give one of the two", "LoRA freezes the whole model"),
    ("precision.frozen", "lora.rank",
     lambda c: c.precision.frozen != "auto" and not c.lora.rank and not c.model.frozen,
     "--lora.rank 8", "every parameter is trained"),
    ("watch.deterministic", "ray.num_workers", lambda c: c.watch.deterministic and _elastic(c),
     "--ray.num_workers 2", "sums over another number of ranks are rounded differently"),
    ("watch.hang_s", "watch.enabled", lambda c: c.watch.hang_s > 0 and not c.watch.enabled,
     "--watch.enabled true", _NO_EFFECT),
    ("checkpoint.keep_best_metric", "optim.ema",
     lambda c: c.checkpoint.keep_best and "eval_ema_" in c.checkpoint.keep_best_metric and not c.optim.ema,
     "--optim.ema 0.999", "it is that of a moving average"),
    ("checkpoint.keep_best_metric", "train.eval_every_steps",
     lambda c: _best_of_evaluations(c) and not (c.train.eval_every_steps or c.train.eval_every_epochs),
     "--train.eval_every_steps 100", "it needs evaluations during the run"),
    *_beside("mesh.strategy", _ddp, "--mesh.strategy fsdp", {
        **_of("comm.all_reduce_hook"), **_of("comm.all_gather"), **_of("comm.reduce_scatter"),
        **_of("mesh.accumulate", "shard"), **_of("mesh.unsharded"),
        "mesh.reshard_after_forward": lambda c: c.mesh.reshard_after_forward not in ("auto", "true"),
        **_of("precision.output"), **_of("precision.frozen"),
        **_of("memory.cpu_offload"), **_of("memory.nvme", "all"), **_of("speed.prefetch_forward"),
        **_of("speed.prefetch_backward"),
    }, "it applies to shards"),
    # torch passes what these keep to no hook
    *_beside("memory.activation_offload", _changed("memory.activation_offload"), f"--{_RECOMPUTED} full",
             _of(_RECOMPUTED, "ops")),
    *_beside("memory.activation_offload", _changed("memory.activation_offload"),
             "--memory.activation_budget 1", _of("memory.activation_budget")),
    *_beside("memory.loss_chunk", _changed("memory.loss_chunk"), "--memory.loss_chunk 0",
             _of("train.loss") | _of("precision.output")),
    *_beside("train.z_loss", _changed("train.z_loss"), "--train.z_loss 0", _of("train.loss")),
    *_beside("optim.ema", _changed("optim.ema"), _NO_NVME, _of("memory.nvme")),
    # its update goes part by part; an average follows whole updates
    *_beside("memory.optimizer_offload", _changed("memory.optimizer_offload"),
             "--memory.optimizer_offload false", {
                 **_of("memory.cpu_offload"), **_of("memory.nvme"), "optim.name": _whole,
                 **_of("optim.state", "8bit"), **_of("optim.ema"),
             }),
    *_beside("optim.name", _whole, "--optim.name adamw", _of("memory.nvme")),
    *_beside("optim.name", lambda c: ":" in c.optim.name, "--optim.name adamw", _of("optim.fused")),
    *_beside("mesh.unsharded", _changed("mesh.unsharded"), "leave out --mesh.unsharded", {
        **_of("memory.cpu_offload"), **_of("memory.nvme"),
        "optim.name": lambda c: _whole(c) and ":" not in c.optim.name,
    }),
    *_beside("mesh.strategy", _ddp, "--mesh.strategy hsdp",
             _of("mesh.context") | _of("mesh.tensor") | _of("mesh.expert")),
    *(row for axis in ("mesh.context", "mesh.tensor", "mesh.expert")
      for row in _beside(axis, _changed(axis), f"--{axis} 1", {
          **_of("mesh.unsharded"), **_of("memory.cpu_offload"), **_of("memory.nvme"),
          **_of("comm.all_reduce_hook"), **_of("comm.all_gather"), **_of("comm.reduce_scatter"),
      })),
    ("mesh.expert", "speed.float8", lambda c: c.mesh.expert > 1 and c.speed.float8 != "off",
     "--speed.float8 off", ""),
    # torch regathers from fewer shards no weight that another axis divides
    *_beside("mesh.tensor", _changed("mesh.tensor"), "--mesh.tensor 1", {
        **_of("optim.name", "muon"), **_of("optim.state", "8bit"), **_of("lora.rank"), **_of("speed.float8"),
        **_of("memory.loss_chunk"), **_of("speed.compile", "true"),
    }),
    *(row for axis in ("mesh.tensor", "mesh.expert")
      for row in _beside(axis, _changed(axis), "--mesh.reshard_after_forward true", {
          "mesh.reshard_after_forward": lambda c: c.mesh.reshard_after_forward.isdigit()})),
    *_beside("mesh.context", _changed("mesh.context"), "--mesh.context 1",
             _of("train.loss") | _of("speed.float8"), "a rank has a part of each row"),
    *_beside("precision.frozen", _changed("precision.frozen"), "--precision.frozen auto",
             _of("memory.nvme", "all") | _of("speed.float8")),
    # an update that rounds stochastically, which is Adam's; ddp reduces gradients in the parameters' dtype
    *_beside("precision.master", _is("precision.master", "bf16"), "--precision.master fp32", {
        "optim.name": _no_adam, **_of("optim.fused", "true"), **_of("optim.ema"),
        **_of("precision.param", "fp16"), **_of("mesh.strategy", "ddp"), **_of("memory.nvme", "all"),
        **_of("speed.float8"),
    }),
    *_beside("speed.float8", _changed("speed.float8"), "--speed.float8 off", {
        **_of("lora.rank"), **_of("memory.cpu_offload"), **_of("memory.nvme", "all"),
        **_of("precision.master", "fp64"), **_of("precision.param", "fp16"),
        "mesh.reshard_after_forward": _part_resharded,
    }),
    *_beside("optim.state", _changed("optim.state"), "--optim.state master", {
        "optim.name": _no_adam, **_of("optim.fused", "true"), **_of("precision.master", "fp64"),
    }),
    *_beside("optim.state", _is("optim.state", "8bit"), "--optim.state master", _of("memory.nvme")),
    *_beside("lora.rank", _is("lora.rank", 0), "--lora.rank 8",
             _of("lora.alpha") | _of("lora.targets") | _of("lora.dropout"), "no adapter reads the second"),
    ("optim.decay_share", "optim.schedule",
     lambda c: _changed("optim.decay_share")(c) and ":" not in c.optim.schedule and c.optim.schedule != "wsd",
     "--optim.schedule wsd", _NO_EFFECT),
    *((name, "optim.name", _unread(name, readers), f"--optim.name {readers[0]}, or leave the first out",
       _NO_EFFECT) for name, readers in READERS.items()),
)  # fmt: skip


# ---------------------------------------------------------------- what is no row

Problems = Iterator[tuple[str, str]]


def _sources(config: Config) -> Problems:
    data, sources = config.data, config.data.sources
    if not sources:
        return
    name = "" if data.name == "digits" else data.name  # older runs' config.toml has it
    given = {"name": name, "dir": data.dir, "args": dict(data.args), "validation": data.validation}
    for field, value in given.items():
        if value:
            part = f'validation = "{value}"' if field == "validation" else field
            yield (
                f"--data.{field} {value} has no effect beside [[data.sources]].",
                f"--data.sources none, or {part} in the table of the source that it belongs to",
            )
    unweighed = [source.label for source in sources if not source.weight]
    if unweighed and len(unweighed) < len(sources):
        yield (
            f"some of [[data.sources]] have a weight, and {unweighed[0]} has none.",
            f"weight in every source, or in none: weight = 1 for {unweighed[0]}",
        )
    for source in sources:
        if source.epochs and config.train.epochs:
            yield (
                f"--train.epochs {config.train.epochs} and epochs = {source.epochs} of [[data.sources]] "
                f"{source.label} both set how often the data is seen.",
                f"--train.epochs 0, and epochs = {source.epochs * config.train.epochs:g} for {source.label}",
            )


def _texts(config: Config) -> Problems:
    reshard_policy(config.mesh.reshard_after_forward)
    wrap, run_dir, hang_s = config.mesh.wrap, config.run.dir, config.watch.hang_s
    if not re.fullmatch(r"auto|root|class:.+|(every|size):0*[1-9]\d*(_\d+)*", wrap, re.ASCII):
        forms = "auto, every:N, class:NAME, size:PARAMETERS or root"
        yield f"--mesh.wrap {wrap} is not {forms}.", "--mesh.wrap auto"
    if -1 < hang_s < 0:
        yield f"--watch.hang_s {hang_s:g} is neither -1, 0 nor a time.", "--watch.hang_s -1"
    resume, weights = config.checkpoint.resume, config.model.weights
    of_hub = weights.startswith("hf:") and config.model.name == "transformer"  # refused with its own hint
    if resume not in ("auto", "never") and "://" not in resume and not exists(resume):
        hint = "--checkpoint.resume auto, never, or the folder of a checkpoint"
        yield f"--checkpoint.resume {resume} does not exist.", hint
    if weights not in ("", "none") and not of_hub and not exists(weights):
        yield f"--model.weights {weights} does not exist.", "a .pt or .safetensors file, or a folder"
    if "://" in run_dir:
        place = re.sub(r"(?<=://).*@", "", run_dir)  # a key of the store is no part of a message
        flags = (
            f"--run.dir runs/{shlex.quote(place.rpartition('/')[2])} --checkpoint.dir {shlex.quote(place)}"
        )
        fault = f"--run.dir {place} is not a folder, and run directories are."
        yield fault, f"{flags}, from which any machine resumes"


def _ray(config: Config) -> Problems:
    ray, mesh = config.ray, config.mesh
    profile_steps(config.profile.steps)
    low, high = worker_range(ray.num_workers)
    further = ("context", mesh.context), ("tensor", mesh.tensor)
    size = mesh.replicate * mesh.shard * mesh.context * mesh.tensor
    if config.backend == "ray" and size and not low <= size <= high:
        yield (
            f"--mesh.replicate {mesh.replicate} × --mesh.shard {mesh.shard}"
            + "".join(f" × --mesh.{axis} {n}" for axis, n in further if n > 1)
            + f" = {size} ranks, but "
            f"--ray.num_workers is {ray.num_workers}.",
            f"--ray.num_workers {size}",
        )
    for name in ray.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield f"--ray.env {name}: not a name of an environment variable.", "--ray.env NAME=VALUE"
    if ray.gpus_per_worker != "auto" and not ray.gpus_per_worker.replace(".", "", 1).isdigit():
        problem = f"--ray.gpus_per_worker {ray.gpus_per_worker} is not auto or a number."
        yield problem, "--ray.gpus_per_worker auto"

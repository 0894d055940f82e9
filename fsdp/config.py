"""The configuration: one frozen dataclass tree, the whole truth of a run.

A recipe (TOML) is read first, flags `--section.field value` over it; both go through the same parse and the same
checks. What depends on the number of ranks is checked in fsdp/mesh.py; nothing here knows torch.

Here live: the fields, their parsing, printing and cross-checks. Not here: what a field does.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp.errors import ConfigError

Args = Mapping[str, Any]
"""Free keyword arguments (`--model.args.width 512`), checked by whoever takes them."""


def knob(
    default: Any,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A field with its help, unit and range: what --help shows and what the parser enforces."""
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "above": above}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunSection:
    dir: str = knob("", "run directory; empty makes a new one under runs/. The same directory again resumes it")
    seed: int = knob(0, "seed of weights, data order and dropout", low=0)
    process_group_timeout_s: float = knob(600.0, "a collective that waits longer than this fails", "s", above=0)
    log_every_steps: int = knob(0, "print a line each n steps; 0 chooses: 1 on CPU, 10 on CUDA", "steps", low=0)
    matmul_precision: Literal["highest", "high", "medium"] = knob("high", "fp32 matrix products on CUDA: high is TF32")
    wandb: str = knob("", "a Weights & Biases project that hears the numbers too; empty: none")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    steps: int = knob(0, "optimizer steps; 0 counts epochs instead", "steps", low=0)
    epochs: int = knob(0, "passes over the data; 0 counts steps; neither given is the data's own default", "epochs", low=0)
    stop_after: int = knob(0, "leave after this step with a checkpoint, the schedule untouched; 0 runs to the end", low=0)
    global_batch: int = knob(64, "samples an optimizer step, over all ranks and micro-batches", "samples", low=1)
    micro_batch: int = knob(0, "samples a rank takes at once; 0 takes the rank's whole share", "samples", low=0)
    clip_grad_norm: float = knob(1.0, "largest global gradient norm; 0 never clips", low=0)
    eval_every_steps: int = knob(0, "evaluate each n steps; 0 only at the end", "steps", low=0)
    eval_batch: int = knob(0, "samples a rank evaluates at once; 0 takes the micro-batch", "samples", low=0)
    eval_samples: int = knob(0, "held-out samples of an evaluation; 0 takes all", "samples", low=0)
    nonfinite: Literal["stop", "skip"] = knob("stop", "a loss or gradient that is NaN or infinite: stop, or skip the update")
    max_skipped: int = knob(10, "skipped updates in a row that are borne before the run stops", "steps", low=1)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    name: str = knob("vit", "vit, transformer, mlp, or package.module:factory for any nn.Module of yours")
    preset: str = knob("", "a named size of that model; empty takes its default")
    args: Args = knob({}, "keyword arguments over the preset, or of your factory: --model.args.NAME VALUE")
    init: Literal["shard", "broadcast"] = knob(
        "shard", "each rank draws its own shard, or rank 0 draws and sends; the bits are the same"
    )
    weights: str = knob("", "a torch or safetensors state dict, file or folder, to start from")
    frozen: str = knob("", "parameters that are not trained: names or patterns, as in encoder.*,*.bias")


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    rank: int = knob(0, "width of the adapters that are trained in place of the model; 0 trains the model", low=0)
    alpha: float = knob(16.0, "an adapter's product is scaled by alpha over rank", above=0)
    targets: str = knob("", "linear layers with an adapter: names or patterns, as in q_proj,v_proj; empty is all within blocks")
    dropout: float = knob(0.0, "dropout of what goes into the adapters", low=0, high=0.999)

    @property
    def scale(self) -> float:
        return self.alpha / max(1, self.rank)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    name: str = knob("digits", "digits, fashion_mnist, text, tokens, folder, synthetic, or package.module:factory")
    dir: str = knob("", "where the data's files lie; empty takes the data's own place")
    seq_len: int = knob(256, "tokens a sample, for text and tokens", "tokens", low=1)
    args: Args = knob({}, "keyword arguments of the data set: --data.args.NAME VALUE")
    workers: int = knob(1, "threads a rank that read ahead; 0 reads in the step", "threads", low=0)
    prefetch: int = knob(2, "steps read ahead; at least one a worker", "steps", low=1)
    to_device: bool = knob(True, "on CUDA, what is read ahead is also copied ahead, on a stream of its own")


@dataclass(frozen=True, kw_only=True)
class MeshSection:
    strategy: Literal["auto", "fsdp", "hsdp", "ddp"] = knob(
        "auto",
        "fsdp shards over all ranks; hsdp shards within a node and replicates across; ddp replicates; "
        "auto is hsdp on several nodes and fsdp on one",
    )
    replicate: int = knob(0, "size of axis dp_replicate; 0 derives it", "ranks", low=0)
    shard: int = knob(0, "size of axis dp_shard; 0 derives it", "ranks", low=0)
    reshard_after_forward: str = knob(
        "true",
        "true frees gathered parameters after forward (ZeRO-3), false keeps them to backward (ZeRO-2), step "
        "gathers once an optimizer step (like ZeRO-1), a number reshards to that many ranks",
    )
    accumulate: Literal["last", "shard", "every"] = knob(
        "last",
        "gradients of micro-batches are reduced at the last one; or scattered each time and all-reduced "
        "at the last (less memory); or both each time",
    )
    wrap: str = knob(
        "auto",
        "what becomes a communication unit: auto (the model's own units, else its repeated blocks), "
        "class:NAME[,NAME], size:PARAMETERS, or root",
    )


@dataclass(frozen=True, kw_only=True)
class CommSection:
    all_reduce_hook: str = knob("", "package.module:function(gradient), run after each unit's reduction, in place")
    all_gather: str = knob("", "package.module:function(output, input, group, async_op) in place of FSDP's own, or a class")
    reduce_scatter: str = knob("", "package.module:function(output, input, group, op, async_op) in place of FSDP's, or a class")
    divide_by: float = knob(
        0.0, "the reduction divides by this and the loss is multiplied by it: 1 only sums; 0 is the number of ranks", low=0
    )


Precision = Literal["auto", "fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    master: Literal["fp32", "fp64"] = knob("fp32", "what parameters and optimizer states are kept in")
    param: Precision = knob("auto", "what forward and backward compute in; auto is bf16 on CUDA, master on CPU")
    reduce: Precision = knob("auto", "what gradients are reduced in; auto is the master's")
    output: Precision = knob("auto", "what the model's output is cast to; auto leaves it as computed")
    loss_scale: float = knob(65536.0, "fp16's first loss scale; halves on overflow, doubles after 2000 good steps", above=0)


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    name: Literal["adamw", "adam", "sgd"] = knob("adamw", "the optimizer; adamw decays matrices only")
    lr: float = knob(5e-4, "peak learning rate", above=0)
    beta1: float = knob(0.9, "decay of the first moment", low=0, high=1)
    beta2: float = knob(0.95, "decay of the second moment", low=0, high=1)
    eps: float = knob(1e-8, "Adam's denominator floor", above=0)
    weight_decay: float = knob(0.1, "decay of matrices; vectors and scalars never decay", low=0)
    momentum: float = knob(0.9, "SGD's momentum", low=0, high=1)
    fused: Literal["auto", "true", "false"] = knob("auto", "one kernel for the whole update where it exists")
    state: Literal["master", "bf16", "8bit"] = knob(
        "master", "what Adam's moments are kept in: the master's dtype, bf16 rounded at random, or 8 bits and a scale a block"
    )
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine", "how the rate falls after warm-up")
    warmup_steps: int = knob(-1, "steps from 0 to the peak; -1 is a twentieth of the run", "steps", low=-1)
    min_lr_ratio: float = knob(0.1, "the last rate over the peak", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    dir: str = knob("", "where checkpoints go; empty is RUN/checkpoints; s3://bucket/prefix is an object store")
    every_steps: int = knob(100, "save each n steps; 0 never", "steps", low=0)
    every_minutes: float = knob(0.0, "save when this long since the last; 0 never", "min", low=0)
    resume: str = knob("auto", "auto goes on from the newest whole one, never starts anew, or a PATH to start from")
    mode: Literal["async", "blocking"] = knob("async", "write behind the steps, or wait for each save")
    keep_last: int = knob(3, "newest checkpoints kept; 0 keeps all", low=0)
    keep_every_steps: int = knob(0, "also keep each n-th step's; 0 keeps none", "steps", low=0)
    keep_best: int = knob(0, "also keep the best k by keep_best_metric; 0 keeps none", low=0)
    keep_best_metric: str = knob("eval_loss", "which metric says best; a leading - means larger is better")
    verify: bool = knob(True, "check every file's checksum before a load; sizes are always checked")
    export: bool = knob(True, "write full_model/ at the end of the run")
    export_format: Literal["torch", "safetensors", "both"] = knob("torch", "what the export writes")
    export_shard_gib: float = knob(5.0, "largest safetensors file", "GiB", above=0)


@dataclass(frozen=True, kw_only=True)
class StopSection:
    file: str = knob("", "stop with a checkpoint when this file appears; empty is RUN/STOP")
    deadline_s: float = knob(0.0, "stop this long after the start, the last save counted in; 0 never", "s", low=0)


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    activation_checkpointing: Literal["none", "full", "ops"] = knob(
        "none", "recompute in backward: nothing, whole units, or all but matrix products and attention"
    )
    activation_checkpointing_every: int = knob(1, "recompute in each n-th unit alone", "units", low=1)
    activation_budget: float = knob(
        1.0, "share of their activations that units keep; what is cheapest to make again is recomputed", low=0, high=1
    )
    activation_offload: bool = knob(False, "what units keep for backward, or checkpointing keeps of them, lies in host memory")
    cpu_offload: bool = knob(False, "parameters, gradients and optimizer rest in host memory")
    nvme: Literal["off", "optimizer", "all"] = knob(
        "off", "what rests in files under nvme_dir: the optimizer's states, or sharded parameters and gradients too"
    )
    nvme_dir: str = knob("", "a folder on a local disk, for --memory.nvme; no run leaves anything in it")


@dataclass(frozen=True, kw_only=True)
class SpeedSection:
    compile: Literal["auto", "true", "false"] = knob("auto", "torch.compile each unit; auto is on CUDA only")
    compile_cache: str = knob(
        "auto", "where compiled kernels are kept for the next start: auto is in your home's cache, off is torch's own, or DIR"
    )
    float8: Literal["off", "tensorwise", "rowwise"] = knob(
        "off", "matrix products within blocks in float8, by torchao; tensorwise also gathers weights in it"
    )
    float8_emulate: bool = knob(False, "round as float8 does on any hardware, slowly: to try it")
    prefetch_forward: int = knob(1, "units gathered ahead in forward", "units", low=1)
    prefetch_backward: int = knob(1, "units gathered ahead in backward", "units", low=1)


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    memory: bool = knob(False, "on the chosen steps, each rank's memory by kind over time, as a page under RUN/profile")
    trace: bool = knob(False, "on the chosen steps, each rank's trace for Perfetto, and a table of where the time goes")
    steps: str = knob("3:5", "the steps that are profiled, first:last; one number is one step", "steps")


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """Read by python -m fsdp.plan; a run keeps it to compare what was planned with what came."""

    gpus: int = knob(0, "ranks to plan for; 0 takes mesh.replicate × mesh.shard, or finds the fewest that fit", low=0)
    gpu: str = knob("h100", "a100, a100-40gb, h100, h100-pcie, h200, b200, l4, l40s or cpu")
    gpus_per_node: int = knob(0, "ranks that share a node's fast links; 0 takes the table's", low=0)
    memory_gib: float = knob(0.0, "memory of a device; 0 takes the table's", "GiB", low=0)
    memory_gb_s: float = knob(0.0, "memory rate of a device; 0 takes the table's", "GB/s", low=0)
    tflops: float = knob(0.0, "bf16 matrix products that the device reaches; 0 takes the table's", "TFLOP/s", low=0)
    link_gb_s: float = knob(0.0, "one way out of one GPU within a node; 0 takes the table's", "GB/s", low=0)
    node_link_gb_s: float = knob(0.0, "one way out of a node, all adapters; 0 takes the table's", "GB/s", low=0)
    margin: float = knob(0.03, "part of the memory that must stay free for a plan to fit", low=0, high=0.9)
    rank: int = knob(0, "whose memory is counted; rank 0 holds most where shards are uneven", low=0)
    rows: int = knob(12, "rows of the table", low=1)
    fix: bool = knob(False, "plan the given mesh and knobs alone, search nothing")
    write: str = knob("", "write the best as a recipe to this file")
    calibrate: bool = knob(False, "measure the device at hand under --plan.gpu's name and keep its rates")
    tokens: float = knob(0.0, "tokens (or samples) to train on: hours and GPU-hours; 0 leaves them out", low=0)
    store_gb_s: float = knob(2.0, "what the store of checkpoints takes from all ranks together", "GB/s", above=0)
    failures_per_gpu_year: float = knob(0.19, "failures that end a run, for each GPU and year; 0.19 is Llama 3's report", low=0)
    predicted_peak_gib: float = knob(0.0, "written by --plan.write: peak of the plan, compared at the run's end", "GiB", low=0)
    predicted_step_s: float = knob(0.0, "written by --plan.write: step time of the plan, compared at the run's end", "s", low=0)


@dataclass(frozen=True, kw_only=True)
class WatchSection:
    enabled: bool = knob(True, "heartbeats, and a small process a node that says which rank did not come, and why")
    hang_s: float = knob(
        -1.0, "end a run that stands still so long; -1 is 60 s or 30 of its own steps; 0 never judges stillness", "s", low=-1
    )
    late_percent: float = knob(7.0, "name a rank whose own work takes so much longer than the others'; 0 never", "%", low=0)
    divergence: int = knob(0, "compare replicas bit by bit each n steps; 0 never", "steps", low=0)
    unit_norms: int = knob(0, "write each unit's gradient norm each n steps; 0 never", "steps", low=0)
    spike: float = knob(10.0, "write the samples of a step whose gradient norm is so many times the usual; 0 never", low=0)
    deterministic: bool = knob(False, "a run that repeats to the bit; refuses what cannot")


@dataclass(frozen=True, kw_only=True)
class RaySection:
    address: str = knob("", "a Ray cluster to join (auto, host:port, ray://…); empty starts one here and ends it")
    num_workers: str = knob("2", "ranks; a range 2:8 is elastic", "workers")
    cpus_per_worker: float = knob(1.0, "CPUs that a worker asks for", "CPUs", above=0)
    gpus_per_worker: str = knob("auto", "GPUs that a worker asks for; auto is 1 where the cluster has any")
    max_failures: int = knob(3, "restarts of the worker group before the run fails; -1 never gives up", low=-1)


@dataclass(frozen=True, kw_only=True)
class Config:
    backend: Literal["torchrun", "ray"] = knob("torchrun", "who makes the ranks; torchrun also means Slurm or one process")
    run: RunSection = RunSection()
    train: TrainSection = TrainSection()
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    data: DataSection = DataSection()
    mesh: MeshSection = MeshSection()
    comm: CommSection = CommSection()
    precision: PrecisionSection = PrecisionSection()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    stop: StopSection = StopSection()
    memory: MemorySection = MemorySection()
    speed: SpeedSection = SpeedSection()
    profile: ProfileSection = ProfileSection()
    plan: PlanSection = PlanSection()
    watch: WatchSection = WatchSection()
    ray: RaySection = RaySection()


# ---------------------------------------------------------------- the fields, as data


@dataclass(frozen=True)
class FieldSpec:
    """One `--section.field`: what the parser and --help know of it."""

    name: str
    type: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def is_args(self) -> bool:
        return self.type is Args or typing.get_origin(self.type) is typing.get_origin(Args)


def _specs(cls: type, prefix: str = "") -> Iterator[FieldSpec]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            yield from _specs(typing.cast(type, kind), f"{prefix}{f.name}.")
        else:
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            yield FieldSpec(prefix + f.name, kind, default, f.metadata)


FIELDS: Mapping[str, FieldSpec] = types.MappingProxyType({spec.name: spec for spec in _specs(Config)})


# ---------------------------------------------------------------- reading


def parse_value(spec: FieldSpec, value: Any) -> Any:
    """A string from a flag, or a TOML value, as the field's type and within its range."""
    choices = typing.get_args(spec.type) if typing.get_origin(spec.type) is Literal else ()
    if choices:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text not in choices:
            raise ConfigError(f"--{spec.name} {value} is not one of {', '.join(choices)}.", _choice_hint(spec, text, choices))
        return text
    if spec.type is bool:
        return _parse_bool(spec, value)
    if spec.type is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    return _in_range(spec, _parse_number(spec, value))


def _choice_hint(spec: FieldSpec, text: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(text, choices, n=1, cutoff=0.6)
    return f"--{spec.name} {near[0] if near else spec.default}"


def _parse_bool(spec: FieldSpec, value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if str(value).lower() not in known:
        raise ConfigError(f"--{spec.name} {value} is not true or false.", f"--{spec.name} {str(spec.default).lower()}")
    return known[str(value).lower()]


def _parse_number(spec: FieldSpec, value: Any) -> float | int:
    kind = "a whole number" if spec.type is int else "a number"
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if spec.type is float:
            return number
        # "1e6" and "1_000" are whole numbers to a person; 2.5 is not.
        exact = (
            int(value) if isinstance(value, (int, str)) and str(value).lstrip("+-").replace("_", "").isdigit() else int(number)
        )
        if exact != number:
            raise ValueError
        return exact
    except (ValueError, OverflowError, TypeError):
        raise ConfigError(f"--{spec.name} {value} is not {kind}.", f"--{spec.name} {spec.default}") from None


def _in_range(spec: FieldSpec, number: float | int) -> float | int:
    low, high, above = spec.meta["low"], spec.meta["high"], spec.meta["above"]
    wrong = (
        not math.isfinite(number)
        or (low is not None and number < low)
        or (high is not None and number > high)
        or (above is not None and number <= above)
    )
    if wrong:
        bounds = [f"at least {low}"] * (low is not None) + [f"above {above}"] * (above is not None)
        bounds += [f"at most {high}"] * (high is not None)
        wanted = " and ".join(bounds) or "a number"
        raise ConfigError(f"--{spec.name} {number} is out of range: {wanted}.", f"--{spec.name} {spec.default}")
    return number


def parse_free_value(text: Any) -> Any:
    """`--model.args.NAME VALUE` has no declared type: a TOML literal where it is one, else a string."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    section, _, key = name.rpartition(".")
    if section in FIELDS and FIELDS[section].is_args:
        values[section] = {**values.get(section, {}), key: parse_free_value(value)}
    elif name in FIELDS and FIELDS[name].is_args:
        if not isinstance(value, Mapping):
            raise ConfigError(f"--{name} {value} has no name.", f"--{name}.NAME {value}")
        values[name] = {**values.get(name, {}), **value}
    elif name in FIELDS:
        values[name] = parse_value(FIELDS[name], value)
    else:
        raise ConfigError(f"--{name} is not a flag.", _unknown_hint(name))


def _unknown_hint(name: str) -> str:
    tails = {n.rpartition(".")[2]: n for n in FIELDS}
    near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6)
    tail = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.75)
    if near or tail:
        return f"did you mean --{near[0] if near else tails[tail[0]]}?"
    return "python train.py --help lists them all"


def read_recipe(path: str) -> dict[str, Any]:
    """A TOML file as flat `section.field` values; not yet typed."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror}).", "ls recipes/ shows those that ship") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.", "compare it with recipes/digits.toml") from None
    return dict(_flatten(tree))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, Mapping) and not (name in FIELDS and FIELDS[name].is_args):
            yield from _flatten(value, name + ".")
        else:
            yield name, value


def pair_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--name value` and `--name=value`; a flag of a bool field may stand alone."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word} is not a flag.", "flags are --section.field value; python train.py --help lists them")
        name, eq, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not eq:
            alone = not rest or rest[0].startswith("--")
            if alone and name in FIELDS and FIELDS[name].type is bool:
                value = "true"
            elif alone:
                known = name in FIELDS or name.rpartition(".")[0] in FIELDS or name == "config"
                raise (
                    ConfigError(f"--{name} has no value.", f"--{name} VALUE")
                    if known
                    else ConfigError(f"--{name} is not a flag.", _unknown_hint(name))
                )
            else:
                value = rest.pop(0)
        yield name, value


def load(argv: Sequence[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Defaults, then the recipe that --config names, then the flags in their order, then overrides; checked."""
    values: dict[str, Any] = {}
    flags = list(pair_flags(argv))
    for path in [value for name, value in flags if name == "config"]:
        for name, value in read_recipe(path).items():
            _set(values, name, value)
    for name, value in [*((n, v) for n, v in flags if n != "config"), *(overrides or {}).items()]:
        _set(values, name, value)
    config = _build(Config, values)
    check(config)
    return config


def _build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        name = prefix + f.name
        if dataclasses.is_dataclass(hints[f.name]):
            given[f.name] = _build(typing.cast(type, hints[f.name]), values, name + ".")
        elif name in values:
            given[f.name] = values[name]
    return cls(**given)


def replace(config: Config, **changes: Any) -> Config:
    """A copy with `section__field=value` changed; checked again."""
    flat = {**flatten(config), **{name.replace("__", "."): value for name, value in changes.items()}}
    new: Config = _build(Config, flat)
    check(new)
    return new


# ---------------------------------------------------------------- checks across fields


def check(config: Config) -> None:
    """Every contradiction between two fields that can be seen without knowing the number of ranks."""
    _check_profile(config)
    for one in (_check_train, _check_mesh, _check_precision, _check_checkpoint, _check_ray, _check_memory, _check_watch):
        one(config)
    for one in (_check_lora, _check_comm, _check_float8, _check_states, _check_ahead):
        one(config)


def _check_train(config: Config) -> None:
    train = config.train
    if train.steps and train.epochs:
        raise ConfigError(
            f"--train.steps {train.steps} and --train.epochs {train.epochs} both say how long.", "give one of the two"
        )
    if train.micro_batch > train.global_batch:
        raise ConfigError(
            f"--train.micro_batch {train.micro_batch} is more than --train.global_batch {train.global_batch}.",
            f"--train.micro_batch {train.global_batch}",
        )
    if train.steps and train.stop_after > train.steps:
        raise ConfigError(
            f"--train.stop_after {train.stop_after} lies behind --train.steps {train.steps}.",
            f"--train.stop_after {train.steps}",
        )
    if train.steps and config.optim.warmup_steps > train.steps:
        raise ConfigError(
            f"--optim.warmup_steps {config.optim.warmup_steps} is longer than --train.steps {train.steps}.",
            f"--optim.warmup_steps {train.steps // 20}",
        )


def reshard_policy(text: str) -> bool | int | Literal["step"]:
    """--mesh.reshard_after_forward as what it means."""
    if text in ("true", "false"):
        return text == "true"
    if text == "step":
        return "step"
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise ConfigError(
        f"--mesh.reshard_after_forward {text} is not true, false, step or a number of ranks.",
        "--mesh.reshard_after_forward true",
    )


def _check_mesh(config: Config) -> None:
    mesh = config.mesh
    policy = reshard_policy(mesh.reshard_after_forward)
    if mesh.strategy == "fsdp" and mesh.replicate > 1:
        raise ConfigError(
            f"--mesh.strategy fsdp has no replicas, but --mesh.replicate is {mesh.replicate}.", "--mesh.strategy hsdp"
        )
    if mesh.strategy == "ddp" and mesh.shard > 1:
        raise ConfigError(f"--mesh.strategy ddp has no shards, but --mesh.shard is {mesh.shard}.", "--mesh.strategy hsdp")
    if mesh.strategy == "ddp" and mesh.reshard_after_forward != "true":
        raise ConfigError(
            f"--mesh.reshard_after_forward {policy} says nothing under --mesh.strategy ddp: nothing is sharded.",
            "leave it out, or --mesh.strategy fsdp",
        )
    kind, _, what = mesh.wrap.partition(":")
    if kind not in ("auto", "root", "class", "size") or (kind in ("class", "size")) != bool(what):
        raise ConfigError(f"--mesh.wrap {mesh.wrap} is not auto, class:NAME, size:PARAMETERS or root.", "--mesh.wrap auto")
    if kind == "size" and not what.replace("_", "").isdigit():
        raise ConfigError(f"--mesh.wrap {mesh.wrap}: {what} is not a number of parameters.", "--mesh.wrap size:1000000")


def _check_precision(config: Config) -> None:
    precision = config.precision
    if precision.param == "fp64" and precision.master != "fp64":
        raise ConfigError(
            f"--precision.param fp64 computes finer than --precision.master {precision.master} keeps.",
            "--precision.master fp64",
        )
    if config.mesh.strategy == "ddp" and precision.reduce not in ("auto", precision.master):
        raise ConfigError(
            f"--precision.reduce {precision.reduce} under --mesh.strategy ddp: its gradients are reduced as they are kept.",
            f"--precision.reduce {precision.master}",
        )
    if config.mesh.strategy == "ddp" and precision.output != "auto":
        raise ConfigError(
            f"--precision.output {precision.output} says nothing under --mesh.strategy ddp: outputs stay as computed.",
            "--precision.output auto",
        )


def _check_watch(config: Config) -> None:
    """A run that repeats to the bit has the same ranks each time: sums over others round elsewhere."""
    low, high = worker_range(config.ray.num_workers)
    if config.watch.deterministic and config.backend == "ray" and low != high:
        raise ConfigError(
            f"--watch.deterministic cannot repeat on a changing number of ranks, --ray.num_workers {config.ray.num_workers}.",
            f"--ray.num_workers {high}",
        )
    if config.watch.divergence and config.mesh.strategy == "fsdp":
        raise ConfigError(
            f"--watch.divergence {config.watch.divergence}: --mesh.strategy fsdp has one replica, and nothing to compare.",
            "--watch.divergence 0, or --mesh.strategy hsdp",
        )
    hang = config.watch.hang_s
    if -1 < hang < 0:
        raise ConfigError(f"--watch.hang_s {hang:g} is neither -1 nor a time.", "--watch.hang_s -1")
    if hang > 0 and not config.watch.enabled:
        raise ConfigError(
            f"--watch.hang_s {hang:g} says nothing under --watch.enabled false: nobody looks.", "--watch.enabled true"
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and not checkpoint.keep_best_metric.lstrip("-"):
        raise ConfigError("--checkpoint.keep_best_metric is empty.", "--checkpoint.keep_best_metric eval_loss")
    if checkpoint.keep_best and not config.train.eval_every_steps and "eval" in checkpoint.keep_best_metric:
        raise ConfigError(
            f"--checkpoint.keep_best {checkpoint.keep_best} by {checkpoint.keep_best_metric} needs evaluations on the way.",
            f"--train.eval_every_steps {checkpoint.every_steps or 100}",
        )
    if checkpoint.resume not in ("auto", "never") and "://" not in checkpoint.resume and not Path(checkpoint.resume).exists():
        raise ConfigError(
            f"--checkpoint.resume {checkpoint.resume} does not exist.", "auto, never, or the folder of a checkpoint"
        )
    if config.model.weights and not Path(config.model.weights).exists():
        raise ConfigError(f"--model.weights {config.model.weights} does not exist.", "a .pt or .safetensors file, or a folder")


def _check_ray(config: Config) -> None:
    low, high = worker_range(config.ray.num_workers)
    if config.backend == "ray" and config.mesh.replicate and config.mesh.shard:
        size = config.mesh.replicate * config.mesh.shard
        if not low <= size <= high:
            raise ConfigError(
                f"--mesh.replicate {config.mesh.replicate} × --mesh.shard {config.mesh.shard} = {size} ranks, "
                f"but --ray.num_workers is {config.ray.num_workers}.",
                f"--ray.num_workers {size}",
            )
    gpus = config.ray.gpus_per_worker
    if gpus != "auto" and not gpus.replace(".", "", 1).isdigit():
        raise ConfigError(f"--ray.gpus_per_worker {gpus} is not auto or a number.", "--ray.gpus_per_worker auto")


def worker_range(text: str) -> tuple[int, int]:
    """--ray.num_workers: `4` is (4, 4), `2:8` is (2, 8)."""
    low, colon, high = text.partition(":")
    if not low.isdigit() or (colon and not high.isdigit()) or int(low) < 1 or (colon and int(high) < int(low)):
        raise ConfigError(f"--ray.num_workers {text} is not a number of workers or a range.", "--ray.num_workers 2 or 2:8")
    return int(low), int(high or low)


def profile_steps(text: str) -> tuple[int, int]:
    """--profile.steps: `3:5` is (3, 5), `4` is (4, 4)."""
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or not 1 <= int(first) <= int(last or first):
        raise ConfigError(f"--profile.steps {text} is not first:last, counted from 1.", "--profile.steps 3:5")
    return int(first), int(last or first)


def _check_profile(config: Config) -> None:
    profile, steps = config.profile, config.train.stop_after or config.train.steps
    first, _ = profile_steps(profile.steps)
    if profile.memory or profile.trace:
        if steps and first > steps:
            raise ConfigError(
                f"--profile.steps {profile.steps} begins after the last step, {steps}.", f"--profile.steps {max(1, steps - 1)}"
            )
    elif profile.steps != ProfileSection().steps:
        raise ConfigError(
            f"--profile.steps {profile.steps} says nothing alone.", "--profile.memory true, or --profile.trace true"
        )


def _check_memory(config: Config) -> None:
    if config.memory.cpu_offload and config.mesh.strategy == "ddp":
        raise ConfigError("--memory.cpu_offload moves shards, and --mesh.strategy ddp has none.", "--mesh.strategy fsdp")
    _check_activations(config)
    _check_nvme(config)


def _check_activations(config: Config) -> None:
    memory = config.memory
    if memory.activation_budget < 1 and memory.activation_checkpointing != "none":
        raise ConfigError(
            f"--memory.activation_budget {memory.activation_budget:g} and --memory.activation_checkpointing "
            f"{memory.activation_checkpointing} both say what is kept.",
            "--memory.activation_checkpointing none",
        )
    for flag, value, wrong in (
        ("memory.activation_checkpointing", "ops", memory.activation_checkpointing == "ops"),
        ("memory.activation_budget", f"{memory.activation_budget:g}", memory.activation_budget < 1),
    ):
        if memory.activation_offload and wrong:
            raise ConfigError(
                f"--memory.activation_offload true and --{flag} {value} do not go together: what the latter keeps, torch "
                "shows to no hook.",
                "--memory.activation_checkpointing full",
            )
    if memory.activation_checkpointing_every > 1 and memory.activation_checkpointing == "none":
        raise ConfigError(
            f"--memory.activation_checkpointing_every {memory.activation_checkpointing_every} says nothing where nothing "
            "is recomputed.",
            "--memory.activation_checkpointing full",
        )


def _check_nvme(config: Config) -> None:
    memory = config.memory
    if memory.nvme == "off" and memory.nvme_dir:
        raise ConfigError(f"--memory.nvme_dir {memory.nvme_dir} alone says nothing.", "--memory.nvme optimizer")
    if memory.nvme != "off" and not memory.nvme_dir:
        raise ConfigError(f"--memory.nvme {memory.nvme} has no folder to put files in.", "--memory.nvme_dir /tmp/nvme")
    if memory.nvme == "all" and config.mesh.strategy == "ddp":
        raise ConfigError("--memory.nvme all moves shards, and --mesh.strategy ddp has none.", "--memory.nvme optimizer")
    if memory.nvme == "optimizer" and config.optim.name == "sgd" and not config.optim.momentum:
        raise ConfigError("--memory.nvme optimizer: --optim.name sgd has no states without momentum.", "--memory.nvme off")


def _check_comm(config: Config) -> None:
    if config.optim.name == "sgd" and config.optim.fused == "true" and config.mesh.strategy != "ddp":
        raise ConfigError(
            f"--optim.fused true: torch fuses no SGD of sharded parameters, which --mesh.strategy {config.mesh.strategy} has.",
            "--optim.fused auto",
        )
    if config.mesh.strategy != "ddp":
        return
    for name in ("all_reduce_hook", "all_gather", "reduce_scatter", "divide_by"):
        if value := getattr(config.comm, name):
            raise ConfigError(f"--comm.{name} {value} is FSDP's, and --mesh.strategy ddp is not.", "--mesh.strategy fsdp")
    if config.mesh.accumulate == "shard":
        raise ConfigError(
            "--mesh.accumulate shard scatters gradients, and --mesh.strategy ddp has no shards.", "--mesh.accumulate every"
        )


def _check_float8(config: Config) -> None:
    speed, precision, reshard = config.speed, config.precision, config.mesh.reshard_after_forward
    if speed.float8 == "off":
        if speed.float8_emulate:
            raise ConfigError("--speed.float8_emulate true says nothing alone.", "--speed.float8 tensorwise")
        return
    for flag, value, wrong in (
        ("lora.rank", config.lora.rank, bool(config.lora.rank)),
        ("memory.cpu_offload", "true", config.memory.cpu_offload),
        ("memory.nvme", "all", config.memory.nvme == "all"),
        ("precision.master", "fp64", precision.master == "fp64"),
        ("precision.param", "fp16", precision.param == "fp16"),
        # torch gathers a wrapped weight again from all its shards alone
        ("mesh.reshard_after_forward", reshard, speed.float8 == "tensorwise" and reshard.isdigit() and int(reshard) > 1),
    ):
        if wrong:
            raise ConfigError(f"--speed.float8 {speed.float8} and --{flag} {value} do not go together.", "--speed.float8 off")


def _check_ahead(config: Config) -> None:
    """What looks ahead needs something to look ahead with."""
    for way in ("prefetch_forward", "prefetch_backward"):
        if config.mesh.strategy == "ddp" and (count := getattr(config.speed, way)) > 1:
            raise ConfigError(
                f"--speed.{way} {count} gathers ahead, and --mesh.strategy ddp gathers nothing.", f"--speed.{way} 1"
            )
    if not config.data.workers and config.data.prefetch != DataSection().prefetch:
        raise ConfigError(
            f"--data.prefetch {config.data.prefetch} is read by threads, and --data.workers is 0.", "--data.workers 1"
        )


def _check_states(config: Config) -> None:
    optim = config.optim
    if optim.state == "master":
        return
    for flag, value, wrong in (
        ("optim.name", "sgd", optim.name == "sgd"),
        ("optim.fused", "true", optim.fused == "true"),
        ("precision.master", "fp64", config.precision.master == "fp64"),
        ("memory.nvme", config.memory.nvme, optim.state == "8bit" and config.memory.nvme != "off"),
    ):
        if wrong:
            raise ConfigError(f"--optim.state {optim.state} and --{flag} {value} do not go together.", "--optim.state master")


def _check_lora(config: Config) -> None:
    lora, model = config.lora, config.model
    if not lora.rank and lora != LoraSection():
        field = next(f.name for f in dataclasses.fields(lora) if getattr(lora, f.name) != getattr(LoraSection(), f.name))
        raise ConfigError(f"--lora.{field} {getattr(lora, field)} says nothing without adapters.", "--lora.rank 8")
    if lora.rank and model.frozen:
        raise ConfigError(
            f"--model.frozen {model.frozen} says nothing beside --lora.rank {lora.rank}: adapters freeze the whole model.",
            "give one of the two",
        )


# ---------------------------------------------------------------- writing


def flatten(config: Config) -> dict[str, Any]:
    """`section.field` → value, for every field."""
    flat: dict[str, Any] = {}
    for name in FIELDS:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        flat[name] = value
    return flat


def to_toml(config: Config) -> str:
    """The resolved configuration as a recipe: --config gives the same Config back."""
    lines = [f"backend = {_toml(config.backend)}"]
    for section in dataclasses.fields(Config)[1:]:
        lines.append(f"\n[{section.name}]")
        part = getattr(config, section.name)
        values = [(f.name, getattr(part, f.name)) for f in dataclasses.fields(part)]
        lines += [f"{key} = {_toml(value)}" for key, value in values if not isinstance(value, Mapping)]
        for key, value in values:
            if isinstance(value, Mapping) and value:
                lines.append(f"\n[{section.name}.{key}]")
                lines += [f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # JSON's string escapes are TOML's, but for DEL, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(_toml(v) for v in value) + "]"


def config_hash(config: Config) -> str:
    """A short name of what is trained: equal for runs that differ only in where and how they are run."""
    elsewhere = (
        "backend",
        "run.dir",
        "run.log_every_steps",
        "run.wandb",
        "run.process_group_timeout_s",
        "train.stop_after",
        "data.workers",
        "data.prefetch",
        "data.to_device",
        "comm.divide_by",
    )
    watched = ("watch.enabled", "watch.hang_s", "watch.late_percent", "watch.divergence", "watch.unit_norms", "watch.spike")
    prefixes = ("mesh.", "ray.", "plan.", "checkpoint.", "stop.", "memory.", "speed.", "profile.", *watched)
    kept = {k: v for k, v in flatten(config).items() if k not in elsewhere and not k.startswith(prefixes)}
    kept["speed.float8"] = config.speed.float8
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def help_text(doc: str) -> str:
    """--help: every field with its type, default, unit and help."""
    lines = [
        doc.strip(),
        "",
        "flags (a recipe's [section] field is --section.field):",
        "  --config FILE",
        "      a recipe; flags go over it",
    ]
    for spec in FIELDS.values():
        unit = f" {spec.meta['unit']}" if spec.meta["unit"] else ""
        shown = str(spec.default).lower() if isinstance(spec.default, bool) else spec.default
        default = "" if spec.is_args else f" (default: {shown!s}{unit})" if shown != "" else " (default: empty)"
        suffix = ".NAME VALUE" if spec.is_args else f" {_type_name(spec)}"
        lines += [f"  --{spec.name}{suffix}", f"      {spec.meta['help']}{default}"]
    return "\n".join(lines)


def _type_name(spec: FieldSpec) -> str:
    if typing.get_origin(spec.type) is Literal:
        return "|".join(typing.get_args(spec.type))
    return {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}[spec.type]

"""The tree of sections: every knob of a run with its type, default, help, unit and range, as frozen
dataclasses.

Here live the declarations, and `knob`, in which a field is said once. Not here: how a value is read
(values.py, reading.py), what two fields may not say together (checks.py, checks_memory.py), what a field
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    dir: str = knob(
        "", "run directory; empty makes a new one under runs/. The same directory again resumes it"
    )
    seed: int = knob(0, "seed of weights, data order and dropout", low=0)
    process_group_timeout_s: float = knob(
        600.0, "a collective that waits longer than this fails", "s", above=0
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "where to compute; auto takes the GPUs where torch sees any"
    )
    log_every_steps: int = knob(
        0, "print a line each n steps; 0 chooses: 1 on CPU, 10 on CUDA", "steps", low=0
    )
    matmul_precision: Literal["highest", "high", "medium"] = knob(
        "high", "fp32 matrix products on CUDA: high is TF32"
    )
    wandb: str = knob("", "a Weights & Biases project that hears the numbers too; empty: none")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    steps: int = knob(0, "optimizer steps; 0 counts epochs instead", "steps", low=0)
    epochs: int = knob(
        0, "passes over the data; 0 counts steps; neither given is the data's own default", "epochs", low=0
    )
    stop_after: int = knob(
        0, "leave after this step with a checkpoint, the schedule untouched; 0 runs to the end", low=0
    )
    global_batch: int = knob(
        64, "samples an optimizer step, over all ranks and micro-batches", "samples", low=1
    )
    micro_batch: int = knob(
        0, "samples a rank takes at once; 0 takes the rank's whole share", "samples", low=0
    )
    clip_grad_norm: float = knob(1.0, "largest global gradient norm; 0 never clips", low=0)
    eval_every_steps: int = knob(0, "evaluate each n steps; 0 only at the end", "steps", low=0)
    eval_batch: int = knob(0, "samples a rank evaluates at once; 0 takes the micro-batch", "samples", low=0)
    eval_samples: int = knob(0, "held-out samples of an evaluation; 0 takes all", "samples", low=0)
    nonfinite: Literal["stop", "skip"] = knob(
        "stop", "a loss or gradient that is NaN or infinite: stop, or skip the update"
    )
    max_skipped: int = knob(
        10, "skipped updates in a row that are borne before the run stops", "steps", low=1
    )


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
    rank: int = knob(
        0, "width of the adapters that are trained in place of the model; 0 trains the model", low=0
    )
    alpha: float = knob(16.0, "an adapter's product is scaled by alpha over rank", above=0)
    targets: str = knob(
        "",
        "linear layers with an adapter: names or patterns, as in q_proj,v_proj; empty is all within blocks",
    )
    dropout: float = knob(0.0, "dropout of what goes into the adapters", low=0, high=0.999)

    @property
    def scale(self) -> float:
        return self.alpha / max(1, self.rank)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    name: str = knob(
        "digits",
        "digits, fashion_mnist, text, tokens, folder, synthetic, a FILE or FOLDER of yours, or package.module:factory",
    )
    dir: str = knob("", "where the data's files lie; empty takes the data's own place")
    seq_len: int = knob(256, "tokens a sample, for text and tokens", "tokens", low=1)
    args: Args = knob({}, "keyword arguments of the data set: --data.args.NAME VALUE")
    workers: int = knob(1, "threads a rank that read ahead; 0 reads in the step", "threads", low=0)
    skip_unreadable: int = knob(
        0,
        "samples that cannot be read and are replaced by the next, in the whole run; 0 stops at the first",
        "samples",
        low=0,
    )
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
        "true frees gathered parameters after forward (ZeRO-3) but for those that backward begins with, false keeps them to "
        "backward (ZeRO-2), step gathers once an optimizer step (like ZeRO-1), a number reshards to that many ranks",
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
    all_reduce_hook: str = knob(
        "", "package.module:function(gradient), run after each unit's reduction, in place"
    )
    all_gather: str = knob(
        "", "package.module:function(output, input, group, async_op) in place of FSDP's own, or a class"
    )
    reduce_scatter: str = knob(
        "", "package.module:function(output, input, group, op, async_op) in place of FSDP's, or a class"
    )
    divide_by: float = knob(
        0.0,
        "the reduction divides by this and the loss is multiplied by it: 1 only sums; 0 is the number of ranks",
        low=0,
    )


Precision = Literal["auto", "fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    master: Literal["fp32", "fp64"] = knob("fp32", "what parameters and optimizer states are kept in")
    param: Precision = knob(
        "auto", "what forward and backward compute in; auto is bf16 on CUDA, master on CPU"
    )
    reduce: Precision = knob("auto", "what gradients are reduced in; auto is the master's")
    output: Precision = knob("auto", "what the model's output is cast to; auto leaves it as computed")
    loss_scale: float = knob(
        65536.0, "fp16's first loss scale; halves on overflow, doubles after 2000 good steps", above=0
    )


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
        "master",
        "what Adam's moments are kept in: the master's dtype, bf16 rounded at random, or 8 bits and a scale a block",
    )
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine", "how the rate falls after warm-up")
    warmup_steps: int = knob(-1, "steps from 0 to the peak; -1 is a twentieth of the run", "steps", low=-1)
    min_lr_ratio: float = knob(0.1, "the last rate over the peak", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    dir: str = knob(
        "", "where checkpoints go; empty is RUN/checkpoints; s3://bucket/prefix is an object store"
    )
    every_steps: int = knob(100, "save each n steps; 0 never", "steps", low=0)
    every_minutes: float = knob(0.0, "save when this long since the last; 0 never", "min", low=0)
    resume: str = knob(
        "auto", "auto goes on from the newest whole one, never starts anew, or a PATH to start from"
    )
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
    deadline_s: float = knob(
        0.0, "stop this long after the start, the last save counted in; 0 never", "s", low=0
    )


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    activation_checkpointing: Literal["none", "full", "ops"] = knob(
        "none", "recompute in backward: nothing, whole units, or all but matrix products and attention"
    )
    activation_checkpointing_every: int = knob(1, "recompute in each n-th unit alone", "units", low=1)
    activation_budget: float = knob(
        1.0,
        "share of their activations that units keep; what is cheapest to make again is recomputed",
        low=0,
        high=1,
    )
    activation_offload: bool = knob(
        False, "what units keep for backward, or checkpointing keeps of them, lies in host memory"
    )
    cpu_offload: bool = knob(False, "parameters, gradients and optimizer rest in host memory")
    nvme: Literal["off", "optimizer", "all"] = knob(
        "off",
        "what rests in files under nvme_dir: the optimizer's states, or sharded parameters and gradients too",
    )
    nvme_dir: str = knob("", "a folder on a local disk, for --memory.nvme; no run leaves anything in it")


@dataclass(frozen=True, kw_only=True)
class SpeedSection:
    compile: Literal["auto", "true", "false"] = knob("auto", "torch.compile each unit; auto is on CUDA only")
    compile_cache: str = knob(
        "auto",
        "where compiled kernels are kept for the next start: auto is a folder of the node, filled from and copied to "
        "your home's cache; off is torch's own, or DIR",
    )
    float8: Literal["off", "tensorwise", "rowwise"] = knob(
        "off", "matrix products within blocks in float8, by torchao; tensorwise also gathers weights in it"
    )
    float8_emulate: bool = knob(False, "round as float8 does on any hardware, slowly: to try it")
    prefetch_forward: int = knob(1, "units gathered ahead in forward", "units", low=1)
    prefetch_backward: int = knob(1, "units gathered ahead in backward", "units", low=1)


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    memory: bool = knob(
        False, "on the chosen steps, each rank's memory by kind over time, as a page under RUN/profile"
    )
    trace: bool = knob(
        False, "on the chosen steps, each rank's trace for Perfetto, and a table of where the time goes"
    )
    steps: str = knob("3:5", "the steps that are profiled, first:last; one number is one step", "steps")


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """Read by python -m fsdp.plan; a run keeps it to compare what was planned with what came."""

    gpus: int = knob(
        0, "ranks to plan for; 0 takes mesh.replicate × mesh.shard, or finds the fewest that fit", low=0
    )
    gpu: str = knob("h100", "a100, a100-40gb, h100, h100-pcie, h200, b200, l4, l40s or cpu")
    gpus_per_node: int = knob(0, "ranks that share a node's fast links; 0 takes the table's", low=0)
    memory_gib: float = knob(0.0, "memory of a device; 0 takes the table's", "GiB", low=0)
    memory_gb_s: float = knob(0.0, "memory rate of a device; 0 takes the table's", "GB/s", low=0)
    tflops: float = knob(
        0.0, "bf16 matrix products that the device reaches; 0 takes the table's", "TFLOP/s", low=0
    )
    link_gb_s: float = knob(0.0, "one way out of one GPU within a node; 0 takes the table's", "GB/s", low=0)
    node_link_gb_s: float = knob(
        0.0, "one way out of a node, all adapters; 0 takes the table's", "GB/s", low=0
    )
    margin: float = knob(0.03, "part of the memory that must stay free for a plan to fit", low=0, high=0.9)
    rank: int = knob(0, "whose memory is counted; rank 0 holds most where shards are uneven", low=0)
    rows: int = knob(12, "rows of the table", low=1)
    fix: bool = knob(False, "plan the given mesh and knobs alone, search nothing")
    write: str = knob("", "write the best as a recipe to this file")
    calibrate: bool = knob(False, "measure the device at hand under --plan.gpu's name and keep its rates")
    tokens: float = knob(
        0.0, "tokens (or samples) to train on: hours and GPU-hours; 0 leaves them out", low=0
    )
    store_gb_s: float = knob(
        2.0, "what the store of checkpoints takes from all ranks together", "GB/s", above=0
    )
    failures_per_gpu_year: float = knob(
        0.19, "failures that end a run, for each GPU and year; 0.19 is Llama 3's report", low=0
    )
    predicted_peak_gib: float = knob(
        0.0, "written by --plan.write: peak of the plan, compared at the run's end", "GiB", low=0
    )
    predicted_step_s: float = knob(
        0.0, "written by --plan.write: step time of the plan, compared at the run's end", "s", low=0
    )


@dataclass(frozen=True, kw_only=True)
class WatchSection:
    enabled: bool = knob(
        True, "heartbeats, and a small process a node that says which rank did not come, and why"
    )
    hang_s: float = knob(
        -1.0,
        "end a run that stands still so long; -1 is 60 s or 30 of its own steps; 0 never judges stillness",
        "s",
        low=-1,
    )
    late_percent: float = knob(
        7.0, "name a rank whose own work takes so much longer than the others'; 0 never", "%", low=0
    )
    divergence: int = knob(0, "compare replicas bit by bit each n steps; 0 never", "steps", low=0)
    unit_norms: int = knob(0, "write each unit's gradient norm each n steps; 0 never", "steps", low=0)
    spike: float = knob(
        10.0, "write the samples of a step whose gradient norm is so many times the usual; 0 never", low=0
    )
    deterministic: bool = knob(False, "a run that repeats to the bit; refuses what cannot")


@dataclass(frozen=True, kw_only=True)
class RaySection:
    address: str = knob(
        "", "a Ray cluster to join (auto, host:port, ray://…); empty starts one here and ends it"
    )
    num_workers: str = knob("2", "ranks; a range 2:8 is elastic", "workers")
    cpus_per_worker: float = knob(1.0, "CPUs that a worker asks for", "CPUs", above=0)
    gpus_per_worker: str = knob("auto", "GPUs that a worker asks for; auto is 1 where the cluster has any")
    max_failures: int = knob(
        3, "restarts of the worker group before the run fails; -1 never gives up", low=-1
    )


LAUNCHERS_OWN = ("backend", "ray")
"""The field and the section that say how a run is started. RUN/config.toml has neither: any launcher
continues a run.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    backend: Literal["torchrun", "ray"] = knob(
        "torchrun", "who makes the ranks; torchrun also means Slurm or one process"
    )
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

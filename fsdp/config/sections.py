"""The configuration tree: every field with its type, default, help, unit and range, as frozen dataclasses.

The only place where a field is declared, and where it is marked as common. Then the fields as data, and
structured texts that some of them hold (`2:8`, `step`). Not here: how a value is read (read.py), which fields
conflict (checks.py), what a field does.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp.base.errors import ConfigError
from fsdp.base.text import parse_count

Args = Mapping[str, Any]
"""Free keyword arguments (`--model.args.width 512`), checked by the code that receives them."""
Texts = Mapping[str, str]
"""Values by name that stay as typed (`--ray.env OMP_NUM_THREADS=4`)."""


def knob(
    default: Any,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    common: bool = False,
    names: tuple[str, ...] = (),
) -> Any:
    """A field with its unit and range. `names`: values of a text field beside package.module:NAME.

    The docstring below a field is its help: --help prints the first paragraph of `common` fields, --help-all
    the whole of every field.
    """
    bounds = {"low": low, "high": high, "above": above, "below": below}
    metadata = {**bounds, "unit": unit, "common": common, "names": names}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """the run directory, the device, logging"""

    dir: str = knob("", common=True)
    """run directory, a folder; the same one resumes the run

    Empty creates a new directory under runs/.
    """
    seed: int = knob(0, low=0, high=2**64 - 1, common=True)
    """seed of weights, data order and dropout"""
    process_group_timeout_s: float = knob(600.0, unit="s", above=0)
    """time after which a waiting collective fails

    Raise it where a rank legitimately waits longer, as for a very large checkpoint.
    """
    device: Literal["auto", "cpu", "cuda"] = knob("auto", common=True)
    """device to train on; auto: CUDA if available, else CPU"""
    allocator: str = knob("expandable_segments:True")
    """PYTORCH_ALLOC_CONF of a run on CUDA where the environment has none; empty: torch's default

    Expandable segments leave fewer unusable gaps between blocks of different sizes.
    """
    log_every_steps: int = knob(0, unit="steps", low=0, common=True)
    """steps between log lines; 0: 1 on CPU, 10 on CUDA"""
    matmul_precision: Literal["highest", "high", "medium"] = knob("high")
    """precision of fp32 matrix products on CUDA; high is TF32

    As torch.set_float32_matmul_precision. highest computes in full fp32, more slowly.
    """
    wandb: str = knob("", common=True)
    """Weights & Biases project to log to; empty: none"""
    mlflow: str = knob("", common=True)
    """MLflow experiment to log to; empty: none

    The server is MLFLOW_TRACKING_URI.
    """
    sinks: str = knob("")
    """package.module:Class, or several, that receive each step's numbers on rank 0

    Class(*, run_dir, config, from_step) has a method scalars(step, values), and may have close().
    """


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """length, batch, gradients, evaluation"""

    steps: int = knob(0, unit="steps", low=0, common=True)
    """optimizer steps; 0: as --train.epochs

    If neither is given, the data set's default length is used.
    """
    epochs: int = knob(0, unit="epochs", low=0, common=True)
    """passes over the data; 0: as --train.steps

    If neither is given, the data set's default length is used.
    """
    stop_after: int = knob(0, low=0)
    """step after which to save a checkpoint and stop; 0: run to the end

    The learning-rate schedule is that of the whole run. Use it to split a run into parts.
    """
    global_batch: int = knob(64, unit="samples", low=1, common=True)
    """samples per optimizer step, over all ranks

    All micro-batches included. It is the same on any number of ranks.
    """
    micro_batch: int = knob(0, unit="samples", low=0, common=True)
    """samples per rank and forward; 0: the rank's share

    Lower it to save memory: gradients of several micro-batches are accumulated.
    """
    loss: str = knob("")
    """package.module:function(output, batch) in place of cross entropy or the model's own loss

    It returns a loss for each sample or token, and optionally their weights. Each counts the same on any
    number of ranks and micro-batches.
    """
    z_loss: float = knob(0.0, low=0)
    """weight of the squared log of the logits' sum of exponentials; 0: none

    Added to the loss of each target in training, so that logits do not drift. 1e-4 is common.
    """
    clip_grad_norm: float = knob(1.0, low=0, common=True)
    """clip gradients to this global norm; 0: no clipping"""
    eval_every_steps: int = knob(0, unit="steps", low=0, common=True)
    """steps between evaluations; 0: only at the end"""
    eval_every_epochs: float = knob(0.0, unit="epochs", low=0, common=True)
    """epochs between evaluations, fractions allowed; 0: none

    Beside --train.eval_every_steps. The first step at which the epoch, or the part, is complete.
    """
    eval_batch: int = knob(0, unit="samples", low=0)
    """samples per rank and evaluation batch; 0: the micro-batch"""
    eval_samples: int = knob(0, unit="samples", low=0)
    """held-out samples per evaluation; 0: all"""
    eval_answers: int = knob(2, unit="questions", low=0)
    """held-out questions answered at each evaluation, of conversations or prompts; 0: none

    Greedily, beside their references: in the log, RUN/answers.jsonl, the report and the trackers. At most
    128 tokens each, 30 s in all.
    """
    evaluate_only: bool = knob(False, common=True)
    """evaluate --checkpoint.resume PATH, --model.weights, or the weights of hf:FOLDER, then exit

    Nothing is trained or saved; optimizer states are not read. --run.dir is a directory of its own.
    """
    nonfinite: Literal["stop", "skip"] = knob("stop")
    """action on a NaN or infinite loss or gradient: stop the run, or skip the update"""
    max_skipped: int = knob(10, unit="steps", low=1)
    """consecutive skipped updates allowed

    For --train.nonfinite skip: one more stops the run.
    """


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """the model and its initial weights"""

    name: str = knob("vit", common=True)
    """vit, transformer, mlp, hf:FOLDER or package.module:factory

    hf:FOLDER is a folder of transformers' save_pretrained, with its weights; hf:ORG/NAME is one in the
    hub's cache. The factory returns any nn.Module.
    """
    preset: str = knob("", common=True)
    """named size of that model; empty: its default"""
    args: Args = knob({}, common=True)
    """keyword arguments of the model, over the preset's"""
    init: Literal["shard", "broadcast"] = knob("shard")
    """how initial weights are made: each rank draws its own shard, or rank 0 draws and broadcasts

    Both give the same bits.
    """
    weights: str = knob("", common=True)
    """torch or safetensors file or folder to start from

    A state dict, in one file or in several. Empty draws weights from the seed, or reads those of hf:FOLDER;
    none: random weights for hf:FOLDER too.
    """
    frozen: str = knob("")
    """parameters that are not trained: names or patterns, as in encoder.*,*.bias"""


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """low-rank adapters, trained in place of the model"""

    rank: int = knob(0, low=0, common=True)
    """rank of the LoRA adapters; 0: train the whole model"""
    alpha: float = knob(16.0, above=0)
    """scale of the adapters: their product is multiplied by alpha / rank"""
    targets: str = knob("")
    """linear layers with an adapter: names or patterns, as in q_proj,v_proj

    Empty selects every linear layer within the blocks.
    """
    dropout: float = knob(0.0, low=0, high=0.999)
    """dropout on the adapters' input"""

    @property
    def scale(self) -> float:
        return self.alpha / max(1, self.rank)


def default_label(place: str) -> str:
    """The last part of a path or of package.module:factory, for use in the names of metrics."""
    last = Path(place.rpartition(":")[2] if "/" not in place else place).name or place
    return re.sub(r"[^\w.+-]+", "-", last).strip("-") or "source"


@dataclass(frozen=True, kw_only=True, repr=False)
class MixedSource:
    """One source of a mixture, a table [[data.sources]] of a recipe; 0 is a number that is not given."""

    name: str
    dir: str = ""
    tokenizer: str = ""
    validation: str = ""
    args: Args = dataclasses.field(default_factory=dict)
    label: str = ""
    weight: float = 0
    epochs: float = 0

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", default_label(self.dir or self.name))

    def __repr__(self) -> str:
        """The given fields, for the report; config_hash reads it too, so none of them is left out."""
        given = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "{" + ", ".join(f"{name} = {value!r}" for name, value in given if value) + "}"


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """the data set and how it is read"""

    name: str = knob("", common=True)
    """digits, fashion_mnist, text, tokens, documents, folder, synthetic, a FILE, FOLDER or 'PATTERN',
    hf:NAME, or package.module:factory; empty: digits, for --model.name vit and mlp alone
    """
    dir: str = knob("", common=True)
    """folder of the data; empty: the data set's default"""
    tokenizer: str = knob("", common=True)
    """tokenizer of documents: folder, tokenizer.json, cached id; empty: an hf: model's, or bytes

    bytes: those of UTF-8. Read offline; code that a tokenizer brings is never run.
    """
    seq_len: int = knob(256, unit="tokens", low=1, common=True)
    """tokens per sample, for text, tokens and documents"""
    args: Args = knob({}, common=True)
    """keyword arguments; --data.name X --help lists them"""
    validation: str = knob("", common=True)
    """held-out FILE, or a share as in 0.05

    A file, folder or pattern is read as those of --data.name, and evaluated whole; of hf:NAME it may be
    another split. Empty: the files named after another split, else a part of the data. With
    --train.evaluate_only a path that the command line has as --data.name or --data.dir is evaluated whole.
    """
    sources: tuple[MixedSource, ...] = knob((), common=True)
    """data sets mixed into one order: FILE.toml with [[data.sources]]

    A recipe holds these tables itself. none: --data.name alone.
    """
    workers: int = knob(1, unit="threads", low=0, common=True)
    """reader threads per rank; 0: read within the step

    Raise it where the step waits for data.
    """
    prefetch: int = knob(2, unit="steps", low=1)
    """steps read ahead; at least one per worker"""

    @property
    def names(self) -> tuple[str, ...]:
        """Every --data.name that the run reads: those of its sources, if it mixes some."""
        return tuple(source.name for source in self.sources) or (self.name,)


@dataclass(frozen=True, kw_only=True)
class MeshSection:
    """how parameters are divided among ranks"""

    strategy: Literal["auto", "fsdp", "hsdp", "ddp"] = knob("auto", common=True)
    """fsdp, hsdp or ddp; auto: hsdp if several nodes

    auto is fsdp on one node, and where each node has one rank. fsdp shards over all ranks. hsdp shards
    within a node and replicates across nodes. ddp replicates.
    """
    replicate: int = knob(0, unit="ranks", low=0, common=True)
    """size of mesh axis dp_replicate; 0: derived"""
    shard: int = knob(0, unit="ranks", low=0, common=True)
    """data ranks of one copy of the weights; 0: derived"""
    context: int = knob(1, unit="ranks", low=1)
    """ranks that divide each row of tokens (Ulysses)

    Each holds a part of every row; attention exchanges heads for positions. Weights are sharded over these
    ranks too. It divides the query heads. docs/strategies.md
    """
    tensor: int = knob(1, unit="ranks", low=1)
    """ranks that divide each layer's products

    By the model's own plan. It divides heads, the vocabulary and every width that the plan divides.
    """
    expert: int = knob(1, unit="ranks", low=1)
    """ranks that divide the experts of a mixture

    It divides the ranks of one copy of the weights and the number of experts: no further ranks are needed.
    """
    reshard_after_forward: str = knob("auto", common=True)
    """free gathered parameters after forward

    auto, true, false, step or a number. true frees all but those with which backward begins (ZeRO-3).
    false keeps them until backward (ZeRO-2): faster, more memory. step gathers once per optimizer step
    (like ZeRO-1). A number reshards to that many ranks. auto is false where dp_shard is 1 (nothing is
    sent), nothing is offloaded, and all of them take under a tenth of the device's memory; else true.
    """
    accumulate: Literal["last", "shard", "every"] = knob("last")
    """when gradients of micro-batches are reduced

    last reduces once, at the last micro-batch. shard reduce-scatters at each and all-reduces at the last
    (less memory). every does both at each.
    """
    wrap: str = knob("auto")
    """communication units: auto, every:N, class:NAME[,NAME], size:PARAMETERS, or root

    auto takes the units that the model names, else its repeated blocks. every:2 gathers two of those
    blocks together.
    """
    unsharded: str = knob("")
    """parameters kept whole on each rank: names or patterns, as in *.norm.*

    For small layers. Their gradients are averaged in one all-reduce; they compute in the master dtype.
    """


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """hooks for FSDP's collectives"""

    all_reduce_hook: str = knob("")
    """package.module:function(gradient), run in place after each unit's reduction"""
    all_gather: str = knob("")
    """package.module:function(output, input, group, async_op), or a class, in place of FSDP's
    all-gather
    """
    reduce_scatter: str = knob("")
    """package.module:function(output, input, group, op, async_op), or a class, in place of FSDP's
    reduce-scatter
    """


Precision = Literal["auto", "fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """dtypes of parameters, computation and reduction"""

    master: Literal["fp32", "fp64", "bf16"] = knob("fp32")
    """dtype of stored parameters and optimizer states

    bf16 halves parameters, gradients and Adam's moments; updates are computed in fp32 and rounded
    stochastically.
    """
    frozen: Literal["auto", "bf16"] = knob("auto")
    """dtype of stored parameters that are not trained; auto: the master's

    bf16 halves a frozen model under adapters. Trained parameters and their states keep
    --precision.master.
    """
    param: Precision = knob("auto", common=True)
    """dtype of computation; auto: bf16 on CUDA, else master"""
    reduce: Precision = knob("auto")
    """dtype of the gradient reduction; auto: the master's, fp32 for bf16"""
    output: Precision = knob("auto")
    """dtype that the model's output is cast to; auto: as computed"""
    loss_scale: float = knob(65536.0, above=0)
    """initial loss scale of fp16

    It halves on overflow and doubles after 2000 finite steps.
    """


OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
DECAYING = ("adamw", "muon")
ADAMS = ("adamw", "adam")
"""Those whose moments may be stored in bf16 or 8 bits, and whose update rounds bf16 masters."""
MOMENTS = {"sgd": ("momentum_buffer",), **dict.fromkeys((*ADAMS, "muon"), ("exp_avg", "exp_avg_sq"))}
"""States of their parameter's size, as they are named in `state`; of Muon those of AdamW's parameters."""
SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """optimizer and learning-rate schedule"""

    name: str = knob("adamw", common=True, names=OPTIMIZERS)
    """adamw, adam, sgd, muon or package.module:factory

    muon updates the matrices inside repeated blocks; AdamW updates the other parameters.
    factory(named_parameters, *, lr, betas, weight_decay) returns a torch.optim.Optimizer.
    """
    lr: float = knob(5e-4, above=0, common=True)
    """peak learning rate"""
    beta1: float = knob(0.9, low=0, below=1)
    """Adam: decay rate of the first moment"""
    beta2: float = knob(0.95, low=0, below=1)
    """Adam: decay rate of the second moment"""
    eps: float = knob(1e-8, above=0)
    """Adam: term added to the denominator"""
    weight_decay: float = knob(0.1, low=0, common=True)
    """weight decay of matrices

    Vectors and scalars (biases, norms) never decay.
    """
    momentum: float = knob(0.9, low=0, high=1)
    """SGD: momentum"""
    muon_lr: float = knob(0.0, low=0)
    """Muon: peak rate of its matrices; 0: --optim.lr"""
    muon_momentum: float = knob(0.95, low=0, high=1)
    """Muon: momentum, Nesterov's"""
    muon_parameters: str = knob("")
    """Muon: its matrices, by names or patterns, as in *.attention.*; empty: those inside repeated
    blocks

    Without embeddings.
    """
    fused: Literal["auto", "true", "false"] = knob("auto")
    """use one fused kernel for the update; auto: where torch has one"""
    state: Literal["master", "bf16", "8bit"] = knob("master")
    """storage of Adam's moments: the master dtype, bf16, or 8 bits

    bf16 rounds stochastically; 8bit keeps a scale per block. Both save memory.
    """
    ema: float = knob(0.0, low=0, below=1)
    """decay of a moving average of the weights, as in 0.999; 0: none

    Saved, evaluated beside the weights as eval_ema_loss, and exported to full_model_ema/.
    """
    schedule: str = knob("cosine", common=True, names=SCHEDULES)
    """cosine, linear, constant, wsd or package.module:function

    After the warm-up, cosine and linear decay to the end, wsd (warm-up, stable, decay) over its last
    part. function(step, total_steps, settings) returns the factor of --optim.lr, warm-up included;
    settings are the fields of this section.
    """
    decay_share: float = knob(0.2, above=0, high=1)
    """wsd: part of the run in which the rate decays, linearly"""
    warmup_steps: int = knob(-1, unit="steps", low=-1, common=True)
    """steps up to the peak rate; -1: a twentieth of the run"""
    min_lr_ratio: float = knob(0.1, low=0, high=1)
    """final learning rate, as a fraction of the peak"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """saving, resuming, exporting"""

    dir: str = knob("", common=True)
    """folder or s3://bucket/prefix; empty: RUN/checkpoints"""
    local_dir: str = knob("")
    """folder on each node's own disk: saves are sealed there, then copied to dir behind the steps

    A start copies what is only there, and reads what is there. It needs space for this node's part of
    three checkpoints. Empty: saves go to dir.
    """
    every_steps: int = knob(100, unit="steps", low=0, common=True)
    """steps between checkpoints; 0: none"""
    every_minutes: float = knob(0.0, unit="min", low=0)
    """minutes between checkpoints; 0: none

    Counted from the last checkpoint, beside --checkpoint.every_steps.
    """
    every_epochs: float = knob(0.0, unit="epochs", low=0, common=True)
    """epochs between checkpoints, fractions allowed; 0: none

    Beside --checkpoint.every_steps, which 0 turns off. The first step at which the epoch, or the part, is
    complete.
    """
    resume: str = knob("auto", common=True)
    """auto, never, or the PATH of a checkpoint

    auto resumes from the newest valid checkpoint. never starts anew. PATH is the folder of a checkpoint
    to start from.
    """
    mode: Literal["async", "blocking"] = knob("async")
    """write in the background while training continues, or block until written"""
    keep_last: int = knob(3, low=0, common=True)
    """newest checkpoints kept; 0: all"""
    keep_every_steps: int = knob(0, unit="steps", low=0)
    """also keep checkpoints of steps that are a multiple of N; 0: none"""
    keep_best: int = knob(0, low=0)
    """also keep the N best by keep_best_metric; 0: none"""
    keep_best_metric: str = knob("eval_loss")
    """metric that ranks checkpoints; a leading - means larger is better"""
    verify: bool = knob(True)
    """compare digests of the loaded tensors

    Sizes are checked in any case.
    """
    export: bool = knob(True, common=True)
    """write full_model/ at the end of the run"""
    export_format: Literal["auto", "torch", "safetensors", "both", "hf"] = knob("auto")
    """format of the export; auto: torch

    hf is a folder for from_pretrained: of a transformer as a class of Llama's family. It is auto for
    weights of hf:FOLDER, and for a transformer that started from such a folder.
    """
    export_dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = knob("auto")
    """dtype of the export; auto: the stored one, or that of hf:FOLDER"""


@dataclass(frozen=True, kw_only=True)
class StopSection:
    """stopping early, with a checkpoint"""

    deadline_s: float = knob(0.0, unit="s", low=0)
    """save and stop this long after the start; 0: never

    The time of the last save is included.
    """


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """saving device memory"""

    activation_checkpointing: Literal["none", "full", "ops"] = knob("none", common=True)
    """recompute in backward: none, full (whole units) or ops

    ops recomputes all but matrix products and attention. Turn it on when activations do not fit.
    """
    activation_checkpointing_every: int = knob(1, unit="units", low=1)
    """recompute only every N-th unit"""
    activation_budget: float = knob(1.0, low=0, high=1)
    """fraction of their activations that units keep

    The rest, cheapest to recompute first, is recomputed in backward.
    """
    activation_offload: bool = knob(False)
    """keep activations saved for backward in host memory

    With --memory.activation_checkpointing full: the units' inputs.
    """
    loss_chunk: int = knob(0, unit="tokens", low=0, common=True)
    """compute output layer and loss in chunks of this many tokens; 0: all at once

    The output layer's gradient is computed in the forward and summed in at least fp32. 1024 suits
    vocabularies from 32,000.
    """
    cpu_offload: bool = knob(False, common=True)
    """keep parameters, gradients, states in host memory"""
    optimizer_offload: bool = knob(False)
    """keep optimizer states alone in host memory

    The update copies them to the device part by part and back.
    """
    nvme: Literal["off", "optimizer", "all"] = knob("off")
    """keep optimizer states in files under nvme_dir; all: sharded parameters and gradients too"""
    nvme_dir: str = knob("")
    """folder on a local disk for --memory.nvme

    No file remains after the run, even if it is killed.
    """


@dataclass(frozen=True, kw_only=True)
class SpeedSection:
    """compilation, float8, prefetching"""

    compile: Literal["auto", "true", "false"] = knob("auto", common=True)
    """torch.compile each unit; auto: on CUDA, if Triton and a C compiler are there"""
    float8: Literal["off", "tensorwise", "rowwise"] = knob("off", common=True)
    """float8 matrix products: off, tensorwise or rowwise

    In the blocks' linear layers, by torchao, on compute capability 8.9, for rowwise 9.0. tensorwise also
    gathers weights in float8.
    """
    float8_emulate: bool = knob(False)
    """emulate float8 rounding on any hardware, slowly

    For trying --speed.float8.
    """
    attention: Literal["auto", "flash", "fa3", "fa4", "cudnn", "efficient", "math"] = knob("auto")
    """kernel of scaled_dot_product_attention: auto, flash, fa3, fa4, cudnn, efficient or math

    auto is torch's choice for each call. fa3 and fa4 put FlashAttention 3 or 4 of their packages in
    flash's place. A named kernel that does not fit the model ends the run.
    """
    prefetch_forward: int = knob(1, unit="units", low=1)
    """units gathered ahead in forward"""
    prefetch_backward: int = knob(1, unit="units", low=1)
    """units gathered ahead in backward"""


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """memory and time of chosen steps"""

    memory: bool = knob(False, common=True)
    """record memory by kind over time, into RUN/profile

    One HTML page per rank, for the steps of --profile.steps.
    """
    trace: bool = knob(False, common=True)
    """record a Perfetto trace, into RUN/profile

    One trace per rank, and a table of where the time goes, for the steps of --profile.steps.
    """
    steps: str = knob("3:5", unit="steps")
    """steps to profile, FIRST:LAST; one number is one step"""


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """read by python -m fsdp.plan; a run keeps it to compare the plan with what was measured"""

    gpus: int = knob(0, unit="ranks", low=0)
    """ranks to plan for; 0: mesh.replicate × mesh.shard, or the fewest that fit"""
    gpu: str = knob("h100")
    """a100, a100-40gb, h100, h100-pcie, h200, b200, l4, l40s, unmeasured gh200, gb200, b300, mi300x,
    mi250x, or cpu
    """
    gpus_per_node: int = knob(0, low=0)
    """ranks that share a node's fast links; 0: from the table"""
    memory_gib: float = knob(0.0, unit="GiB", low=0)
    """memory of a device; 0: from the table"""
    memory_gb_s: float = knob(0.0, unit="GB/s", low=0)
    """memory bandwidth of a device; 0: from the table"""
    tflops: float = knob(0.0, unit="TFLOP/s", low=0)
    """attained rate of bf16 matrix products; 0: from the table"""
    link_gb_s: float = knob(0.0, unit="GB/s", low=0)
    """one-way bandwidth of a GPU within a node; 0: from the table"""
    node_link_gb_s: float = knob(0.0, unit="GB/s", low=0)
    """one-way bandwidth of a node, all adapters; 0: from the table"""
    margin: float = knob(0.03, low=0, high=0.9)
    """fraction of the memory that a plan must leave free"""
    fix: bool = knob(False)
    """plan the given mesh and flags only, without a search"""
    write: str = knob("")
    """file to write the best plan to, as a recipe"""
    predicted_peak_gib: float = knob(0.0, unit="GiB", low=0)
    """peak memory of the plan

    Written by --plan.write and compared at the end of the run.
    """
    predicted_step_s: float = knob(0.0, unit="s", low=0)
    """step time of the plan

    Written by --plan.write and compared at the end of the run.
    """


@dataclass(frozen=True, kw_only=True)
class WatchSection:
    """hangs, stragglers, diverging replicas"""

    enabled: bool = knob(True)
    """heartbeats, and a monitor process on each node that names the failed rank and the cause"""
    hang_s: float = knob(-1.0, unit="s", low=-1, common=True)
    """end a run without progress this long; -1: automatic

    -1 is 60 s or 30 of the run's own steps, whichever is longer; 600 s for a save that waits for its
    storage, and for a start's first batch. 0 disables the check.
    """
    late_percent: float = knob(7.0, unit="%", low=0)
    """report a rank whose own work takes this much longer than the others'; 0: never"""
    divergence: int = knob(0, unit="steps", low=0)
    """steps between bitwise comparisons of the replicas; 0: never"""
    deterministic: bool = knob(False, common=True)
    """make the run repeat bit for bit

    Operations without a deterministic implementation are refused.
    """


@dataclass(frozen=True, kw_only=True)
class RaySection:
    """with --backend ray"""

    address: str = knob("", common=True)
    """cluster: auto, host:port, ray://..., local; empty: RAY_ADDRESS, else local

    A local cluster is started with the run and ended with it.
    """
    num_workers: str = knob("2", unit="workers", common=True)
    """ranks; a range, as in 2:8, is elastic"""
    cpus_per_worker: float = knob(1.0, unit="CPUs", above=0)
    """CPUs that a worker reserves"""
    gpus_per_worker: str = knob("auto")
    """GPUs that a worker reserves; auto: 1 where the cluster has any, else 0"""
    env: Texts = knob({})
    """environment variables of the workers: --ray.env NAME=VALUE, once for each

    They apply on every node, over those of the node itself.
    """
    max_failures: int = knob(3, low=-1)
    """restarts of the worker group before the run fails; -1: no limit"""


LAUNCHERS_OWN = ("backend", "ray")
"""The field and the section that select how a run is started. RUN/config.toml omits both: any launcher can
resume a run.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    backend: Literal["torchrun", "ray"] = knob("torchrun", common=True)
    """torchrun (also a job script, srun, or one process), or ray"""
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

    def __post_init__(self) -> None:
        if not self.data.name and not self.data.sources and self.model.name in ("vit", "mlp"):
            object.__setattr__(self, "data", dataclasses.replace(self.data, name="digits"))


# ---------------------------------------------------------------- the fields as data


@dataclass(frozen=True)
class FieldSpec:
    """One `--section.field`: its type, its default, and the metadata that `knob` gave it."""

    name: str
    type: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def is_args(self) -> bool:
        return self.type is Args or typing.get_origin(self.type) is typing.get_origin(Args)

    @property
    def is_texts(self) -> bool:
        """Named values that stay as typed: ray.env."""
        return self.is_args and typing.get_args(self.type) == typing.get_args(Texts)

    @property
    def is_tables(self) -> bool:
        """An array of tables: data.sources."""
        return typing.get_origin(self.type) is tuple


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


def value_of(config: Config, name: str) -> Any:
    """The value of `section.field`."""
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def flatten(config: Config) -> dict[str, Any]:
    """`section.field` → value, for every field."""
    return {name: value_of(config, name) for name in FIELDS}


def shown_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value == "" else str(value)


# ---------------------------------------------------------------- structured texts


def reshard_policy(text: str) -> bool | int | str:
    """Parses --mesh.reshard_after_forward: a bool, a number of ranks, "step" or "auto"."""
    if text in ("true", "false"):
        return text == "true"
    if text in ("step", "auto"):
        return text
    if ranks := parse_count(text):
        return ranks
    raise ConfigError(
        f"--mesh.reshard_after_forward {text} is not auto, true, false, step or a number of ranks.",
        "--mesh.reshard_after_forward auto",
    )


def worker_range(text: str) -> tuple[int, int]:
    """Parses --ray.num_workers: `4` is (4, 4), `2:8` is (2, 8)."""
    if (span := _span(text)) is None:
        raise ConfigError(
            f"--ray.num_workers {text} is not a number of workers or a range.", "--ray.num_workers 2 or 2:8"
        )
    return span


def profile_steps(text: str) -> tuple[int, int]:
    """Parses --profile.steps: `3:5` is (3, 5), `4` is (4, 4)."""
    if (span := _span(text)) is None:
        raise ConfigError(f"--profile.steps {text} is not first:last, counted from 1.", "--profile.steps 3:5")
    return span


def _span(text: str) -> tuple[int, int] | None:
    """`2:8` or `4`, from 1; None for anything else."""
    first, colon, last = text.partition(":")
    low, high = parse_count(first), parse_count(last if colon else first)
    return (low, high) if low and high and low <= high else None


def exists(path: str | Path) -> bool:
    """Path.exists raises for a name that is too long and for a folder that may not be searched."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def expanded(path: str) -> Path:
    return Path(with_home(path))


def with_home(path: str) -> str:
    """The path with ~ replaced; as it is for a ~NAME of nobody, where Path.expanduser raises."""
    return os.path.expanduser(path)  # noqa: PTH111

"""What a rank's step needs, and what each flag frees: the arithmetic behind the page of oom.py.

A Footprint has the configuration in numbers; its peak by kind is computed, with activations of a micro-batch
from one forward and backward on fake tensors. A flag changes the Footprint and frees the difference: the
first suggestion is the cheapest flag that frees enough, or several together where none alone does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.text import byte_size, columns
from fsdp.base.torch_private import FakeTensorMode, convert_tensors
from fsdp.config import Config
from fsdp.distributed.boxes import gathered_numel, local_tensor
from fsdp.distributed.mesh import MeshSizes
from fsdp.memory.account import OomContext, OomFacts, largest_first, resting_bytes
from fsdp.memory.storages import StorageTracker
from fsdp.models.chunked_loss import ChunkedHead, output_layer
from fsdp.models.loss import LossFunction
from fsdp.models.units import blocks_of, find_units
from fsdp.shard.activations import apply_activation_checkpointing

MARGIN = 1.1
"""A suggestion must free this many times what is missing: the arithmetic ignores the allocator's rounding."""
HALVINGS = 4
"""Of the micro-batch, suggested at once."""
LOSS_CHUNK = 1024
"""Tokens whose logits exist at once, where it is suggested."""


# ---------------------------------------------------------------- what a step needs

Activations = Callable[[int, str, int], int]
"""(micro-batch, checkpointing, loss chunk) → bytes."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Sizes in numbers of parameters, of divided ones a rank's part, dtypes in bytes; the last of `units` is
    the root's own parameters.
    """

    units: tuple[int, ...]
    trained: int
    shard: float
    """Ranks over which FSDP divides a copy; with experts that are divided by fewer, the mean."""
    replicate: int
    master: int
    param: int
    reduce: int
    state: float
    """Optimizer bytes per trained parameter."""
    reshard: bool | int | str
    accumulate: str
    accumulation: int
    micro: int
    checkpointing: str
    counted: int
    """Bytes of the dtype in which activations are estimated."""
    recomputes: bool = True
    """Whether the model has units that can be recomputed."""
    offload: bool = False
    nvme: bool = False
    ddp: bool = False
    loss_chunk: int = 0
    chunkable: bool = False
    """Whether the loss of its tokens may be computed in chunks."""

    def needs(self, activations: Activations) -> dict[str, int]:
        """Bytes by kind at the peak of a step."""
        total, largest, sharded = sum(self.units), max(self.units), self.shard > 1 and not self.ddp
        resident = 0 if self.offload else 1 / self.shard
        whole = sharded and self.accumulation > 1 and self.accumulate == "last"
        gathered: float = total
        if self.reshard not in (False, "step"):
            remains = 0 if self.reshard is True else total / int(self.reshard)
            gathered = self.units[-1] + largest + remains
        used = activations(self.micro, self.checkpointing, self.loss_chunk)
        sizes = {
            "parameters": total * self.master * resident,
            "gathered": 0 if self.ddp else gathered * self.param,
            "gradients": self.trained * (self.reduce if whole else self.master * resident)
            + (0 if self.ddp else largest * self.param),
            "optimizer": 0 if self.nvme else self.trained * self.state * resident,
            "activations": used * self.param // self.counted,
            "communication": largest * (self.param + self.reduce) if sharded else 0,
        }
        return {kind: round(size) for kind, size in sizes.items()}


def footprint_of(config: Config, context: OomContext, device: torch.device) -> Footprint:
    """The configuration in numbers. A parameter counts in one unit only; those in no unit are the root's."""
    seen: set[nn.Parameter] = set()

    def count(modules: Sequence[nn.Module]) -> int:
        fresh = {p for module in modules for p in module.parameters()} - seen
        seen.update(fresh)
        return sum(map(gathered_numel, fresh))

    dtypes, sizes = context.sharded.dtypes, context.sharded.sizes
    resting = resting_bytes(config.optim, context.sharded.root, dtypes.master, dtypes.frozen)
    parameters = list(context.sharded.root.parameters())
    # experts are divided again by all ranks of a copy that have others
    here = sum(local_tensor(p).numel() for p in parameters) if sizes.expert > 1 else 0
    return Footprint(
        units=(*(count(unit) for unit in context.sharded.units), count([context.sharded.root])),
        trained=sum(gathered_numel(p) for p in parameters if p.requires_grad),
        shard=sum(map(gathered_numel, parameters)) / here if here else sizes.weight_shards,
        replicate=sizes.replicate,
        master=dtypes.master.itemsize,
        param=dtypes.param.itemsize,
        reduce=dtypes.reduce.itemsize,
        state=resting.optimizer / max(1, resting.gradients // dtypes.master.itemsize),
        reshard=context.sharded.reshard,
        accumulate=config.mesh.accumulate,
        accumulation=context.batch.accumulation,
        micro=context.batch.micro_batch,
        checkpointing=config.memory.activation_checkpointing,
        counted=dtypes.param.itemsize,
        loss_chunk=config.memory.loss_chunk,
        chunkable=_is_chunkable(context),
        offload=config.memory.cpu_offload and device.type == "cuda",
        nvme=config.memory.nvme != "off",
        ddp=sizes.strategy == "ddp",
        recomputes=bool(blocks_of([list(unit) for unit in context.sharded.units])),
    )


def _is_chunkable(context: OomContext) -> bool:
    """Whether --memory.loss_chunk applies: a target for each token, and a linear output layer."""
    if context.loss is not None or not hasattr(context.samples, "__len__"):
        return False
    sample = context.samples.batch(np.zeros(1, np.int64))
    targets = sample.get("targets", sample.get("labels"))
    try:
        return targets is not None and targets.dim() > 1 and bool(output_layer(context.sharded.root))
    except ConfigError:
        return False


def activation_estimates(
    config: Config, context: OomContext, device: torch.device, held: int
) -> tuple[Activations, list[str]]:
    """Activation bytes, each estimated once. And notes on those that failed: they are scaled from `held`."""
    notes: list[str] = []

    @functools.cache
    def estimate(micro: int, checkpointing: str, loss_chunk: int) -> int:
        try:
            return _estimate(config, context, device, micro, checkpointing, loss_chunk)
        except Exception as error:  # a user's model may do what fake tensors do not support
            notes[:] = [f"Some estimates on fake tensors failed: {one_line(error)[:200]}"]
            return held * micro // context.batch.micro_batch

    return estimate, notes


def _estimate(
    config: Config, context: OomContext, device: torch.device, micro: int, checkpointing: Any, loss_chunk: int
) -> int:
    """The unsharded model runs forward and backward once on fake tensors: nothing is allocated."""
    count = len(context.samples) if hasattr(context.samples, "__len__") else micro
    batch = context.samples.batch(np.arange(micro, dtype=np.int64) % count)
    model, z_loss, param = context.build(), config.train.z_loss, context.sharded.dtypes.param
    head = ChunkedHead(model, loss_chunk, z_loss=z_loss) if loss_chunk else None
    loss_function = LossFunction(model, context.loss, head, z_loss=z_loss)
    memory = dataclasses.replace(config.memory, activation_checkpointing=checkpointing, activation_budget=1.0)
    share = tensor_share(model, context.sharded.sizes)

    def empty(tensor: Tensor) -> Tensor:
        dtype = param if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, dtype=dtype, device=device)

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        convert_tensors(model, empty)
        apply_activation_checkpointing(find_units(model, config.mesh.wrap), memory)
        data = {name: fake.from_tensor(value).to(device) for name, value in batch.items()}
        valid = torch.ones(micro, dtype=torch.bool, device=device)
        with StorageTracker(model, None, device="meta") as tracker:  # the device of a fake tensor's storage
            tracker.phase("forward", 1)
            parts = loss_function(model, data, valid, micro)
            tracker.phase("backward", 1)
            parts.loss_sum.backward()
            tracker.phase("end", 1)
    most = max(kinds["activations"] for _, _, kinds in tracker.moments())
    return round(most * share / context.sharded.sizes.context)


def tensor_share(model: nn.Module, sizes: MeshSizes) -> float:
    """The part of a plain model's activations that each tensor rank has, by the widths of its layers: what a
    layer returns or receives in parts, against what is whole. The planner traces them.
    """
    if sizes.tensor == 1:
        return 1.0
    from fsdp.shard.tensor import DIMS, plan_of

    plan, divided, whole = plan_of(model, sizes), 0, dict[tuple[str, int], int]()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and (dim := DIMS.get(plan.get(name, ""))) is not None:
            divided += parameter.shape[dim]
            # those of one module receive the same input
            whole[name.rpartition(".")[0].rpartition(".")[0], dim] = parameter.shape[1 - dim]
    both = divided + sum(whole.values())
    return (both - divided * (1 - 1 / sizes.tensor)) / max(1, both)


# ---------------------------------------------------------------- what to change

Accepts = Callable[[str], bool]
"""Whether the configuration accepts these flags."""


@dataclass(frozen=True)
class Suggestion:
    flags: str
    bytes: int
    cost: str


@dataclass
class Advice:
    """`first` frees what is missing, or as much as flags can; `others` are in the order of their cost."""

    needs: Mapping[str, int]
    missing: int
    first: Suggestion | None
    enough: bool
    others: Sequence[Suggestion] = ()


MORE_RANKS = "twice as many ranks"


def changes(now: Footprint, device: str) -> Iterator[tuple[str, Footprint, str]]:
    """Each flag alone, in the order of cost: the flag, the footprint with it, its cost."""
    sharded, recomputes = now.shard > 1 and not now.ddp, now.recomputes
    table: list[tuple[bool, str, dict[str, Any], str]] = [
        (not now.ddp and now.reshard is not True, "--mesh.reshard_after_forward true", {"reshard": True},
         "each unit is gathered again for backward"),
        (sharded and now.accumulation > 1 and now.accumulate == "last", "--mesh.accumulate shard",
         {"accumulate": "shard"}, "a reduction per micro-batch"),
        (now.chunkable and not now.loss_chunk, f"--memory.loss_chunk {LOSS_CHUNK}",
         {"loss_chunk": LOSS_CHUNK}, f"logits of {LOSS_CHUNK} tokens at a time: more and smaller kernels"),
        (recomputes and now.checkpointing == "none", "--memory.activation_checkpointing ops",
         {"checkpointing": "ops"}, "recomputes all but matrix products and attention"),
        (recomputes and now.checkpointing != "full", "--memory.activation_checkpointing full",
         {"checkpointing": "full"}, "recomputes the forward of each unit"),
    ]  # fmt: skip
    for micro in dict.fromkeys(-(-now.micro // 2**n) for n in range(1, 1 + HALVINGS)):
        times = -(-now.micro * now.accumulation // micro)
        cost = f"{times} micro-batches per step, the same global batch"
        smaller = {"micro": micro, "accumulation": times}
        table.append((micro < now.micro, f"--train.micro_batch {micro}", smaller, cost))
    half_state = now.state == 2 * now.master == 8 and not now.nvme
    table += [
        (now.replicate > 1, "--mesh.strategy fsdp --mesh.replicate 1",
         {"shard": now.shard * now.replicate, "replicate": 1, "ddp": False},
         "shards over all ranks: all-gathers use every link"),
        (now.param == 4, "--precision.param bf16", {"param": 2},
         "computes in bf16: losses differ in the third digit"),
        (half_state, "--optim.state bf16", {"state": now.state / 2},
         "keeps Adam's moments in bf16, with stochastic rounding"),
        (now.master == 4, "--precision.master bf16", {"master": 2, "state": min(now.state, 4)},
         "stores weights and gradients in bf16, with stochastic rounding"),
        (device == "cuda" and not now.offload and not now.ddp, "--memory.cpu_offload true",
         {"offload": True}, "copies shards over the bus; the update runs on the host"),
        (not now.nvme and not now.offload and bool(now.state),
         "--memory.nvme optimizer --memory.nvme_dir DIR", {"nvme": True},
         "keeps optimizer states on a local disk"),
        (not now.ddp, MORE_RANKS, {"shard": now.shard * 2}, "the same global batch over more ranks"),
    ]  # fmt: skip
    for applies, flags, fields, cost in table:
        if applies:
            yield flags, dataclasses.replace(now, **fields), cost


def advise(
    now: Footprint,
    activations: Activations,
    facts: OomFacts,
    accepts: Accepts,
    special: Suggestion | None = None,
) -> Advice:
    """`special` comes first, whatever it frees."""
    needs = now.needs(activations)
    peak = sum(needs.values())
    missing = max(facts.requested, peak - facts.held)

    def freed(changed: Footprint) -> int:
        return peak - sum(changed.needs(activations).values())

    singles = [
        Suggestion(flags, freed(changed), cost)
        for flags, changed, cost in changes(now, facts.device)
        if flags == MORE_RANKS or accepts(flags)
    ]
    singles = [single for single in singles if single.bytes > 0]
    first = special or next((single for single in singles if single.bytes >= missing * MARGIN), None)
    if first is None:
        # Flags are added in the order of cost; a later value of the same flag replaces it.
        chosen, best = dict[str, str](), now
        while freed(best) < missing * MARGIN:
            for flags, changed, _ in changes(best, facts.device):
                together = {**chosen, flags.split()[0]: flags}
                helps = flags != MORE_RANKS and freed(changed) > freed(best)
                if helps and accepts(" ".join(together.values())):
                    chosen, best = together, changed
                    break
            else:
                break
        if chosen:
            first = Suggestion(" ".join(chosen.values()), freed(best), "several together")
    enough = first is not None and (first is special or first.bytes >= missing * MARGIN)
    return Advice(needs, missing, first, enough, [single for single in singles if single != first])


def comes_first(config: Config, context: OomContext, facts: OomFacts) -> Suggestion | None:
    """Suggestions for memory that no step holds: an evaluation's, a save's."""
    rows = config.train.eval_batch or context.batch.micro_batch
    if facts.phase == "evaluate" and rows > 1:
        flags = f"--train.eval_batch {-(-rows // 2)}"
        return Suggestion(flags, facts.kinds["activations"] // 2, "smaller evaluation batches")
    if facts.phase == "save" and config.checkpoint.mode == "async":
        copied = facts.kinds["parameters"] + facts.kinds["optimizer"]
        return Suggestion("--checkpoint.mode blocking", copied, "training waits for each save")
    return None


# ---------------------------------------------------------------- the page


def page_text(facts: OomFacts, advice: Advice | None, notes: Sequence[str]) -> str:
    """What to change stands at its end: what is read first on a terminal."""
    requested = byte_size(facts.requested) if facts.requested else "unknown"
    held = [("total", byte_size(facts.held)), ("requested in addition", requested)]
    # No model, optimizer or FSDP group owns them, so buffers of collectives are among them.
    names = {"activations": "activations and communication buffers"}
    rows = [(names.get(kind, kind), size) for kind, size in largest_first(facts.kinds)]
    tables: list[tuple[str, Sequence[tuple[str, ...]]]] = [
        ("Memory by kind when the allocation failed", [*rows, *held]),
        ("Process, device and limits", facts.around),
    ]
    if advice is not None:
        total = ("total", byte_size(sum(advice.needs.values())))
        title = f"Estimated peak of a step on this rank; missing {byte_size(advice.missing)}"
        tables.append((title, [*largest_first(advice.needs), total]))
        title = "Change this first"
        if not advice.enough:
            missing = byte_size(advice.missing)
            title = f"All flags together free less than {missing}: change this and use more ranks"
        tables.append((title, [_row("", advice.first)] if advice.first else []))
        others = [_row(str(n), suggestion) for n, suggestion in enumerate(advice.others, start=1)]
        tables.append(("Each of these alone, in the order of their cost", others))
    lines = [f"{facts.title}.", f"torch's error: {facts.error}"]
    for title, rows_of_table in tables:
        if rows_of_table:
            lines += ["", title, *(f"  {line}" for line in columns(rows_of_table))]
    return "\n".join([*lines, *([""] * bool(notes)), *notes]) + "\n"


def _row(number: str, suggestion: Suggestion) -> tuple[str, ...]:
    return number, suggestion.flags, f"frees {byte_size(suggestion.bytes)}", suggestion.cost

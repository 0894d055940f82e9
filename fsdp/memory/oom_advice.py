"""What a rank's step needs, and what each flag frees: the arithmetic behind the page of oom.py.

A Footprint has the configuration in numbers; its peak by kind is computed, with activations of a micro-batch
from one forward and backward on fake tensors. A flag changes the Footprint and frees the difference: the
first suggestion is the cheapest flag that frees enough, or several together where none alone does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.torch_private.core import FakeTensorMode
from fsdp.config import Config, reshard_policy
from fsdp.dist.env import expandable_segments
from fsdp.memory.account import OomContext, StorageTracker, resting_bytes
from fsdp.models.chunked_loss import maybe_chunked, output_layer
from fsdp.models.loss import LossFunction
from fsdp.models.units import blocks_of, find_units
from fsdp.parallel.activations import apply_activation_checkpointing

MARGIN = 1.1
"""A suggestion must free this many times what is missing: the arithmetic ignores the allocator's rounding."""
HALVINGS = 4
"""Of the micro-batch, suggested at once."""
LOSS_CHUNK = 1024
"""Tokens whose logits exist at once, where it is suggested."""
CACHED = 0.25
"""A larger share of memory cached by an allocator is reported first."""


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """Measured when the allocation failed, in bytes."""

    title: str
    error: str
    """The message of torch's error."""
    device: str
    phase: str
    kinds: Mapping[str, int]
    held: int
    requested: int
    unused: int = 0
    """Reserved by CUDA's allocator beyond tensors."""
    around: Sequence[tuple[str, str]] = ()
    """The process, the device and the limits: name, size."""


# ---------------------------------------------------------------- what a step needs

Activations = Callable[[int, str, int], int]
"""(micro-batch, checkpointing, loss chunk) → bytes."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Sizes in numbers of parameters, dtypes in bytes; the last of `units` is the root's own parameters."""

    units: tuple[int, ...]
    trained: int
    shard: int
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
        return sum(p.numel() for p in fresh)

    dtypes = context.sharded.dtypes
    resting = resting_bytes(config.optim, context.sharded.root, dtypes.master, dtypes.frozen)
    trained = resting.gradients // dtypes.master.itemsize
    return Footprint(
        units=(*(count(unit) for unit in context.sharded.units), count([context.sharded.root])),
        trained=trained,
        shard=context.sharded.sizes.shard,
        replicate=context.sharded.sizes.replicate,
        master=dtypes.master.itemsize,
        param=dtypes.param.itemsize,
        reduce=dtypes.reduce.itemsize,
        state=resting.optimizer / max(1, trained),
        reshard=reshard_policy(config.mesh.reshard_after_forward),
        accumulate=config.mesh.accumulate,
        accumulation=context.batch.accumulation,
        micro=context.batch.micro_batch,
        checkpointing=config.memory.activation_checkpointing,
        counted=dtypes.param.itemsize,
        loss_chunk=config.memory.loss_chunk,
        chunkable=_is_chunkable(context),
        offload=config.memory.cpu_offload and device.type == "cuda",
        nvme=config.memory.nvme != "off",
        ddp=context.sharded.sizes.strategy == "ddp",
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


@dataclass
class ActivationEstimates:
    """Activation bytes by micro-batch, checkpointing and loss chunk, each estimated once."""

    context: OomContext
    config: Config
    device: torch.device
    now: Footprint
    measured: Mapping[str, int]
    """The failed step's kinds."""
    note: str = field(default="", init=False)
    _known: dict[tuple[int, str, int], int] = field(default_factory=dict, init=False)

    def __call__(self, micro: int, checkpointing: str, loss_chunk: int) -> int:
        key = (micro, checkpointing, loss_chunk)
        if key not in self._known:
            try:
                self._known[key] = self._estimate(*key)
            except Exception as error:
                # A user's model may do what fake tensors do not support: the page has a note, and the
                # estimate is scaled from what was held.
                self.note = f"Some estimates on fake tensors failed: {one_line(error)[:200]}"
                scaled = self.measured["activations"] * micro // self.now.micro
                same = (micro, self.now.checkpointing, self.now.loss_chunk)
                self._known[key] = self._known.get(same, scaled)
        return self._known[key]

    def _estimate(self, micro: int, checkpointing: Any, loss_chunk: int) -> int:
        """The unsharded model runs forward and backward once on fake tensors: nothing is allocated."""
        context, z_loss = self.context, self.config.train.z_loss
        count = len(context.samples) if hasattr(context.samples, "__len__") else micro
        batch = context.samples.batch(np.arange(micro, dtype=np.int64) % count)
        model = context.build()
        head = maybe_chunked(model, loss_chunk, z_loss=z_loss)
        loss_function = LossFunction(model, context.loss, head, z_loss=z_loss)
        memory = dataclasses.replace(self.config.memory, activation_checkpointing=checkpointing)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _to_fake(model, self.device, context.sharded.dtypes.param)
            apply_activation_checkpointing(find_units(model, self.config.mesh.wrap), memory)
            data = {name: fake.from_tensor(value).to(self.device) for name, value in batch.items()}
            valid = torch.ones(micro, dtype=torch.bool, device=self.device)
            tracker = StorageTracker(model, None, device="meta")  # the device of a fake tensor's storage
            with tracker:
                tracker.phase("forward", 1)
                parts = loss_function(model, data, valid, micro)
                tracker.phase("backward", 1)
                parts.loss_sum.backward()
                tracker.phase("end", 1)
        return max(kinds["activations"] for _, _, kinds in tracker.moments())


def _to_fake(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replaces parameters and buffers by fake ones on the device, in `dtype`; tied tensors stay tied."""
    made: dict[Tensor, Tensor] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=kind, device=device)
        trained = isinstance(tensor, nn.Parameter)
        made[tensor] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
    for module in model.modules():
        tensors = (module.named_parameters, module.named_buffers)
        for name, tensor in [pair for of in tensors for pair in of(recurse=False, remove_duplicate=False)]:
            setattr(module, name, made[tensor])


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
        (sharded and now.reshard is not True, "--mesh.reshard_after_forward true", {"reshard": True},
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
    micro = now.micro
    for _ in range(HALVINGS):
        micro, larger = -(-micro // 2), micro
        times = -(-now.micro * now.accumulation // micro)
        cost = f"{times} micro-batches per step, the same global batch"
        smaller = {"micro": micro, "accumulation": times}
        table.append((micro < larger, f"--train.micro_batch {micro}", smaller, cost))
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


def advise(now: Footprint, activations: Activations, facts: OomFacts, accepts: Accepts) -> Advice:
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
    first = next((single for single in singles if single.bytes >= missing * MARGIN), None)
    if first is None:
        # Flags are added in the order of cost; a later value of the same flag replaces it.
        chosen, costs, best = dict[str, str](), dict[str, str](), now
        while freed(best) < missing * MARGIN:
            for flags, changed, cost in changes(best, facts.device):
                together = {**chosen, flags.split()[0]: flags}
                helps = flags != MORE_RANKS and freed(changed) > freed(best)
                if helps and accepts(" ".join(together.values())):
                    chosen, best, costs[flags.split()[0]] = together, changed, cost
                    break
            else:
                break
        if chosen:
            first = Suggestion(" ".join(chosen.values()), freed(best), "; ".join(costs.values()))
    enough = first is not None and first.bytes >= missing * MARGIN
    return Advice(needs, missing, first, enough, [single for single in singles if single != first])


def comes_first(config: Config, context: OomContext, facts: OomFacts, needs: int) -> Suggestion | None:
    """Suggestions for memory that no step holds: an evaluation's, a save's, the allocator's cache."""
    rows, cached = config.train.eval_batch or context.batch.micro_batch, facts.held - needs
    if facts.phase == "evaluate" and rows > 1:
        flags = f"--train.eval_batch {-(-rows // 2)}"
        return Suggestion(flags, facts.kinds["activations"] // 2, "smaller evaluation batches")
    if facts.phase == "save" and config.checkpoint.mode == "async":
        copied = facts.kinds["parameters"] + facts.kinds["optimizer"]
        return Suggestion("--checkpoint.mode blocking", copied, "training waits for each save")
    if facts.unused > facts.requested and facts.unused > CACHED * facts.held and not expandable_segments():
        flags = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        return Suggestion(flags, facts.unused, "in the environment: free blocks are merged")
    if facts.device == "cpu" and cached > CACHED * needs:
        flags = "MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072"
        cost = (
            "in the environment: freed blocks are returned to the system at once, at the cost of page faults"
        )
        return Suggestion(flags, cached, cost)
    return None

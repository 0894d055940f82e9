"""Memory that a rank of this model needs on this mesh, and what each flag frees: arithmetic, no torch.

A footprint gives the peak of a step; a flag changes the footprint and frees the difference. The first
suggestion is the cheapest flag that frees enough, or several flags together where none alone does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MARGIN = 1.1
"""A suggestion must free this many times what is missing: the arithmetic ignores the allocator's rounding."""

HALVINGS = 4
"""Of the micro-batch, suggested at once."""

LOSS_CHUNK = 1024
"""Tokens whose logits exist at once, where it is suggested."""

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

    @property
    def total(self) -> int:
        return sum(self.units)

    def needs(self, activations: Activations) -> dict[str, int]:
        """Bytes by kind at the peak of a step."""
        resting = 0 if self.offload else 1
        largest, several = max(self.units), self.shard > 1 and not self.ddp
        whole_gradients = several and self.accumulation > 1 and self.accumulate == "last"
        gradients = self.trained * (self.reduce if whole_gradients else self.master / self.shard * resting)
        return {
            "parameters": round(self.total * self.master / self.shard * resting),
            "gathered": 0 if self.ddp else round(self._gathered() * self.param),
            "gradients": round(gradients + (0 if self.ddp else largest * self.param)),
            "optimizer": 0 if self.nvme else round(self.trained * self.state / self.shard * resting),
            "activations": activations(self.micro, self.checkpointing, self.loss_chunk)
            * self.param
            // self.counted,
            "communication": largest * (self.param + self.reduce) if several else 0,
        }

    def _gathered(self) -> float:
        if self.reshard in (False, "step"):
            return self.total
        kept = 0.0 if self.reshard is True else self.total / int(self.reshard)
        return self.units[-1] + max(self.units) + kept


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
    others: Sequence[Suggestion] = field(default_factory=list)


Step = tuple[str, Footprint, str]


Accepts = Callable[[str], bool]
"""Whether the configuration accepts these flags."""


def advise(
    now: Footprint, activations: Activations, held: int, requested: int, device: str, accepts: Accepts
) -> Advice:
    """`held` bytes were in use when an allocation of `requested` more failed."""
    needs = now.needs(activations)
    peak = sum(needs.values())
    missing = max(requested, peak - held)
    singles = [
        Suggestion(flags, peak - sum(changed.needs(activations).values()), cost)
        for flags, changed, cost in steps(now, device)
        if not is_flag(flags) or accepts(flags)
    ]
    singles = [one for one in singles if one.bytes > 0]
    enough = next((one for one in singles if one.bytes >= missing * MARGIN), None)
    first = enough or _together(now, activations, device, peak, missing, accepts)
    return Advice(
        needs=needs,
        missing=missing,
        first=first,
        enough=first is not None and first.bytes >= missing * MARGIN,
        others=[one for one in singles if one != first],
    )


def is_flag(flags: str) -> bool:
    """False for `twice as many ranks`."""
    return flags.startswith("--")


def steps(now: Footprint, device: str) -> Iterator[Step]:
    """Each flag alone, in the order of cost."""
    change = dataclasses.replace
    if not now.ddp and now.reshard is not True and now.shard > 1:
        yield (
            "--mesh.reshard_after_forward true",
            change(now, reshard=True),
            "each unit is gathered again for backward",
        )
    if now.accumulation > 1 and now.accumulate == "last" and not now.ddp and now.shard > 1:
        yield "--mesh.accumulate shard", change(now, accumulate="shard"), "a reduction per micro-batch"
    if now.chunkable and not now.loss_chunk:
        yield (
            f"--memory.loss_chunk {LOSS_CHUNK}",
            change(now, loss_chunk=LOSS_CHUNK),
            f"logits of {LOSS_CHUNK} tokens at a time: more and smaller kernels",
        )
    if now.recomputes and now.checkpointing == "none":
        yield (
            "--memory.activation_checkpointing ops",
            change(now, checkpointing="ops"),
            "recomputes all but matrix products and attention",
        )
    if now.recomputes and now.checkpointing != "full":
        yield (
            "--memory.activation_checkpointing full",
            change(now, checkpointing="full"),
            "recomputes the forward of each unit",
        )
    micro = now.micro
    for _ in range(HALVINGS):
        if micro == 1:
            break
        micro = -(-micro // 2)
        times = -(-now.micro * now.accumulation // micro)
        smaller = change(now, micro=micro, accumulation=times)
        yield (
            f"--train.micro_batch {micro}",
            smaller,
            f"{times} micro-batches per step, the same global batch",
        )
    yield from _moved(now, device)


def _moved(now: Footprint, device: str) -> Iterator[Step]:
    """Flags that move bytes to other ranks, to the host or to a disk, or use smaller dtypes."""
    change = dataclasses.replace
    if now.replicate > 1:
        yield (
            "--mesh.strategy fsdp --mesh.replicate 1",
            change(now, shard=now.shard * now.replicate, replicate=1, ddp=False),
            "shards over all ranks: all-gathers use every link",
        )
    if now.param == 4:
        half = change(now, param=2)
        yield "--precision.param bf16", half, "computes in bf16: losses differ in the third digit"
    if now.state == 2 * now.master == 8 and not now.nvme:
        half = change(now, state=now.state / 2)
        yield "--optim.state bf16", half, "keeps Adam's moments in bf16, with stochastic rounding"
    if now.master == 4:
        half = change(now, master=2, state=min(now.state, 4))
        yield (
            "--precision.master bf16",
            half,
            "stores weights and gradients in bf16, with stochastic rounding",
        )
    if device == "cuda" and not now.offload and not now.ddp:
        yield (
            "--memory.cpu_offload true",
            change(now, offload=True),
            "copies shards over the bus; the update runs on the host",
        )
    if not now.nvme and not now.offload and now.state:
        yield (
            "--memory.nvme optimizer --memory.nvme_dir DIR",
            change(now, nvme=True),
            "keeps optimizer states on a local disk",
        )
    if not now.ddp:
        yield (
            "twice as many ranks",
            change(now, shard=now.shard * 2),
            "the same global batch over more ranks",
        )


def _together(
    now: Footprint, activations: Activations, device: str, peak: int, missing: int, accepts: Accepts
) -> Suggestion | None:
    """Flags added in the order of cost until they free enough; a later value of the same flag replaces it."""
    chosen: dict[str, str] = {}
    best, costs = now, {}
    while True:
        freed = peak - sum(best.needs(activations).values())
        if freed >= missing * MARGIN:
            break
        better = [
            (flags, changed, cost)
            for flags, changed, cost in steps(best, device)
            if is_flag(flags)
            and sum(changed.needs(activations).values()) < peak - freed
            and accepts(_joined({**chosen, flags.split()[0]: flags}))
        ]
        if not better:
            break
        flags, best, cost = better[0]
        chosen[flags.split()[0]], costs[flags.split()[0]] = flags, cost
    if not chosen:
        return None
    return Suggestion(_joined(chosen), freed, "; ".join(costs.values()))


def _joined(chosen: Mapping[str, str]) -> str:
    return " ".join(chosen.values())

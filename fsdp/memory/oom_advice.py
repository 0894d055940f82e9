"""What a rank of this model on this mesh needs, and what each flag gives back: arithmetic, no torch.

A footprint says what is held at the fullest moment of a step; a flag is a change of the footprint, and gives
back the difference. The first suggestion is the one that costs least and gives back enough; where none alone
does, several together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MARGIN = 1.1
"""Arithmetic leaves out what the allocator rounds and keeps: a suggestion must give back this much more than
is short.
"""

HALVINGS = 4
"""Of the micro-batch, that are offered at once."""

Activations = Callable[[int, str], int]
"""(micro-batch, checkpointing) → bytes."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Parameters in numbers, widths in bytes; units in numbers of parameters, the root's own last."""

    units: tuple[int, ...]
    trained: int
    shard: int
    replicate: int
    master: int
    param: int
    reduce: int
    state: float
    """Optimizer bytes a trained parameter."""
    reshard: bool | int | str
    accumulate: str
    accumulation: int
    micro: int
    checkpointing: str
    counted: int
    """The width in which activations are counted."""
    recomputes: bool = True
    """Whether the model has units that can be computed again."""
    offload: bool = False
    nvme: bool = False
    ddp: bool = False

    @property
    def total(self) -> int:
        return sum(self.units)

    def needs(self, activations: Activations) -> dict[str, int]:
        """Bytes by kind at the fullest moment of a step."""
        resting = 0 if self.offload else 1
        largest, several = max(self.units), self.shard > 1 and not self.ddp
        whole_gradients = several and self.accumulation > 1 and self.accumulate == "last"
        gradients = self.trained * (self.reduce if whole_gradients else self.master / self.shard * resting)
        return {
            "parameters": round(self.total * self.master / self.shard * resting),
            "gathered": 0 if self.ddp else round(self._gathered() * self.param),
            "gradients": round(gradients + (0 if self.ddp else largest * self.param)),
            "optimizer": 0 if self.nvme else round(self.trained * self.state / self.shard * resting),
            "activations": activations(self.micro, self.checkpointing) * self.param // self.counted,
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
    """`first` gives back what is short, as far as anything does; `others` stand in the order of what they
    cost.
    """

    needs: Mapping[str, int]
    short: int
    first: Suggestion | None
    enough: bool
    others: Sequence[Suggestion] = field(default_factory=list)


Step = tuple[str, Footprint, str]


def advise(now: Footprint, activations: Activations, held: int, asked: int, device: str) -> Advice:
    """`held` bytes stood when `asked` more could not be had."""
    needs = now.needs(activations)
    wants = sum(needs.values())
    short = max(asked, wants - held)
    singles = [
        Suggestion(flags, wants - sum(changed.needs(activations).values()), cost)
        for flags, changed, cost in steps(now, device)
    ]
    singles = [one for one in singles if one.bytes > 0]
    enough = next((one for one in singles if one.bytes >= short * MARGIN), None)
    first = enough or _together(now, activations, device, wants, short)
    return Advice(
        needs=needs,
        short=short,
        first=first,
        enough=first is not None and first.bytes >= short * MARGIN,
        others=[one for one in singles if one != first],
    )


def steps(now: Footprint, device: str) -> Iterator[Step]:
    """Each flag alone, the cheapest first."""
    change = dataclasses.replace
    if not now.ddp and now.reshard is not True and now.shard > 1:
        yield (
            "--mesh.reshard_after_forward true",
            change(now, reshard=True),
            "gathers each unit again for backward",
        )
    if now.accumulation > 1 and now.accumulate == "last" and not now.ddp and now.shard > 1:
        yield "--mesh.accumulate shard", change(now, accumulate="shard"), "reduces at every micro-batch"
    if now.recomputes and now.checkpointing == "none":
        yield (
            "--memory.activation_checkpointing ops",
            change(now, checkpointing="ops"),
            "computes all but matrix products and attention twice",
        )
    if now.recomputes and now.checkpointing != "full":
        yield (
            "--memory.activation_checkpointing full",
            change(now, checkpointing="full"),
            "computes units' forward twice",
        )
    micro = now.micro
    for _ in range(HALVINGS):
        if micro == 1:
            break
        micro = -(-micro // 2)
        times = -(-now.micro * now.accumulation // micro)
        smaller = change(now, micro=micro, accumulation=times)
        yield f"--train.micro_batch {micro}", smaller, f"{times} micro-batches a step, the same global batch"
    yield from _elsewhere(now, device)


def _elsewhere(now: Footprint, device: str) -> Iterator[Step]:
    """What moves bytes to other ranks, to the host, to a disk, or to fewer bits."""
    change = dataclasses.replace
    if now.replicate > 1:
        yield (
            "--mesh.strategy fsdp --mesh.replicate 1",
            change(now, shard=now.shard * now.replicate, replicate=1, ddp=False),
            "shards over all ranks: gathers go over every link",
        )
    if now.param == 4:
        half = change(now, param=2)
        yield "--precision.param bf16", half, "computes in bf16: losses differ in the third digit"
    if now.state == 2 * now.master == 8 and not now.nvme:
        half = change(now, state=now.state / 2)
        yield "--optim.state bf16", half, "keeps Adam's moments in bf16, rounded at random"
    if device == "cuda" and not now.offload and not now.ddp:
        yield (
            "--memory.cpu_offload true",
            change(now, offload=True),
            "moves shards over the bus, the update runs on the host",
        )
    if not now.nvme and not now.offload and now.state:
        yield (
            "--memory.nvme optimizer --memory.nvme_dir DIR",
            change(now, nvme=True),
            "the optimizer's states rest on a local disk",
        )
    if not now.ddp:
        yield (
            "twice as many ranks",
            change(now, shard=now.shard * 2),
            "the same global batch over more of them",
        )


def _together(
    now: Footprint, activations: Activations, device: str, wants: int, short: int
) -> Suggestion | None:
    """Flags added up, the cheapest first, until they give back enough; a later word for the same flag
    replaces it.
    """
    chosen: dict[str, str] = {}
    best, costs = now, {}
    while True:
        gives = wants - sum(best.needs(activations).values())
        if gives >= short * MARGIN:
            break
        better = [
            (flags, changed, cost)
            for flags, changed, cost in steps(best, device)
            if flags.startswith("--") and sum(changed.needs(activations).values()) < wants - gives
        ]
        if not better:
            break
        flags, best, cost = better[0]
        chosen[flags.split()[0]], costs[flags.split()[0]] = flags, cost
    if not chosen:
        return None
    return Suggestion(" ".join(chosen.values()), gives, "; ".join(costs.values()))

"""From meta to real: every weight gets its value once, and then it is proven that it did.

Two ways, one result. A model that says how each parameter is drawn lets each rank draw its own shard from a counter-based
stream, with no communication; any other is built for real on rank 0 and sent parameter by parameter, each rank receiving
its rows alone. Initial weights are a function of the seed: the same bits at any number of ranks, under any strategy.

Memory is poisoned before it is filled, so that what nobody filled is found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp.agree import on_main
from fsdp.digest import combine, digest_shard
from fsdp.errors import ConfigError, TrainingError
from fsdp.models import ModelSpec, to_empty
from fsdp.models.init import Constant, Init, draw, draw_into
from fsdp.models.real import seeded
from fsdp.shard import Sharded


@dataclass(frozen=True)
class Cut:
    """Which elements of a flattened parameter a rank keeps: dim-0 rows are contiguous, so two numbers say it."""

    start: int
    numel: int


def cut_of(shape: torch.Size, index: int, count: int) -> Cut:
    """Shard `index` of `count` along dim 0, as torch.chunk cuts: ceil(rows / count) each, the last ones shorter or empty."""
    rows, row = (shape[0], shape[1:].numel()) if len(shape) else (1, 1)
    chunk = -(-rows // count)
    first, last = min(rows, index * chunk), min(rows, (index + 1) * chunk)
    return Cut(first * row, (last - first) * row)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_count(tensor: Tensor) -> int:
    """How many pieces a parameter is in; replicas of a piece are not counted."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = [tensor.device_mesh.size(at) for at, place in enumerate(tensor.placements) if isinstance(place, Shard)]
    assert all(not isinstance(place, Shard) or place.dim == 0 for place in tensor.placements), "sharded on dim 0 alone"
    return sizes[0] if sizes else 1


class Source(Protocol):
    """Rank 0's side of a broadcast: full tensors by name, asked for once each, in the model's order."""

    def take(self, name: str) -> Tensor | None: ...


class BuiltSource:
    """A real copy of the model on the host, given away parameter by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def take(self, name: str) -> Tensor | None:
        tensor = self._tensors.pop(name, None)
        return None if tensor is None else tensor.detach()


class DrawnSource:
    """Each parameter drawn whole, one at a time: what `--model.init broadcast` sends for models that say their inits."""

    def __init__(self, inits: Mapping[str, Init], shapes: Mapping[str, torch.Size], seed: int) -> None:
        self._inits, self._shapes, self._seed = inits, shapes, seed

    def take(self, name: str) -> Tensor | None:
        if name not in self._inits:
            return None
        shape = self._shapes[name]
        return draw(self._inits[name], self._seed, name, 0, shape.numel()).view(shape)


class StateSource:
    """A pretrained state dict, read lazily; what it lacks comes from `rest`."""

    def __init__(self, state: Mapping[str, Tensor], rest: Source | None) -> None:
        self._state, self._rest = state, rest

    def take(self, name: str) -> Tensor | None:
        if name in self._state:
            return self._state[name]
        return self._rest.take(name) if self._rest else None


def materialize(
    sharded: Sharded,
    *,
    spec: ModelSpec,
    seed: int,
    init: str,
    rank: int,
    weights: Callable[[], Mapping[str, Tensor]] | None = None,
    rest_device: torch.device | None = None,
) -> None:
    """Give every parameter and buffer of a meta model its value, then prove it. Collective.

    `rest_device` is where parameters lie between steps: the host, where they are offloaded.
    """
    root = sharded.root
    methods: Any = root
    inits: Mapping[str, Init] = methods.param_inits() if hasattr(root, "param_inits") else {}
    shapes = {name: parameter.shape for name, parameter in root.named_parameters()}
    device = rest_device or sharded.device
    to_empty(root, device)
    _poison(root)
    if inits and init == "shard" and weights is None:
        _draw_shards(root, inits, seed, rank)
    else:
        source: Source | None = None

        def open_source() -> None:
            nonlocal source
            source = _source(spec, inits, shapes, seed, weights, root)

        # What fails on rank 0 alone is told to all, so that nobody waits for weights that never come.
        on_main(rank, open_source)
        _send_all(sharded, source)
    if hasattr(root, "init_buffers"):
        methods.init_buffers(sharded.device)
    prove(root, rank=rank, drawn={name: i for name, i in inits.items() if weights is None})


# ---------------------------------------------------------------- filling


def _poison(root: nn.Module) -> None:
    """NaN in floats, a rare value in integers: what is still there at the end was never filled."""
    with torch.no_grad():
        for tensor in [*root.parameters(), *root.buffers()]:
            part = local(tensor)
            if part.is_floating_point() or part.is_complex():
                part.fill_(float("nan"))
            elif part.dtype != torch.bool:
                part.fill_(_rare(part.dtype))


def _rare(dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return info.max - 41


@torch.no_grad()
def _draw_shards(root: nn.Module, inits: Mapping[str, Init], seed: int, rank: int) -> None:
    for name, target in [*root.named_parameters(), *root.named_buffers()]:
        if name in inits:  # one that is not is found by name in the proof
            part, count = local(target), shard_count(target)
            draw_into(part, inits[name], seed, name, cut_of(target.shape, rank % count, count).start)


def _source(
    spec: ModelSpec,
    inits: Mapping[str, Init],
    shapes: Mapping[str, torch.Size],
    seed: int,
    weights: Callable[[], Mapping[str, Tensor]] | None,
    root: nn.Module,
) -> Source:
    """Rank 0's values. A model that says its inits is never built whole, nor is one whose state dict has everything."""
    state = weights() if weights else {}
    names = [*shapes, *(name for name, _ in root.named_buffers())]
    ready = bool(inits) or (all(name in state for name in names) and bool(state))
    rest: Source = DrawnSource(inits, shapes, seed) if ready else BuiltSource(build_on_host(spec, seed))
    if not weights:
        return rest
    _check_state_fits(state, shapes)
    return StateSource(state, rest if not inits else _BuffersOnly(rest, set(shapes)))


class _BuffersOnly:
    """Beside a pretrained state no parameter may be drawn in silence."""

    def __init__(self, rest: Source, parameters: set[str]) -> None:
        self._rest, self._parameters = rest, parameters

    def take(self, name: str) -> Tensor | None:
        return None if name in self._parameters else self._rest.take(name)


def _check_state_fits(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    missing = [name for name in shapes if name not in state]
    if missing:
        raise ConfigError(
            f"--model.weights has no {missing[0]} ({len(missing)} of {len(shapes)} parameters are missing).",
            "its names must be the model's own: python -m fsdp.checkpoints RUN export writes such a file",
        )
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ConfigError(
                f"--model.weights has {name} as {tuple(state[name].shape)}, the model as {tuple(shape)}.",
                "give --model.preset and --model.args as the weights were trained with",
            )


def build_on_host(spec: ModelSpec, seed: int) -> nn.Module:
    """The real model. Memory that its constructor leaves uninitialised reads NaN, and the proof then names it."""
    fills: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills.fill_uninitialized_memory = True
    try:
        with seeded(seed), torch.device("cpu"):
            return spec.build()
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        fills.fill_uninitialized_memory = filled


@torch.no_grad()
def _send_all(sharded: Sharded, source: Source | None) -> None:
    root = sharded.root
    own_buffers = hasattr(root, "init_buffers")
    persistent = root.state_dict().keys() if own_buffers else ()
    sent = [(n, b) for n, b in root.named_buffers() if not own_buffers or n in persistent]
    for name, target in [*root.named_parameters(), *sent]:
        full = source.take(name) if source is not None else None
        if shard_count(target) == 1:
            _broadcast_whole(target, full, is_source=source is not None)
        else:
            _scatter_rows(target, full, sharded, is_source=source is not None)


def _broadcast_whole(target: Tensor, full: Tensor | None, *, is_source: bool) -> None:
    part = local(target)
    wire = _bytes(_or_poison(full, target)) if is_source else _bytes(torch.empty_like(part))
    wire = wire.to(part.device)
    dist.broadcast(wire, src=0)
    part.copy_(wire.view(part.dtype).view(part.shape))


def _scatter_rows(target: Tensor, full: Tensor | None, sharded: Sharded, *, is_source: bool) -> None:
    """A piece to each shard of the first replica, then along dp_replicate: rank 0 sends the model once, whatever the ranks."""
    part, count = local(target), shard_count(target)
    chunk = -(-target.shape[0] // count) * target.shape[1:].numel() * part.element_size()
    received = torch.empty(chunk, dtype=torch.uint8, device=part.device)
    if dist.get_rank() < count:
        pieces = _padded_pieces(_bytes(_or_poison(full, target)).to(part.device), chunk, count) if is_source else None
        dist.scatter(received, pieces, src=0, group=sharded.mesh.get_group("dp_shard"))
    if sharded.sizes.replicate > 1:
        dist.broadcast(received, src=dist.get_rank() % count, group=sharded.mesh.get_group("dp_replicate"))
    part.copy_(received[: part.numel() * part.element_size()].view(part.dtype).view(part.shape))


def _padded_pieces(wire: Tensor, chunk: int, count: int) -> list[Tensor]:
    """Scatter takes equal pieces: views where the rows are there, one padded copy where they end."""
    pieces = []
    for at in range(0, count * chunk, chunk):
        piece = wire[at : at + chunk]
        pieces.append(piece if piece.numel() == chunk else torch.cat([piece, piece.new_zeros(chunk - piece.numel())]))
    return pieces


def _bytes(tensor: Tensor) -> Tensor:
    """Raw bytes: neither gloo nor NCCL knows complex, and gloo not every small float."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _or_poison(full: Tensor | None, target: Tensor) -> Tensor:
    """Where the source has nothing the poison is sent on, and the proof names it."""
    if full is not None:
        return full.detach().to(dtype=target.dtype)
    floats = target.is_floating_point() or target.is_complex()
    value = float("nan") if floats else target.dtype != torch.bool and _rare(target.dtype)
    return torch.full(target.shape, value, dtype=target.dtype)


# ---------------------------------------------------------------- proving


@torch.no_grad()
def prove(root: nn.Module, *, rank: int, drawn: Mapping[str, Init]) -> None:
    """Stop the run by name: a value left uninitialised, a buffer nobody filled, equal shards, replicas that differ."""
    findings = [*_unfilled(root)]
    table = _digests(root)
    told: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(told, findings)
    problems = [f"rank {r}: {text}" for r, texts in enumerate(told) for text in texts]
    if not problems:
        problems = _compare(root, table, drawn)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TrainingError(
            f"{problems[0]}{more}", "the model's initialisation must fill every parameter and buffer on each rank"
        )


def _unfilled(root: nn.Module) -> Iterator[str]:
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in named:
            part = local(tensor)
            if part.is_meta:
                yield f"{kind} {name} is still on the meta device"
            elif part.numel() and _is_poisoned(part):
                yield f"{kind} {name} was never initialised"
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                owner = name or type(root).__name__
                yield f"{owner}.{key} is a tensor that no register_buffer made, and is still on the meta device"


def _is_poisoned(part: Tensor) -> bool:
    if part.is_floating_point() or part.is_complex():
        return bool(part.isnan().any())
    return part.dtype != torch.bool and bool((part == _rare(part.dtype)).all())


def _digests(root: nn.Module) -> Tensor:
    """A row a tensor: numel, plain sum, weighted sum, constant; as int64 for the wire."""
    rows = []
    for tensor in [*root.parameters(), *root.buffers()]:
        d = digest_shard(local(tensor))
        rows.append([d.numel, _signed(d.plain), _signed(d.weighted), int(d.constant)])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _compare(root: nn.Module, table: Tensor, drawn: Mapping[str, Init]) -> list[str]:
    """Every rank's digests side by side. Equal shards are an error where values are drawn; elsewhere they may be meant."""
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    named = [*root.named_parameters(), *root.named_buffers()]
    found: list[str] = []
    for row, (name, tensor) in enumerate(named):
        count = shard_count(tensor)
        digests = [tuple(t[row].tolist()) for t in tables]
        random = name in drawn and not isinstance(drawn[name], Constant)
        found += _differing_replicas(name, digests, count)
        found += _equal_shards(name, digests, count) if random else []
    return found


def _differing_replicas(name: str, digests: list[tuple[int, ...]], count: int) -> list[str]:
    return [
        f"{name} differs between ranks {rank % count} and {rank}, which hold the same shard"
        for rank in range(count, len(digests))
        if digests[rank] != digests[rank % count]
    ][:1]


def _equal_shards(name: str, digests: list[tuple[int, ...]], count: int) -> list[str]:
    seen: dict[tuple[int, ...], int] = {}
    for rank in range(count):
        numel, _, _, constant = digests[rank]
        if numel and not constant:
            if digests[rank] in seen:
                return [f"{name} is the same on ranks {seen[digests[rank]]} and {rank}, which hold different shards"]
            seen[digests[rank]] = rank
    return []


def state_digest(root: nn.Module) -> dict[str, int]:
    """One number a tensor for the whole model, equal at any number of ranks. Collective."""
    table = _digests(root)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    whole: dict[str, int] = {}
    for row, (name, tensor) in enumerate([*root.named_parameters(), *root.named_buffers()]):
        count = shard_count(tensor)
        parts = []
        for index in range(count):
            _, plain, weighted, _ = (int(v) for v in tables[index][row])
            parts.append(weighted + 2 * cut_of(tensor.shape, index, count).start * plain)
        whole[name] = combine(parts)
    return whole

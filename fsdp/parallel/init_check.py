"""The check that every value was initialised: memory is poisoned before, searched after, and digests of all
ranks are compared.

Also here: a digest of the whole model. Not here: what fills the
memory (materialize.py).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.base.digest import as_int64, combine, digest_shard
from fsdp.base.errors import TrainingError
from fsdp.dist.collectives import all_gather_objects
from fsdp.dist.shards import cut_of, local_tensor, shard_count
from fsdp.models.init import Constant, Init


def poison(root: nn.Module) -> None:
    """NaN in floats, a rare value in integers: a value that is still there at the end was never
    initialised.
    """
    with torch.no_grad():
        for tensor in [*root.parameters(), *root.buffers()]:
            fill_with_poison(local_tensor(tensor))


def fill_with_poison(part: Tensor) -> None:
    if part.is_floating_point() or part.is_complex():
        part.fill_(float("nan"))
    else:
        part.view(_plain(part.dtype)).fill_(_rare(part.dtype))


def _plain(dtype: torch.dtype) -> torch.dtype:
    """A bool's byte can hold a value that is neither True nor False."""
    return torch.uint8 if dtype == torch.bool else dtype


def _rare(dtype: torch.dtype) -> int:
    return torch.iinfo(_plain(dtype)).max - 41


@torch.no_grad()
def check_initialised(
    root: nn.Module, *, drawn: Mapping[str, Init], loaded: Collection[str] = frozenset()
) -> None:
    """Stops the run by name for a value left uninitialised, a buffer nobody filled, equal shards, or
    replicas that differ. `loaded` are the tensors that were read from weights, which may have NaN.
    """
    problems = _everyones([*_unfilled(root, known=(), loaded=loaded)])
    if problems and loaded:
        _refuse(problems, "give weights without NaN, and with everything that the model does not fill")
    if not problems:
        problems = [(text, ()) for text in _compare(root, drawn)]
    _refuse(problems)


def check_unsaved(root: nn.Module) -> None:
    """The same for values that no checkpoint holds, before one fills the rest. Collective."""
    _refuse(_everyones([*_unfilled(root, known=root.state_dict().keys())]))


def _everyones(findings: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Every rank's findings, each with that rank."""
    return [
        (f"rank {rank}: {text}", (rank,))
        for rank, texts in enumerate(all_gather_objects(findings))
        for text in texts
    ]


def _refuse(
    problems: list[tuple[str, tuple[int, ...]]],
    hint: str = "the model's initialisation must fill every parameter and buffer on each rank",
) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        text, ranks = problems[0]
        raise TrainingError(f"{text}{more}.", hint, ranks=ranks)


def _unfilled(root: nn.Module, known: Container[str], loaded: Container[str] = frozenset()) -> Iterator[str]:
    for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for name, tensor in named:
            if name in known:
                continue
            part = local_tensor(tensor)
            if part.is_meta:
                yield f"{kind} {name} is still on the meta device"
            elif part.numel() and _is_poisoned(part):
                what = "has NaN in the weights" if name in loaded else "was never initialised"
                yield f"{kind} {name} {what}"
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                owner = name or type(root).__name__
                yield (
                    f"{owner}.{key} is a tensor that no register_buffer made, and is still on the meta device"
                )


def _is_poisoned(part: Tensor) -> bool:
    if part.is_floating_point() or part.is_complex():
        return bool(part.isnan().any())
    return bool((part.view(_plain(part.dtype)) == _rare(part.dtype)).all())


def _digests(root: nn.Module) -> list[Tensor]:
    """Every rank's table, with a row for each tensor: numel, plain sum, weighted sum, constant."""
    rows = []
    for tensor in [*root.parameters(), *root.buffers()]:
        d = digest_shard(local_tensor(tensor))
        rows.append([d.numel, as_int64(d.plain), as_int64(d.weighted), int(d.constant)])
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    return tables


def _compare(root: nn.Module, drawn: Mapping[str, Init]) -> list[str]:
    """Compares every rank's digests. Equal shards are an error where values are random; elsewhere they
    may be intended.
    """
    tables = _digests(root)
    named = [*root.named_parameters(), *root.named_buffers()]
    found: list[str] = []
    equal: dict[str, list[str]] = {}
    for row, (name, tensor) in enumerate(named):
        count = shard_count(tensor)
        digests = [tuple(t[row].tolist()) for t in tables]
        found += _differing_replicas(name, digests, count)
        if _varied(digests, count):
            equal[name] = _equal_shards(name, digests, count)
    at_random = {n for n in equal if n in drawn and not isinstance(drawn[n], Constant)}
    # One parameter may have equal shards on purpose, but never all of them.
    suspects = at_random or (set(equal) if all(equal.values()) else set())
    return found + [text for name in equal if name in suspects for text in equal[name]]


def _varied(digests: list[tuple[int, ...]], count: int) -> bool:
    """Several non-empty shards, and not one value throughout."""
    return sum(numel > 0 and not constant for numel, _, _, constant in digests[:count]) > 1


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
                return [
                    f"{name} is the same on ranks {seen[digests[rank]]} and {rank}, which hold different "
                    "shards"
                ]
            seen[digests[rank]] = rank
    return []


def state_digest(root: nn.Module) -> dict[str, int]:
    """One number a tensor for the whole model, equal at any number of ranks. Collective."""
    tables = _digests(root)
    whole: dict[str, int] = {}
    for row, (name, tensor) in enumerate([*root.named_parameters(), *root.named_buffers()]):
        count = shard_count(tensor)
        parts = []
        for index in range(count):
            _, plain, weighted, _ = (int(v) for v in tables[index][row])
            parts.append(weighted + 2 * cut_of(tensor.shape, index, count).start * plain)
        whole[name] = combine(parts)
    return whole

"""Whole matrices from shards and back: which rank orthogonalizes which matrix, and the rows in between.

Ranks are numbered as the mesh is: dp_shard is its last axis. A matrix of S shards has its rows on the S ranks
of each replica; a matrix that is not sharded is whole on every rank. Its owner receives the rows of its own
replica and sends each rank, of any replica, the rows of the result. So replicas share the work and have the
same bits. The matrices of a round move in two all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp.dist import collectives
from fsdp.dist.shards import rows_of, shard_axis, shard_count

OWNED = 1 << 26
"""Elements of a rank's own matrices in one round: 128 MiB of bf16 for each of its buffers."""


@dataclass(frozen=True)
class Matrix:
    """The shape of a whole matrix, and the number of shards it is divided into: 1 if it is whole on each
    rank.
    """

    rows: int
    columns: int
    shards: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Operations of a Newton–Schulz step, up to a factor."""
        short, long = sorted((self.rows, self.columns))
        return short * short * (2 * long + short)

    def rows_of(self, rank: int) -> slice:
        kept = rows_of(self.rows, rank % self.shards, self.shards)
        return slice(kept.start, kept.stop)

    def size_on(self, rank: int) -> int:
        return len(rows_of(self.rows, rank % self.shards, self.shards)) * self.columns

    def same_replica(self, rank: int, other: int) -> bool:
        return rank // self.shards == other // self.shards


def matrix_of(parameter: Tensor) -> Matrix:
    if isinstance(parameter, DTensor):
        last = parameter.device_mesh.ndim - 1
        assert shard_axis(parameter) in (None, last), "sharded along the last axis of the mesh"
    rows, columns = parameter.shape
    return Matrix(rows, columns, shard_count(parameter))


Round = list[list[int]]
"""The matrices that each rank owns, by rank."""


def rounds(matrices: Sequence[Matrix], ranks: int, owned: int = OWNED) -> list[Round]:
    """Every matrix in one round and with one owner; within a round the owners' costs are even."""
    order = sorted(range(len(matrices)), key=lambda at: (-matrices[at].cost, at))
    return [_shared(matrices, some, ranks) for some in _divided(matrices, order, ranks, owned * ranks)]


def _divided(matrices: Sequence[Matrix], order: Sequence[int], ranks: int, most: int) -> Iterator[list[int]]:
    """Rounds of at most that many elements, with at least one matrix for each rank."""
    current: list[int] = []
    size = 0
    for at in order:
        if len(current) >= ranks and size + matrices[at].numel > most:
            yield current
            current, size = [], 0
        current.append(at)
        size += matrices[at].numel
    if current:
        yield current


def _shared(matrices: Sequence[Matrix], some: Sequence[int], ranks: int) -> Round:
    """Costliest first, each to the rank that has least."""
    found: Round = [[] for _ in range(ranks)]
    cost = [0] * ranks
    for at in some:
        owner = cost.index(min(cost))
        found[owner].append(at)
        cost[owner] += matrices[at].cost
    return found


def apply_to_whole(
    matrices: Sequence[Matrix],
    owned: Round,
    rows: Callable[[int], Tensor],
    change: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """(matrix, this rank's rows of `change` of the whole matrix) for each matrix of a round. Collective.

    `rows` returns this rank's rows, which are sent in `dtype`, the dtype of the result.
    """
    rank, ranks = collectives.this_rank(), len(owned)
    mine = owned[rank]

    def sends(at: int, sender: int, receiver: int) -> bool:
        return matrices[at].same_replica(sender, receiver)

    to = [[at for at in owned[other] if sends(at, rank, other)] for other in range(ranks)]
    sent = torch.cat(
        [rows(at).reshape(-1).to(device, dtype) for some in to for at in some]
        or [torch.empty(0, dtype=dtype, device=device)]
    )
    received = collectives.all_to_all(
        sent,
        [sum(matrices[at].size_on(rank) for at in some) for some in to],
        [sum(matrices[at].size_on(other) for at in mine if sends(at, other, rank)) for other in range(ranks)],
    )
    del sent
    pieces: dict[int, list[Tensor]] = {at: [] for at in mine}
    came = [(at, other) for other in range(ranks) for at in mine if sends(at, other, rank)]
    sizes = [matrices[at].size_on(other) for at, other in came]
    for (at, _), piece in zip(came, received.split(sizes), strict=True):
        pieces[at].append(piece)
    results = {}
    for at in mine:
        whole = torch.cat(pieces.pop(at)).view(matrices[at].rows, matrices[at].columns)
        results[at] = change(whole)
        del whole
    del received
    yield from _returned(matrices, owned, results, rank, dtype, device)


def _returned(
    matrices: Sequence[Matrix],
    owned: Round,
    results: dict[int, Tensor],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Sends each rank its rows of the results, and yields this rank's rows of all."""
    ranks = len(owned)
    sent = torch.cat(
        [results[at][matrices[at].rows_of(other)].reshape(-1) for other in range(ranks) for at in owned[rank]]
        or [torch.empty(0, dtype=dtype, device=device)]
    )
    results.clear()
    came = [at for some in owned for at in some]
    received = collectives.all_to_all(
        sent,
        [sum(matrices[at].size_on(other) for at in owned[rank]) for other in range(ranks)],
        [sum(matrices[at].size_on(rank) for at in some) for some in owned],
    )
    del sent
    sizes = [matrices[at].size_on(rank) for at in came]
    for at, piece in zip(came, received.split(sizes), strict=True):
        yield at, piece.view(-1, matrices[at].columns)

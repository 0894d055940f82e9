"""One rank's file of a save, written from the staging buffer with its checksums made on the way.

All of it runs behind the training step, in a thread: the long calls (crc32, write, fsync) let the interpreter go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fsdp.checkpoint import boxes, container, names
from fsdp.checkpoint.crc import combine, crc32
from fsdp.checkpoint.staging import Staged
from fsdp.checkpoint.store import Buffer, Store

SMALL = 4096  # below this, crc32 over the bytes is cheaper than combining


@dataclass
class Written:
    """What a rank tells of its file: its size and checksum, and its share of each tensor's digest."""

    file: str
    size: int = 0
    crc: int = 0
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key → elements of the whole tensor, and this rank's share of its digest."""


def write_file(store: Store, folder: str, rank: int, staged: list[Staged], tail: Iterable[bytes]) -> Written:
    """Write this rank's file; `tail` are the packed values, on rank 0."""
    written = Written(names.data_file(rank))
    store.write(folder, written.file, _Stream(staged, list(tail), written))
    return written


@dataclass
class _Stream:
    """The file's bytes in order, as often as asked: a store that tries again begins anew."""

    staged: list[Staged]
    tail: list[bytes]
    written: Written

    def __iter__(self) -> Iterator[Buffer]:
        return _stream(self.staged, self.tail, self.written)


def _stream(staged: list[Staged], tail: Iterable[bytes], written: Written) -> Iterator[Buffer]:
    written.size, written.crc, written.shares = 0, 0, {}
    for one in staged:
        data_crc = crc32(one.flat)
        head, end = container.frame(one.tensor.dtype, tuple(one.tensor.shape), len(one.flat), data_crc)
        end += bytes(_padding(written.size + len(head) + len(one.flat) + len(end)))
        written.crc = crc32(head, written.crc)
        written.crc = crc32(one.flat, written.crc) if len(one.flat) < SMALL else combine(written.crc, data_crc, len(one.flat))
        written.crc = crc32(end, written.crc)
        written.size += len(head) + len(one.flat) + len(end)
        _add_share(written, one)
        yield from (head, one.flat, end)
    for value in tail:
        written.crc = crc32(value, written.crc)
        written.size += len(value)
        yield value


def _padding(size: int) -> int:
    return container.aligned(size) - size


def _add_share(written: Written, one: Staged) -> None:
    piece = one.piece
    offsets = (piece.offsets[0] + one.part.first, *piece.offsets[1:]) if piece.offsets else ()
    share = boxes.digest(one.tensor, offsets, piece.size)
    for key in (piece.key, *(key for key, _ in piece.aliases)):
        numel, sum_so_far = written.shares.get(key, (math.prod(piece.size), 0))
        written.shares[key] = (numel, (sum_so_far + share) % 2**64)

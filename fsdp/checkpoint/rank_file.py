"""One rank's file of a save: the staged image gets its frames and its checksums, and is written.

All of it runs behind the training step, in a thread: the long calls (crc32, write, fsync) let the interpreter
go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp.base.phases import Activity, announces
from fsdp.checkpoint import file_names, pieces, torch_file
from fsdp.checkpoint.crc import combine, crc32
from fsdp.checkpoint.staging import Image, Staged
from fsdp.checkpoint.store import Store

SMALL = 4096  # below this, crc32 over the bytes is cheaper than combining


@dataclass
class Written:
    """What a rank tells of its file: its size and checksum, and its share of each tensor's digest."""

    file: str
    size: int = 0
    crc: int = 0
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key → elements of the whole tensor, and this rank's share of its digest."""
    buffers: dict[str, int] = field(default_factory=dict)
    """Digests of this rank's own buffers, of which only rank 0's are kept."""


@announces(Activity.STORAGE)
def write_file(store: Store, folder: str, rank: int, image: Image, values: list[bytes]) -> Written:
    """Write this rank's file; `values` are what is no tensor, on rank 0."""
    written = Written(file_names.data_file(rank))
    for one in image.staged:
        _frame(image, one, written)
        _add_share(written, one)
        image.forget(one.tensor)
    for value in values:
        written.crc = crc32(value, written.crc)
    written.size = len(image.data) + sum(map(len, values))
    store.write(folder, written.file, [image.data, *values])
    return written


def _frame(image: Image, one: Staged, written: Written) -> None:
    """Put head and tail around the data, and add all three to the file's checksum in one pass over them."""
    count = one.tensor.numel() * one.tensor.element_size()
    first = one.start + torch_file.HEAD
    data = image.data[first : first + count]
    data_crc = crc32(data)
    head, tail = torch_file.frame(one.tensor.dtype, tuple(one.tensor.shape), count, data_crc)
    tail += bytes(one.end - first - count - len(tail))
    image.data[one.start : first] = head
    image.data[first + count : one.end] = tail
    crc = crc32(head, written.crc)
    crc = crc32(data, crc) if count < SMALL else combine(crc, data_crc, count)
    written.crc = crc32(tail, crc)


def _add_share(written: Written, one: Staged) -> None:
    piece = one.piece
    offsets = (piece.offsets[0] + one.part.first, *piece.offsets[1:]) if piece.offsets else ()
    share = pieces.digest(one.tensor, offsets, piece.size)
    for key in (piece.key, *(key for key, _ in piece.aliases)):
        numel, sum_so_far = written.shares.get(key, (math.prod(piece.size), 0))
        written.shares[key] = (numel, (sum_so_far + share) % 2**64)

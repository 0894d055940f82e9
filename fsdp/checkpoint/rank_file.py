"""One rank's file of a save: adds frames and checksums to the staged image and writes it.

It runs in a thread beside the training step: the long calls (crc32, write, fsync) release the GIL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fsdp.base.phases import Activity, announces
from fsdp.checkpoint import file_names, pieces, torch_file
from fsdp.checkpoint.crc import combine, crc32
from fsdp.checkpoint.staging import Image, Staged
from fsdp.checkpoint.store import Store
from fsdp.checkpoint.write_plan import Shares, WritePlan, pack_shares

SMALL = 4096  # below this, crc32 over the bytes is cheaper than combining


@dataclass
class Written:
    """A rank's report of its file: size, checksum, and its share of each tensor's digest."""

    file: str
    size: int = 0
    crc: int = 0
    shares: Shares | None = None
    """This rank's shares of the tensors' digests."""
    buffers: dict[str, int] = field(default_factory=dict)
    """Digests of this rank's own buffers; the checkpoint keeps rank 0's buffers."""


@announces(Activity.STORAGE)
def write_file(
    store: Store, folder: str, rank: int, image: Image, values: list[bytes], plan: WritePlan
) -> Written:
    """Writes this rank's file; `values` are the pickled values other than tensors, on rank 0."""
    written = Written(file_names.data_file(rank))
    shares: Counter[str] = Counter()
    for one in image.staged:
        _frame(image, one, written)
        shares[one.piece.key] += _share(one)
        image.forget(one.tensor)
    written.shares = pack_shares(plan, shares)
    for value in values:
        written.crc = crc32(value, written.crc)
    written.size = len(image.data) + sum(map(len, values))
    store.write(folder, written.file, [image.data, *values])
    return written


def _frame(image: Image, one: Staged, written: Written) -> None:
    """Writes head and tail around the data, and adds all three to the file's checksum in one pass."""
    count = one.tensor.nbytes
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


def _share(one: Staged) -> int:
    """This file's share of the tensor's digest."""
    piece = one.piece
    offsets = (piece.offsets[0] + one.part.first, *piece.offsets[1:]) if piece.offsets else ()
    return pieces.digest(one.tensor, offsets, piece.size)

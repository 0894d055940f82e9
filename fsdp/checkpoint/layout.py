"""The layout of a save: which rank writes which rows of each tensor, as columns of numbers.

70B parameters on 4,096 ranks are millions of parts, but only some ten ways to cut a tensor: all layers'
tensors of one shape are cut alike. Each way is a Division, whatever the number of tensors. Every rank sends
its boxes (RankBoxes); the layout goes to every rank, which finds its own parts in it.

Replicas hold the same boxes: a large one is cut by rows over its holders, a small one goes to the holder with
the least to write, so each byte is written once and the ranks write equal amounts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from fsdp.checkpoint import torch_file
from fsdp.checkpoint.snapshot import KeyPath, Piece

SPLIT_BYTES = 1 << 20


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor of the state, the same on every rank."""

    keys: tuple[tuple[str, KeyPath], ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    buffer: bool = False

    @property
    def numbers(self) -> int:
        """Numbers of a box in RankBoxes: whether the rank has one, offsets, sizes."""
        return 1 + 2 * len(self.size)


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of the piece with this index; a scalar has one row, 0."""

    index: int
    first: int
    last: int


@dataclass(frozen=True)
class Writers:
    """The parts of a tensor in the order of their ranks. `first` and `last` are rows of the rank's own box;
    `offsets` and `sizes` are in the whole tensor.
    """

    ranks: np.ndarray
    first: np.ndarray
    last: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @property
    def numel(self) -> np.ndarray:
        return self.sizes.prod(axis=1, dtype=np.int64)


@dataclass(frozen=True)
class Division:
    """How tensors of one kind are distributed."""

    fixed: Writers
    """Boxes of one holder, and those that their holders share by rows."""
    holders: np.ndarray
    """Each other box's holders, of which one writes it; -1 fills a row."""
    offsets: np.ndarray
    sizes: np.ndarray


@dataclass
class Layout:
    tensors: Sequence[WholeTensor]
    divisions: list[Division]
    division_of: np.ndarray
    """Tensor → its division."""
    ranks: int
    chosen: dict[int, np.ndarray] = field(default_factory=dict)
    """Tensor → the writers of those boxes of its division that have several holders."""

    def writers(self, tensor: int) -> Writers:
        division = self.divisions[self.division_of[tensor]]
        if tensor not in self.chosen:
            return division.fixed
        ranks, rows = self.chosen[tensor], _rows(division.sizes)
        whole = Writers(
            np.concatenate([division.fixed.ranks, ranks]),
            np.concatenate([division.fixed.first, np.zeros_like(rows)]),
            np.concatenate([division.fixed.last, rows]),
            np.concatenate([division.fixed.offsets, division.offsets]),
            np.concatenate([division.fixed.sizes, division.sizes]),
        )
        return _taken(whole, np.argsort(whole.ranks, kind="stable"))

    def parts_of(self, rank: int) -> list[tuple[int, int, int]]:
        """(tensor, first, last) of what this rank writes, in the order of its file."""
        found = []
        fixed = [_row_of(division.fixed, rank) for division in self.divisions]
        for tensor, division in enumerate(self.division_of.tolist()):
            if (rows := fixed[division]) is not None:
                found.append((tensor, *rows))
            elif tensor in self.chosen and (at := np.flatnonzero(self.chosen[tensor] == rank)).size:
                found.append((tensor, 0, int(_rows(self.divisions[division].sizes)[at[0]])))
        return found

    def lengths(self, tensor: int, writers: Writers) -> np.ndarray:
        """Bytes of each part in its file."""
        return torch_file.item_length(writers.numel * self.tensors[tensor].dtype.itemsize)

    def places(self) -> Iterator[tuple[int, Writers, np.ndarray, np.ndarray]]:
        """Each tensor with its writers, where each part begins in its rank's file, and its length there."""
        ends = np.zeros(self.ranks, np.int64)
        for tensor in range(len(self.tensors)):
            writers = self.writers(tensor)
            begins, lengths = ends[writers.ranks], self.lengths(tensor, writers)
            ends[writers.ranks] = torch_file.aligned(begins + lengths)
            yield tensor, writers, begins, lengths

    @cached_property
    def values_begin(self) -> int:
        """Where rank 0's parts end in its file: values other than tensors follow."""
        end = 0
        for _, writers, begins, lengths in self.places():
            if len(begins) and not writers.ranks[0]:
                end = torch_file.aligned(int(begins[0] + lengths[0]))
        return end


# ---------------------------------------------------------------- what ranks send


def describe(piece: Piece) -> WholeTensor:
    keys = ((piece.key, piece.path), *piece.aliases)
    return WholeTensor(keys, piece.size, piece.local.dtype, piece.buffer)


@dataclass(frozen=True)
class RankBoxes:
    """Tensors of one size and box are of one kind, of which a rank has few. It sends a number for each
    tensor, alike on most ranks, and a box for each kind.
    """

    kinds: bytes
    """Tensor → its kind, compressed. Kinds are counted as they appear."""
    boxes: bytes
    """Of each kind whether the rank has such a box, its offsets and its sizes."""


def pack_boxes(
    tensors: Sequence[WholeTensor], boxes: Mapping[int, tuple[Sequence[int], Sequence[int]]]
) -> RankBoxes:
    """This rank's box (offsets, sizes) of each tensor that it has."""
    kinds: dict[tuple[object, ...], int] = {}
    kind_of, described = [], list[tuple[int, ...]]()
    for nth, tensor in enumerate(tensors):
        box = (1, *boxes[nth][0], *boxes[nth][1]) if nth in boxes else (0,) * tensor.numbers
        kind = kinds.setdefault((tensor.size, box), len(kinds))
        if kind == len(described):
            described.append(box)
        kind_of.append(kind)
    numbers = np.array([number for box in described for number in box], np.int64)
    return RankBoxes(zlib.compress(np.array(kind_of, np.int32).tobytes(), 1), numbers.tobytes())


# ---------------------------------------------------------------- making it


def make_layout(tensors: Sequence[WholeTensor], sent: Sequence[RankBoxes]) -> Layout:
    """From what every rank sends, in the order of ranks."""
    ranks_of = _by_kinds(sent)
    first_of, alike = _alike(tensors, [kinds for kinds, _ in ranks_of])
    columns = [np.zeros((len(sent), tensors[one].numbers), np.int64) for one in first_of]
    for kinds, ranks in ranks_of:
        boxes = _boxes(tensors, kinds, [sent[rank].boxes for rank in ranks])
        for one, table in zip(first_of, columns, strict=True):
            table[ranks] = boxes[kinds[one]]
    divisions = [_division(tensors[one], table) for one, table in zip(first_of, columns, strict=True)]
    layout = Layout(tensors, divisions, alike, len(sent))
    _choose(layout)
    return layout


def _by_kinds(sent: Sequence[RankBoxes]) -> list[tuple[np.ndarray, list[int]]]:
    """Tensor → kind, with the ranks on which it is so."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, boxes in enumerate(sent):
        ranks_of.setdefault(boxes.kinds, []).append(rank)
    return [(np.frombuffer(zlib.decompress(kinds), np.int32), ranks) for kinds, ranks in ranks_of.items()]


def _alike(tensors: Sequence[WholeTensor], kinds: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """The first tensor of each class of those with the same size, dtype and, on every rank, box; and tensor →
    its class.
    """
    seen: dict[object, int] = {}
    classes = np.array(
        [seen.setdefault((one.size, one.dtype, one.buffer), len(seen)) for one in tensors], np.int64
    )
    for one in kinds:
        _, classes = np.unique(classes * len(one) + one, return_inverse=True)
    _, first_of, classes = np.unique(classes, return_index=True, return_inverse=True)
    in_order = np.argsort(first_of)  # divisions in the order of tensors
    return first_of[in_order].tolist(), np.argsort(in_order)[classes.ravel()]


def _boxes(
    tensors: Sequence[WholeTensor], kinds: np.ndarray, packed: Sequence[bytes]
) -> dict[int, np.ndarray]:
    """Kind → its box on each of the ranks that have these kinds."""
    table = np.frombuffer(b"".join(packed), np.int64).reshape(len(packed), -1)
    found, start = {}, 0
    for kind, first in zip(*np.unique(kinds, return_index=True), strict=True):
        found[int(kind)] = table[:, start : start + tensors[first].numbers]
        start += tensors[first].numbers
    return found


def _division(tensor: WholeTensor, table: np.ndarray) -> Division:
    dims = len(tensor.size)
    holders = np.flatnonzero(table[:, 0])
    boxes, box_of = _unique(table[holders, 1:])
    nth, count = _places(box_of, len(boxes))
    mine = boxes[box_of]
    rows = _rows(mine[:, dims:])
    if tensor.buffer:  # the first rank's: statistics of different ranks must not mix
        holders, mine, rows, nth = (one[nth == 0] for one in (holders, mine, rows, nth))
        count = np.ones_like(count)
        box_of = np.arange(len(boxes))
    nbytes = mine[:, dims:].prod(axis=1, dtype=np.int64) * tensor.dtype.itemsize
    sharing = count[box_of]
    split = np.where((nbytes >= SPLIT_BYTES) & (rows >= sharing), sharing, 1)
    fixed = (split > 1) | (sharing == 1)
    first, last = nth * rows // split, (nth + 1) * rows // split
    offsets, sizes = mine[:, :dims].copy(), mine[:, dims:].copy()
    if dims:
        offsets[:, 0] += first
        sizes[:, 0] = last - first
    written = _taken(Writers(holders.astype(np.int32), first, last, offsets, sizes), np.flatnonzero(fixed))
    others = np.unique(box_of[~fixed])
    groups = [holders[box_of == box] for box in others.tolist()]
    matrix = np.full((len(groups), max(map(len, groups), default=0)), -1, np.int32)
    for line, group in zip(matrix, groups, strict=True):
        line[: len(group)] = group
    return Division(written, matrix, boxes[others, :dims], boxes[others, dims:])


def _unique(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different rows, and which of them each row is."""
    if not boxes.shape[1]:
        return boxes[:1], np.zeros(len(boxes), np.int64)
    found, which = np.unique(boxes, axis=0, return_inverse=True)
    return found, which.ravel()


def _places(box_of: np.ndarray, boxes: int) -> tuple[np.ndarray, np.ndarray]:
    """Each holder's place among those of its box, in the order of ranks; and each box's number of holders."""
    count = np.bincount(box_of, minlength=boxes)
    order = np.argsort(box_of, kind="stable")
    nth = np.empty(len(box_of), np.int64)
    nth[order] = np.arange(len(box_of)) - (np.cumsum(count) - count)[box_of[order]]
    return nth, count


def _choose(layout: Layout) -> None:
    """The writer of each small box with several holders, largest first: the one with the least to write."""
    load = np.zeros(layout.ranks, np.int64)
    times = np.bincount(layout.division_of, minlength=len(layout.divisions))
    for tensor in np.unique(layout.division_of, return_index=True)[1].tolist():
        fixed = layout.divisions[layout.division_of[tensor]].fixed
        load[fixed.ranks] += layout.lengths(tensor, fixed) * times[layout.division_of[tensor]]
    several = [
        nth
        for nth, division in enumerate(layout.division_of.tolist())
        if len(layout.divisions[division].holders)
    ]
    for tensor in sorted(
        several, key=lambda nth: -layout.divisions[layout.division_of[nth]].sizes.prod(axis=1).max()
    ):
        division = layout.divisions[layout.division_of[tensor]]
        loads = np.where(division.holders < 0, np.iinfo(np.int64).max, load[division.holders])
        writers = division.holders[np.arange(len(loads)), loads.argmin(axis=1)]
        layout.chosen[tensor] = writers
        itemsize = layout.tensors[tensor].dtype.itemsize
        load[writers] += torch_file.item_length(division.sizes.prod(axis=1, dtype=np.int64) * itemsize)


# ---------------------------------------------------------------- helpers


def _rows(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, 0] if sizes.shape[1] else np.ones(len(sizes), np.int64)


def _taken(writers: Writers, which: np.ndarray) -> Writers:
    parts = (writers.ranks, writers.first, writers.last, writers.offsets, writers.sizes)
    return Writers(*(one[which] for one in parts))


def _row_of(writers: Writers, rank: int) -> tuple[int, int] | None:
    at = int(np.searchsorted(writers.ranks, rank))
    if at == len(writers.ranks) or writers.ranks[at] != rank:
        return None
    return int(writers.first[at]), int(writers.last[at])

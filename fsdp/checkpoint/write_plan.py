"""The plan of a save: this rank's parts of each tensor, and on rank 0 the layout of every file.

It is made once, and again only when a tensor appears, disappears or changes its shape. Offsets follow from
sizes: `.metadata` is known before the first byte is written. layout.py decides who writes what;
metadata_pickle.py and layout_file.py write it down.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fsdp.base import garbage
from fsdp.checkpoint import file_names, layout_file
from fsdp.checkpoint.layout import Layout, Part, WholeTensor, describe, make_layout, pack_boxes
from fsdp.checkpoint.metadata_pickle import metadata_pickle
from fsdp.checkpoint.packed import Packed
from fsdp.checkpoint.snapshot import KeyPath, Piece, Snapshot
from fsdp.dist.collectives import ObjectGroup
from fsdp.optim.custom_optimizer import PLAIN

__all__ = [
    "Part", "Shares", "WritePlan", "contents_files", "fingerprint", "make_plan", "pack_shares",
    "pack_values", "sum_digests",
]  # fmt: skip

Values = list[tuple[str, KeyPath, bytes]]
Shares = tuple[np.ndarray, np.ndarray]
"""Tensors of the plan, and a rank's share of the digest of each."""


@dataclass
class WritePlan:
    """This rank's parts (`mine`); on rank 0 also the layout of every file."""

    fingerprint: str
    mine: list[Part]
    tensors: Sequence[WholeTensor] = ()
    """Those of all ranks, in the same order on each."""
    layout: Layout | None = None
    last: tuple[list[tuple[str, int]], dict[str, Packed]] | None = None
    """The last save's `contents_files`, and the lengths of the values in that save."""


def fingerprint(pieces: Iterable[Piece]) -> str:
    """A digest of everything the plan depends on."""
    rows = (
        repr((p.key, [key for key, _ in p.aliases], p.size, p.offsets, p.sizes, p.local.dtype))
        for p in pieces
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def make_plan(snapshot: Snapshot, known: WritePlan | None, group: ObjectGroup) -> WritePlan:
    """The known plan while no rank's tensors have changed, else a new one. Collective."""
    digest = fingerprint(snapshot.pieces)
    changed = group.any_rank(known is None or known.fingerprint != digest)
    if not changed and known is not None:
        return known
    with garbage.held():
        described = [describe(piece) for piece in snapshot.pieces]
        tensors = _all_tensors(described, group)
        place = {tensor: nth for nth, tensor in enumerate(tensors)}
        index = {place[one]: nth for nth, one in enumerate(described)}
        boxes = {nth: (snapshot.pieces[at].offsets, snapshot.pieces[at].sizes) for nth, at in index.items()}
        rows = group.gather(pack_boxes(tensors, boxes))
        layout: Layout = group.broadcast(make_layout(tensors, rows) if rows is not None else None)
        mine = [Part(index[nth], first, last) for nth, first, last in layout.parts_of(group.rank)]
        return WritePlan(digest, mine, tensors, layout if group.rank == 0 else None)


def _all_tensors(described: list[WholeTensor], group: ObjectGroup) -> Sequence[WholeTensor]:
    """Those of every rank, in rank 0's order. Most ranks have no tensor that rank 0 lacks."""
    tensors: list[WholeTensor] = group.broadcast(described if group.rank == 0 else None)
    known = set(tensors)
    others = [one for one in described if one not in known]
    if not group.any_rank(bool(others)):
        return tensors
    found = group.gather(others)
    more = dict.fromkeys(one for theirs in found or () for one in theirs)
    return group.broadcast([*tensors, *more] if group.rank == 0 else None)  # type: ignore[no-any-return]


def pack_values(snapshot: Snapshot) -> Values:
    """The values other than tensors, each as a `torch.save` stream, as DCP stores them. TypeError for a state
    of the optimizer that a resume would refuse.
    """
    packed = []
    for key, (path, value) in snapshot.values.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        if path[:2] == ("optim", "state") and type(value) not in PLAIN:
            _check_readable(key, value, stream)
        packed.append((key, path, stream.getvalue()))
    return packed


def _check_readable(key: str, value: object, stream: io.BytesIO) -> None:
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        raise TypeError(
            f"{key} is a {type(value).__name__}, which no resume reads: keep tensors and plain numbers"
        ) from None


def pack_shares(plan: WritePlan, shares: Mapping[str, int]) -> Shares:
    """A rank's shares of the tensors' digests, by a tensor's first key, as numbers modulo 2⁶⁴: thousands of
    ranks send them.
    """
    place = {one.keys[0][0]: nth for nth, one in enumerate(plan.tensors)}
    held = [(place[key], share) for key, share in shares.items() if key in place]
    return np.array([nth for nth, _ in held], np.int32), np.array(
        [share % 2**64 for _, share in held], np.uint64
    )


def sum_digests(plan: WritePlan, shares: Iterable[Shares]) -> dict[str, tuple[int, str]]:
    """Key → elements and digest of each tensor: the sum of the ranks' shares modulo 2⁶⁴."""
    sums, written = np.zeros(len(plan.tensors), np.uint64), np.zeros(len(plan.tensors), bool)
    for tensors, numbers in shares:
        sums[tensors] += numbers  # a rank has each tensor once
        written[tensors] = True
    return {
        key: (math.prod(tensor.size), f"{total:016x}")
        for tensor, total, any_rank in zip(plan.tensors, sums.tolist(), written.tolist(), strict=True)
        for key, _ in tensor.keys
        if any_rank
    }


def contents_files(plan: WritePlan, values: Values) -> dict[str, Packed]:
    """The layout and `.metadata` of a save: the plan's tensors, then the values at the end of rank 0's file.

    The same bytes are reused while the values keep their lengths.
    """
    assert plan.layout is not None
    lengths = [(key, len(data)) for key, _, data in values]
    if plan.last is None or plan.last[0] != lengths:
        files = {
            file_names.LAYOUT: Packed(layout_file.encode(plan.layout, values)),
            file_names.METADATA: metadata_pickle(plan.layout, values),
        }
        plan.last = (lengths, files)
    return plan.last[1]

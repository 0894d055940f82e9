"""The plan of a save: which rank writes which part of each tensor, at which offset.

It is made once, and again only when a tensor appears, disappears or changes its shape. Replicas hold the same
pieces: a large one is cut by rows over its holders, a small one goes to the holder with the least to write,
so each byte is written once and the ranks write equal amounts. Offsets follow from sizes: `.metadata` is
known before the first byte is written.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp.base import garbage
from fsdp.base.torch_private.saving import StorageInfo
from fsdp.checkpoint import file_names, torch_file
from fsdp.checkpoint.snapshot import KeyPath, Piece, Snapshot
from fsdp.dist.collectives import ObjectGroup

SPLIT_BYTES = 1 << 20

DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class PieceDescription:
    """The description of a piece that ranks exchange."""

    keys: tuple[tuple[str, KeyPath], ...]
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    buffer: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of the piece with this index; a scalar has one row, 0."""

    index: int
    first: int
    last: int


@dataclass
class WritePlan:
    """This rank's parts (`mine`); on rank 0 also the layout of every file."""

    fingerprint: str
    mine: list[Part]
    metadata: Metadata | None = None
    """Until the first save pickles it: at thousands of ranks its objects slow every garbage collection."""
    ends: list[int] = field(default_factory=list)
    """The end of the tensors in each rank's file."""
    last: tuple[list[tuple[str, int]], bytes] | None = None
    """The last save's `.metadata`, and the lengths of the values in that save."""


def describe(piece: Piece) -> PieceDescription:
    keys = ((piece.key, piece.path), *piece.aliases)
    return PieceDescription(keys, piece.size, piece.offsets, piece.sizes, piece.local.dtype, piece.buffer)


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
        described = group.gather([describe(piece) for piece in snapshot.pieces])
        shares = share_out(described) if described is not None else None
        plan = WritePlan(digest, group.scatter(shares))
        if described is not None and shares is not None:
            plan.metadata, plan.ends = lay_out(described, shares)
    return plan


def share_out(described: list[list[PieceDescription]]) -> list[list[Part]]:
    """Each rank's parts, from the pieces of all ranks."""
    holders: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(described):
        for index, one in enumerate(pieces):
            holders[one].append((rank, index))
    load = [0] * len(described)
    shares: list[list[Part]] = [[] for _ in described]
    for one, where in sorted(holders.items(), key=lambda item: -item[0].nbytes):
        rows = one.sizes[0] if one.sizes else 1
        if one.buffer:
            where = where[:1]  # rank 0's: statistics of different ranks must not mix
        cuts = len(where) if one.nbytes >= SPLIT_BYTES and rows >= len(where) else 1
        chosen = where if cuts > 1 else [min(where, key=lambda holder: (load[holder[0]], holder[0]))]
        for nth, (rank, index) in enumerate(chosen):
            part = Part(index, nth * rows // cuts, (nth + 1) * rows // cuts)
            shares[rank].append(part)
            load[rank] += torch_file.item_length(one.nbytes // cuts)
    return [sorted(share, key=lambda part: part.index) for share in shares]


def box(one: PieceDescription, part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a part within the whole tensor."""
    if not one.sizes:
        return one.offsets, one.sizes
    return (one.offsets[0] + part.first, *one.offsets[1:]), (part.last - part.first, *one.sizes[1:])


def lay_out(described: list[list[PieceDescription]], shares: list[list[Part]]) -> tuple[Metadata, list[int]]:
    """DCP's metadata of all tensors, and the end of each file."""
    tensors: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    ends = []
    # One object for equal sizes: a pickle refers to it in three bytes.
    same = functools.cache(torch.Size)
    for one in (one for pieces in described for one in pieces):
        # A loop of its own: the keys are in the model's order, not in that of the files.
        for key, path in one.keys:
            if key not in tensors:
                tensors[key] = TensorStorageMetadata(
                    TensorProperties(dtype=one.dtype), torch.Size(one.size), []
                )
                paths[key] = path
    for rank, share in enumerate(shares):
        at = 0
        for part in share:
            one = described[rank][part.index]
            offsets, sizes = box(one, part)
            length = torch_file.item_length(math.prod(sizes) * one.dtype.itemsize)
            for key, _ in one.keys:
                tensors[key].chunks.append(ChunkStorageMetadata(same(offsets), same(sizes)))
                storage[MetadataIndex(key, offsets)] = StorageInfo(file_names.data_file(rank), at, length)
            at = torch_file.aligned(at + length)
        ends.append(at)
    return Metadata(tensors, paths, storage, version=DCP_VERSION), ends


def pack_values(snapshot: Snapshot) -> list[tuple[str, KeyPath, bytes]]:
    """The values other than tensors, each as a `torch.save` stream, as DCP stores them."""
    packed = []
    for key, (path, value) in snapshot.values.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        packed.append((key, path, stream.getvalue()))
    return packed


def metadata_bytes(plan: WritePlan, values: list[tuple[str, KeyPath, bytes]]) -> bytes:
    """`.metadata` of a save: the plan's tensors, then the values at the end of rank 0's file.

    The same bytes are reused while the values keep their lengths: at thousands of ranks making them takes
    seconds.
    """
    lengths = [(key, len(data)) for key, _, data in values]
    if plan.last is not None and plan.last[0] == lengths:
        return plan.last[1]
    with garbage.held():
        whole: Metadata = plan.metadata or pickle.loads(plan.last[1] if plan.last else b"")
        for key in [
            key for key, entry in whole.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
        ]:
            del (
                whole.state_dict_metadata[key],
                whole.planner_data[key],
                whole.storage_data[MetadataIndex(key)],
            )
        at = plan.ends[0]
        for key, path, data in values:
            whole.state_dict_metadata[key], whole.planner_data[key] = BytesStorageMetadata(), path
            whole.storage_data[MetadataIndex(key)] = StorageInfo(file_names.data_file(0), at, len(data))
            at += len(data)
        plan.last, plan.metadata = (lengths, pickle.dumps(whole)), None
    return plan.last[1]

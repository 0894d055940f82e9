"""Which rank writes which tensors of a save, by DCP's planner, and the `.metadata` that names their places.

The plan is made once, and again only when a tensor appears, disappears or changes its shape. Of a piece that
several ranks hold, the one with the least to write writes it. Offsets follow from sizes: `.metadata` is known
before the first byte is written.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp.base import proc
from fsdp.base.torch_private.saving import StorageInfo
from fsdp.checkpoint import file_names, torch_file
from fsdp.checkpoint.state import KeyPath, Piece, Snapshot
from fsdp.dist.collectives import ObjectGroup
from fsdp.optim.optimizer import PLAIN

DCP_VERSION = "1.0.0"
Values = list[tuple[str, KeyPath, bytes]]
"""Key, path and `torch.save` stream of each value other than a tensor."""


@dataclass
class WritePlan:
    """The pieces that this rank writes (`mine`), by their index; on rank 0 also the places of all tensors."""

    fingerprint: str
    mine: list[int]
    metadata: Metadata | None = None
    values_begin: int = 0
    """Where the values begin in rank 0's file: after its tensors."""
    last: tuple[list[tuple[str, int]], bytes] | None = None
    """The last save's `.metadata`, and the lengths of the values in it."""


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
    with proc.collection_paused():
        plans = group.gather(_local_plan(snapshot.pieces, group.rank))
        metadata, end, keys = _global_plan(plans) if plans is not None else (None, 0, None)
        mine = group.broadcast(keys)[group.rank]
    index = {piece.key: nth for nth, piece in enumerate(snapshot.pieces)}
    return WritePlan(digest, [index[key] for key in mine], metadata, end)


def _local_plan(pieces: Sequence[Piece], rank: int) -> SavePlan:
    # Each rank's forward passes change its own buffers: those of different ranks must not mix.
    items = [_item(piece) for piece in pieces if rank == 0 or not piece.buffer]
    names = {key: path for piece in pieces for key, path in ((piece.key, piece.path), *piece.aliases)}
    tied = {key: piece.key for piece in pieces for key, _ in piece.aliases}
    return SavePlan(items, storage_data=tied, planner_data=names)


def _item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.local.dtype), torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _global_plan(plans: list[SavePlan]) -> tuple[Metadata, int, list[list[str]]]:
    """Rank 0: `.metadata` without values, the end of rank 0's tensors, and the keys that each rank writes."""
    tied = {key: owner for plan in plans for key, owner in plan.storage_data.items()}
    plans, metadata = DefaultSavePlanner().create_global_plan(plans)
    storage, ends = {}, list[int]()
    for rank, plan in enumerate(plans):
        ends.append(0)
        for item in plan.items:
            assert item.tensor_data is not None
            nbytes = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            length = torch_file.item_length(nbytes)
            storage[item.index] = StorageInfo(file_names.data_file(rank), ends[-1], length)
            ends[-1] = torch_file.aligned(ends[-1] + length)
    entries = metadata.state_dict_metadata
    for key, owner in tied.items():
        entries[key] = entries[owner]
        for chunk in chunks(entries[owner]):
            storage[MetadataIndex(key, chunk.offsets)] = storage[MetadataIndex(owner, chunk.offsets)]
    metadata = replace(metadata, storage_data=storage, version=DCP_VERSION)
    return metadata, ends[0], [[item.index.fqn for item in plan.items] for plan in plans]


def chunks(entry: object) -> Sequence[ChunkStorageMetadata]:
    return entry.chunks if isinstance(entry, TensorStorageMetadata) else ()


# ---------------------------------------------------------------- values


def pack_values(snapshot: Snapshot) -> Values:
    """The values other than tensors as DCP stores them. TypeError for a state of the optimizer that a resume
    would refuse.
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


def metadata_bytes(plan: WritePlan, values: Values) -> bytes:
    """`.metadata` of a save; the same bytes while the values keep their lengths."""
    assert plan.metadata is not None
    lengths = [(key, len(data)) for key, _, data in values]
    if plan.last is None or plan.last[0] != lengths:
        entries, storage = dict(plan.metadata.state_dict_metadata), dict(plan.metadata.storage_data)
        paths, begin = dict(plan.metadata.planner_data), plan.values_begin
        for key, path, data in values:
            entries[key], paths[key] = BytesStorageMetadata(), path
            storage[MetadataIndex(key)] = StorageInfo(file_names.data_file(0), begin, len(data))
            begin += len(data)
        with proc.collection_paused():
            plan.last = (lengths, pickle.dumps(Metadata(entries, paths, storage, version=DCP_VERSION)))
    return plan.last[1]


def sum_digests(plan: WritePlan, shares: Iterable[Mapping[str, int]]) -> dict[str, tuple[int, str]]:
    """Key → elements and digest of each tensor: the sum of the ranks' shares modulo 2⁶⁴."""
    assert plan.metadata is not None
    sums: dict[str, int] = {}
    for rank_shares in shares:
        for key, share in rank_shares.items():
            sums[key] = (sums.get(key, 0) + share) % 2**64
    by_entry = {id(plan.metadata.state_dict_metadata[key]): total for key, total in sums.items()}
    return {
        key: (math.prod(entry.size), f"{by_entry[id(entry)]:016x}")
        for key, entry in plan.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and id(entry) in by_entry  # tied keys share an entry
    }

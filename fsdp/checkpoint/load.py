"""A checkpoint into a TrainState, at any number of ranks: read, verify, share among replicas, compare
digests. Collective.

Each byte is read once over all ranks; a replica's piece is read by one of its holders and sent to the rest.
Whatever goes wrong on one rank is told to all before the next collective, so all raise the same Broken.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp.base import garbage
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, inspect, metadata, pieces, tensor_reader
from fsdp.checkpoint.crc import crc32
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.snapshot import Piece
from fsdp.checkpoint.store import Store
from fsdp.checkpoint.tensor_keys import Filling, Want
from fsdp.checkpoint.tensor_reader import ByteRange, Task
from fsdp.dist.collectives import ObjectGroup

SMALL = 1 << 16
_WORD = 2**64

Failure = Broken | CheckpointError


@dataclass
class CheckpointSource:
    """One checkpoint, as rank 0 has opened it for all."""

    store: Store
    folder: str
    metadata: Metadata
    manifest: Manifest | None
    metadata_crc: int = 0


def fill(
    source: CheckpointSource, wants: list[Want], filling: Filling | None, group: ObjectGroup, verify: bool
) -> None:
    """Every want filled and proven, or Broken on every rank and the state not to be used."""
    _choose_readers(wants)
    sums = verify and source.manifest is not None
    segments, values, why = _read_mine(source, wants, filling, sums)
    _hear(group.gather((why, segments)), source, group, sums)
    _share(wants)
    if source.manifest is not None:
        _compare(source.manifest, wants, group)
    if filling is not None:
        filling.commit(values)


def _choose_readers(wants: list[Want]) -> None:
    """Among replicas whoever has least to read; all of them count alike, so no word is needed."""
    load: dict[Any, list[int]] = {}
    for want in wants:
        if want.replicas is not None:
            loads = load.setdefault(want.replicas.group, [0] * want.replicas.size)
            want.reader = loads.index(min(loads))
            loads[want.reader] += want.piece.nbytes + 2048


def _tasks(stored: Metadata, want: Want) -> list[Task]:
    """The stored chunks that meet this piece."""
    piece, tasks = want.piece, []
    entry = stored.state_dict_metadata[want.source]
    assert isinstance(entry, TensorStorageMetadata)
    for chunk in entry.chunks:
        met = pieces.overlap((piece.offsets, piece.sizes), (tuple(chunk.offsets), tuple(chunk.sizes)))
        if met is None:
            continue
        info = stored.storage_data[MetadataIndex(want.source, chunk.offsets)]
        inside = tuple(o - start for o, start in zip(met[0], chunk.offsets, strict=True))
        into = piece.local[
            tuple(
                slice(o - start, o - start + n)
                for o, n, start in zip(met[0], met[1], piece.offsets, strict=True)
            )
        ]
        dtype = entry.properties.dtype
        tasks.append(
            Task(
                info.relative_path, info.offset, info.length, dtype, tuple(chunk.sizes), inside, met[1], into
            )
        )
    if sum(math.prod(task.take_sizes) for task in tasks) != math.prod(piece.sizes):
        raise Broken("metadata", f".metadata does not cover {want.source}")
    return tasks


def _read_mine(
    source: CheckpointSource, wants: list[Want], filling: Filling | None, sums: bool
) -> tuple[list[ByteRange], dict[str, Any], Failure | None]:
    try:
        with garbage.held():
            tasks = [task for want in wants if want.reads for task in _tasks(source.metadata, want)]
        segments = tensor_reader.run(
            source.store, source.folder, tasks, ours=source.manifest is not None, sums=sums
        )
        values = {}
        for _, _, key in filling.values if filling is not None else ():
            info = source.metadata.storage_data[MetadataIndex(key)]
            values[key] = tensor_reader.read_value(
                source.store, source.folder, info.relative_path, info.offset, info.length
            )
        return segments, values, None
    except Exception as error:  # whatever it is, it must reach the other ranks
        return [], {}, inspect.of_failure(error, source.store.path(source.folder))


def _hear(reports: list[Any] | None, source: CheckpointSource, group: ObjectGroup, sums: bool) -> None:
    """All hear whether all have read, and, where sums are kept, whether every byte is as written."""
    failures = [why for why, _ in reports or [] if why is not None]
    failure = group.broadcast(_worst(failures))
    if failure is not None:
        raise failure
    if sums:
        segments = [one for _, theirs in reports for one in theirs] if reports is not None else []
        _verify(source, segments, group)


def _worst(failures: Sequence[Failure]) -> Failure | None:
    """Storage that does not answer comes before damage: who cannot read cannot judge."""
    return min(failures, key=lambda failure: isinstance(failure, Broken), default=None)


def _verify(source: CheckpointSource, segments: list[ByteRange], group: ObjectGroup) -> None:
    """Rank 0 lays all segments end to end; what nobody read is shared out, read and added."""
    assert source.manifest is not None
    files = source.manifest.files
    chains: dict[str, list[ByteRange]] = {}
    gaps: list[tuple[str, int, int]] = []
    if group.rank == 0:
        by_file: dict[str, list[ByteRange]] = defaultdict(list)
        for one in segments:
            by_file[one.file].append(one)
        by_file[file_names.METADATA] = [
            ByteRange(file_names.METADATA, 0, files[file_names.METADATA][0], source.metadata_crc)
        ]
        for file, (size, _) in files.items():
            chains[file], missing = tensor_reader.tile(size, by_file[file])
            gaps += [(file, start, end) for start, end in missing]
    mine = group.scatter(
        [gaps[rank :: group.size] for rank in range(group.size)] if group.rank == 0 else None
    )
    reports = group.gather(_sum_gaps(source, mine))
    failure = group.broadcast(_judge(source.manifest, chains, reports) if reports is not None else None)
    if failure is not None:
        raise failure


def _sum_gaps(source: CheckpointSource, gaps: list[tuple[str, int, int]]) -> list[ByteRange] | Failure:
    try:
        return [tensor_reader.sum_range(source.store, source.folder, *gap) for gap in gaps]
    except Exception as error:  # whatever it is, it must reach the other ranks
        return inspect.of_failure(error, source.store.path(source.folder))


def _judge(
    manifest: Manifest, chains: dict[str, list[ByteRange]], reports: Sequence[list[ByteRange] | Failure]
) -> Failure | None:
    failures = [report for report in reports if not isinstance(report, list)]
    if failures:
        return _worst(failures)
    for one in (one for report in reports if isinstance(report, list) for one in report):
        chains[one.file].append(one)
    for file, (_, crc) in manifest.files.items():
        if tensor_reader.total(chains[file]) != crc:
            return Broken("checksum", f"{file} is not what was written: its checksum differs")
    return None


def _share(wants: list[Want]) -> None:
    """From each reader to the other holders: small pieces packed together, large ones each on its own."""
    packs: dict[Any, list[Want]] = defaultdict(list)
    for want in wants:
        if want.replicas is None or not want.piece.nbytes:
            continue
        if want.piece.nbytes < SMALL:
            packs[(want.replicas.group, want.reader, want.piece.local.device)].append(want)
        else:
            _send(want, want.piece.local)
    for together in packs.values():
        packed = torch.cat([want.piece.local.contiguous().view(-1).view(torch.uint8) for want in together])
        _send(together[0], packed)
        sizes = [want.piece.nbytes for want in together]
        for want, part in zip(together, packed.split(sizes), strict=True):
            want.piece.local.copy_(part.clone().view(want.piece.local.dtype).view(want.piece.sizes))


def _send(want: Want, tensor: torch.Tensor) -> None:
    assert want.replicas is not None
    whole = tensor.contiguous()
    dist.broadcast(whole.view(-1).view(torch.uint8), group=want.replicas.group, group_src=want.reader)
    if whole is not tensor:
        tensor.copy_(whole)


def _compare(manifest: Manifest, wants: list[Want], group: ObjectGroup) -> None:
    """The digest of what each rank now holds, composed over ranks, against the one taken at the save.

    Three sums a tensor: how many elements are held, the readers' shares, everyone's. The second must be the
    digest, the third that times the number of holders.
    """
    keys = [want.source for want in wants]
    held, owned, every = ([0] * len(wants) for _ in range(3))
    for nth, want in enumerate(wants):
        share = pieces.digest(want.piece.local, want.piece.offsets, want.piece.size)
        held[nth], every[nth] = math.prod(want.piece.sizes), share
        owned[nth] = share if want.reads else 0
    held, owned, every = (group.sum_mod_2_64(numbers) for numbers in (held, owned, every))
    for nth, key in enumerate(keys):
        if key not in manifest.digests:
            raise Broken("digest", f"the manifest has no digest of {key}")
        numel, said = manifest.digests[key]
        times = held[nth] // numel if numel else 1
        if owned[nth] != int(said, 16) or every[nth] != times * int(said, 16) % _WORD:
            raise Broken("digest", f"{key} is not what was saved: its digest differs after the load")


def opened(store: Store, folder: str, manifest: Manifest | None, data: bytes) -> CheckpointSource:
    """A source from `.metadata` as rank 0 read and told it; refused when it is not the file that was sealed."""
    if manifest is not None and manifest.files[file_names.METADATA][1] != crc32(data):
        raise Broken("checksum", ".metadata is not what was written: its checksum differs")
    return CheckpointSource(store, folder, metadata.read(data), manifest, crc32(data))


def open_one(store: Store, folder: str, manifest: Manifest | None) -> CheckpointSource:
    """For a single process: Broken where its metadata is not to be trusted."""
    return opened(store, folder, manifest, store.read(folder, file_names.METADATA))


def whole(source: CheckpointSource, key: str) -> torch.Tensor:
    """One tensor in one process, compared with its digest where there is one."""
    entry = source.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    want = Want(key, Piece(key, (key,), tuple(entry.size), (0,) * tensor.dim(), tensor))
    tensor_reader.run(
        source.store,
        source.folder,
        _tasks(source.metadata, want),
        ours=source.manifest is not None,
        sums=False,
    )
    if source.manifest is not None:
        _, said = source.manifest.digests[key]
        if pieces.digest(tensor, (0,) * tensor.dim(), tuple(entry.size)) != int(said, 16):
            raise Broken("digest", f"{key} is not what was saved: its digest differs")
    return tensor

"""Loads a checkpoint into a TrainState at any number of ranks: reads, verifies, sends to replicas.

Collective. Over all ranks each byte is read once: one holder of a replicated piece reads it and sends it to
the others. A failure on one rank reaches all ranks before the next collective: all raise the same Broken.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp.base import garbage
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import file_names, inspect, layout_file, metadata, pieces, tensor_reader
from fsdp.checkpoint.crc import crc32
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.snapshot import Piece
from fsdp.checkpoint.store import Store
from fsdp.checkpoint.stored_parts import PartsOfLayout, PartsOfMetadata, StoredParts
from fsdp.checkpoint.tensor_keys import LoadTarget, PendingState
from fsdp.checkpoint.tensor_reader import ByteRange, Task
from fsdp.dist.collectives import ObjectGroup

SMALL = 1 << 16
READERS_OF_SMALL = 8
"""Of the replicas of small pieces: each reader sends its own to the others in one broadcast."""
GAP_BYTES = 64 << 20
"""Of a file that no tensor is read from, such as `.metadata`: a rank reads so much of it for its checksum."""
MOST_BYTES = {file_names.LAYOUT: 1 << 30, file_names.METADATA: 4 << 30}
"""Larger ones are not read. 29 million pieces have a layout of 2 MiB, and `.metadata` of 1.7 GiB."""
SUMMED_FIRST = 256 << 20
"""From here on a file's checksum is compared before it is read whole."""
_WORD = 2**64

Failure = Broken | CheckpointError


@dataclass
class CheckpointSource:
    """An opened checkpoint: its store, folder, metadata and manifest."""

    store: Store
    folder: str
    metadata: Metadata
    """Keys, sizes, dtypes and the values' places; the tensors' are in `parts`."""
    parts: StoredParts
    manifest: Manifest | None


def fill(
    source: CheckpointSource,
    targets: list[LoadTarget],
    pending: PendingState | None,
    group: ObjectGroup,
    verify: bool,
) -> None:
    """Fills and verifies every target; Broken on every rank if that fails, and the state is unusable then."""
    _choose_readers(targets)
    sums = verify and source.manifest is not None
    segments, values, why = _read_mine(source, targets, pending, sums)
    _check_reports(group.gather((why, segments)), source, group, sums)
    _send_to_replicas(targets)
    if source.manifest is not None:
        _compare(source.manifest, targets, group)
    if pending is not None:
        pending.commit(values)


def _choose_readers(targets: list[LoadTarget]) -> None:
    """The replica with the least to read reads a piece; all ranks compute the same choice."""
    load: dict[Any, list[int]] = {}
    for target in targets:
        if target.replicas is not None:
            loads = load.setdefault(target.replicas.group, [0] * target.replicas.size)
            able = loads if target.piece.nbytes >= SMALL else loads[:READERS_OF_SMALL]
            target.reader = able.index(min(able))
            loads[target.reader] += target.piece.nbytes + 2048


def _tasks(source: CheckpointSource, target: LoadTarget) -> list[Task]:
    """A task for each stored part that overlaps this piece."""
    piece, tasks = target.piece, []
    entry = source.metadata.state_dict_metadata[target.source]
    assert isinstance(entry, TensorStorageMetadata)
    for part in source.parts.overlapping(target.source, piece.offsets, piece.sizes):
        shared = pieces.overlap((piece.offsets, piece.sizes), (part.offsets, part.sizes))
        assert shared is not None
        inside = tuple(o - start for o, start in zip(shared[0], part.offsets, strict=True))
        into = piece.local[
            tuple(
                slice(o - start, o - start + n)
                for o, n, start in zip(shared[0], shared[1], piece.offsets, strict=True)
            )
        ]
        dtype = entry.properties.dtype
        tasks.append(
            Task(
                part.file,
                part.offset,
                part.length,
                dtype,
                part.sizes,
                inside,
                shared[1],
                into,
            )
        )
    if sum(math.prod(task.take_sizes) for task in tasks) != math.prod(piece.sizes):
        raise Broken("metadata", f"it does not cover {target.source}")
    return tasks


def _read_mine(
    source: CheckpointSource, targets: list[LoadTarget], pending: PendingState | None, sums: bool
) -> tuple[list[ByteRange], dict[str, Any], Failure | None]:
    try:
        with garbage.held():
            mine = [target for target in targets if target.reads]
            mine.sort(key=lambda target: source.parts.order(target.source))
            tasks = [task for target in mine for task in _tasks(source, target)]
        segments = tensor_reader.run(
            source.store, source.folder, tasks, ours=source.manifest is not None, sums=sums
        )
        values = {}
        for _, _, key in pending.values if pending is not None else ():
            info = source.metadata.storage_data[MetadataIndex(key)]
            values[key] = tensor_reader.read_value(
                source.store, source.folder, info.relative_path, info.offset, info.length
            )
        return segments, values, None
    except Exception as error:  # any failure must reach the other ranks
        return [], {}, inspect.classify_failure(error, source.store.path(source.folder))


def _check_reports(
    reports: list[Any] | None, source: CheckpointSource, group: ObjectGroup, sums: bool
) -> None:
    """Raises a rank's failure on all ranks; with checksums, also Broken where a byte differs."""
    failures = [why for why, _ in reports or [] if why is not None]
    failure = group.broadcast(_worst(failures))
    if failure is not None:
        raise failure
    if sums:
        segments = [one for _, theirs in reports for one in theirs] if reports is not None else []
        _verify(source, segments, group)


def _worst(failures: Sequence[Failure]) -> Failure | None:
    """Storage that does not answer comes before damage: a rank that cannot read cannot find damage."""
    return min(failures, key=lambda failure: isinstance(failure, Broken), default=None)


def _verify(source: CheckpointSource, segments: list[ByteRange], group: ObjectGroup) -> None:
    """Compares every file's checksum: rank 0 joins the ranges of all ranks, and the ranks read the gaps."""
    assert source.manifest is not None
    files, read = source.manifest.files, contents_file(source.manifest)
    chains: dict[str, list[ByteRange]] = {}
    gaps: list[tuple[str, int, int]] = []
    if group.rank == 0:
        by_file: dict[str, list[ByteRange]] = defaultdict(list)
        for one in segments:
            by_file[one.file].append(one)
        by_file[read] = [ByteRange(read, 0, *files[read])]  # compared when it was opened
        for file, (size, _) in files.items():
            chains[file], missing = tensor_reader.tile(size, by_file[file])
            for start, end in missing:
                parts = range(start, end, GAP_BYTES)
                gaps += [(file, at, min(at + GAP_BYTES, end)) for at in parts]
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
    except Exception as error:  # any failure must reach the other ranks
        return inspect.classify_failure(error, source.store.path(source.folder))


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


def _send_to_replicas(targets: list[LoadTarget]) -> None:
    """Sends each piece from its reader to the other holders: small pieces packed, large ones one by one."""
    packs: dict[Any, list[LoadTarget]] = defaultdict(list)
    for target in targets:
        if target.replicas is None or not target.piece.nbytes:
            continue
        if target.piece.nbytes < SMALL:
            packs[(target.replicas.group, target.reader, target.piece.local.device)].append(target)
        else:
            _send(target, target.piece.local)
    for together in packs.values():
        packed = torch.cat(
            [target.piece.local.contiguous().view(-1).view(torch.uint8) for target in together]
        )
        _send(together[0], packed)
        sizes = [target.piece.nbytes for target in together]
        for target, part in zip(together, packed.split(sizes), strict=True):
            target.piece.local.copy_(part.clone().view(target.piece.local.dtype).view(target.piece.sizes))


def _send(target: LoadTarget, tensor: torch.Tensor) -> None:
    assert target.replicas is not None
    whole = tensor.contiguous()
    dist.broadcast(whole.view(-1).view(torch.uint8), group=target.replicas.group, group_src=target.reader)
    if whole is not tensor:
        tensor.copy_(whole)


def _compare(manifest: Manifest, targets: list[LoadTarget], group: ObjectGroup) -> None:
    """Compares the digests of the loaded tensors, summed over ranks, with those of the save.

    Three sums for each tensor: the elements held, the readers' shares, all ranks' shares. The second must be
    the digest, the third the digest times the number of holders.
    """
    keys = [target.source for target in targets]
    held, owned, every = ([0] * len(targets) for _ in range(3))
    for nth, target in enumerate(targets):
        share = pieces.digest(target.piece.local, target.piece.offsets, target.piece.size)
        held[nth], every[nth] = math.prod(target.piece.sizes), share
        owned[nth] = share if target.reads else 0
    held, owned, every = (group.sum_mod_2_64(numbers) for numbers in (held, owned, every))
    for nth, key in enumerate(keys):
        numel, digest = _digest_of(manifest, key)
        times = held[nth] // numel if numel else 1
        if owned[nth] != int(digest, 16) or every[nth] != times * int(digest, 16) % _WORD:
            raise Broken("digest", f"{key} is not what was saved: its digest differs after the load")


def _digest_of(manifest: Manifest, key: str) -> tuple[int, str]:
    if key not in manifest.digests:
        raise Broken("digest", f"the manifest has no digest of {key}")
    return manifest.digests[key]


def contents_file(manifest: Manifest | None) -> str:
    """The file with the places of all parts. Older checkpoints and other programs' have `.metadata` alone."""
    has_layout = manifest is not None and file_names.LAYOUT in manifest.files
    return file_names.LAYOUT if has_layout else file_names.METADATA


def opened(store: Store, folder: str, manifest: Manifest | None, data: bytes) -> CheckpointSource:
    """The source with this content of its `contents_file`; Broken if that is not the file that was sealed."""
    file = contents_file(manifest)
    if manifest is not None:
        if file not in manifest.files:
            raise Broken("missing-file", f"its manifest lacks {file}")
        if manifest.files[file][1] != crc32(data):
            raise Broken("checksum", f"{file} is not what was written: its checksum differs")
    parts: StoredParts
    if file == file_names.LAYOUT:
        layout, about = layout_file.decode(data)
        parts = PartsOfLayout(layout)
    else:
        about = metadata.read(data)
        parts = PartsOfMetadata(about)
    return CheckpointSource(store, folder, about, parts, manifest)


def open_one(store: Store, folder: str, manifest: Manifest | None) -> CheckpointSource:
    """The source, opened by a single process; Broken if its contents are damaged or unsafe."""
    source = opened(store, folder, manifest, read_contents(store, folder, manifest))
    if manifest is not None:
        _check_digests(source, manifest)
    return source


def read_contents(store: Store, folder: str, manifest: Manifest | None) -> bytes:
    """The `contents_file`, within the memory that an honest one needs."""
    file = contents_file(manifest)
    sealed = None if manifest is None else manifest.files.get(file)
    size = store.size(folder, file) if sealed is None else sealed[0]
    if size is None:
        raise Broken("missing-file", f"{file} is missing")
    if size > MOST_BYTES[file]:
        raise Broken("size", f"{file} has {size} bytes")
    if size > SUMMED_FIRST and sealed is not None:
        inspect.check_file(store, folder, file, *sealed)
    return store.read(folder, file)


def _check_digests(source: CheckpointSource, manifest: Manifest) -> None:
    """Broken where a tensor has no digest: it would fail when it is read. Empty tensors are not written."""
    for key, about in source.metadata.state_dict_metadata.items():
        count = math.prod(about.size) if isinstance(about, TensorStorageMetadata) else 0
        if count and _digest_of(manifest, key)[0] != count:
            raise Broken("digest", f"the manifest's digest of {key} is of another size")


def read_numbers(source: CheckpointSource, keys: dict[str, str]) -> dict[str, float | int] | None:
    """The numbers at these keys, read by a single process; None if one of them is no number."""
    found: dict[str, float | int] = {}
    for name, key in keys.items():
        if MetadataIndex(key) not in source.metadata.storage_data:
            return None
        value = _read_value(source, key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**63:
            return None
        found[name] = value
    return found


def read_whole_number(source: CheckpointSource, key: str) -> int | None:
    """A value or a tensor of one element, read by a single process; None if it is no whole number from 0."""
    if isinstance(source.metadata.state_dict_metadata[key], TensorStorageMetadata):
        with _failures_classified(source, key):
            tensor = whole(source, key)
        value: object = tensor.item() if tensor.numel() == 1 else None
    else:
        value = _read_value(source, key)
    return value if type(value) is int and 0 <= value < 2**31 else None


def _read_value(source: CheckpointSource, key: str) -> object:
    """A value beside the tensors; None for an object that weights_only does not load."""
    with _failures_classified(source, key):
        at = source.metadata.storage_data[MetadataIndex(key)]
        try:
            return tensor_reader.read_value(
                source.store, source.folder, at.relative_path, at.offset, at.length
            )
        except pickle.UnpicklingError:
            return None


@contextmanager
def _failures_classified(source: CheckpointSource, key: str) -> Iterator[None]:
    """Broken or CheckpointError for whatever fails, such as the end of a file that was cut off."""
    try:
        yield
    except Exception as error:
        raise inspect.classify_failure(error, f"{key} of {source.store.path(source.folder)}") from None


def whole(source: CheckpointSource, key: str) -> torch.Tensor:
    """A whole tensor, read by a single process and compared with its digest if there is a manifest."""
    entry = source.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    target = LoadTarget(key, Piece(key, (key,), tuple(entry.size), (0,) * tensor.dim(), tensor))
    tensor_reader.run(
        source.store,
        source.folder,
        _tasks(source, target),
        ours=source.manifest is not None,
        sums=False,
    )
    if source.manifest is not None:
        _, digest = _digest_of(source.manifest, key)
        if pieces.digest(tensor, (0,) * tensor.dim(), tuple(entry.size)) != int(digest, 16):
            raise Broken("digest", f"{key} is not what was saved: its digest differs")
    return tensor

"""Loads a checkpoint into a TrainState at any number of ranks: reads, sends to replicas, verifies.

Collective. Of a large piece that several ranks hold, one reads the bytes and sends them to the others. Rows
are read straight into the rank's tensors. DCP's FileSystemReader reads each chunk whole through torch.load:
measured at 124M parameters on 2 ranks 2.61 s, with verification here 1.86 s. A failure on one rank reaches
all ranks before the next collective: all raise the same Broken.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp.base import proc
from fsdp.base.devices import set_thread_device
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import inspect, state
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.manifest import Broken, Chunk
from fsdp.checkpoint.state import PendingState, Piece, Sizes, as_bytes
from fsdp.dist.collectives import ObjectGroup

SMALL = 1 << 16
"""Smaller pieces are read by each rank that holds them, and nearer reads are joined."""
MOST_OF_A_VALUE = 1 << 30
THREADS = 4
TOGETHER = 8 << 20
"""Reads up to this size are joined, with the bytes between them."""


# ---------------------------------------------------------------- a collective load


def fill(
    source: CheckpointSource,
    targets: list[Piece],
    pending: PendingState | None,
    group: ObjectGroup,
    verify: bool,
) -> None:
    """Fills and verifies every piece; Broken on every rank if that fails, and the state is unusable then."""
    # One for each memory: tied weights have two keys.
    memories = {(p.local.data_ptr(), p.sizes) if p.nbytes else (0, p.key): p for p in reversed(targets)}
    targets = list(reversed(memories.values()))
    for nth, target in enumerate(targets):
        if target.replicas is not None and target.nbytes >= SMALL:
            target.reader = nth % target.replicas.size  # the same on every rank that holds it
    values, failure = _read_mine(source, targets, pending)
    failures = [report for report in group.gather(failure) or [] if report is not None]
    # Storage that does not answer comes before damage: a rank that cannot read cannot find damage.
    worst = group.broadcast(min(failures, key=lambda report: isinstance(report, Broken), default=None))
    if worst is not None:
        raise worst
    for target in targets:
        _send(target)
    if verify and source.manifest is not None:
        _compare(source, targets, group)
    if pending is not None:
        pending.commit(values)


def _read_mine(
    source: CheckpointSource, targets: list[Piece], pending: PendingState | None
) -> tuple[dict[str, Any], Broken | CheckpointError | None]:
    try:
        _run(source, [t for t in targets if t.replicas is None or t.reader in (None, t.replicas.index)])
        keys = [key for _, _, key in pending.values] if pending is not None else []
        return {key: _value(source, key) for key in keys}, None
    except Exception as error:  # any failure must reach the other ranks
        return {}, inspect.classify_failure(error, source.path)


def _send(target: Piece) -> None:
    if target.replicas is None or target.reader is None:
        return
    sent = target.local.contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), group=target.replicas.group, group_src=target.reader)
    if sent is not target.local:
        target.local.copy_(sent)


def _compare(source: CheckpointSource, targets: list[Piece], group: ObjectGroup) -> None:
    """Compares the digests of the loaded tensors, summed over ranks, with those of the save.

    The first holder counts once and another one twice: the sum has an odd multiple of the digest, whose bits
    no number of equal errors cancels modulo 2⁶⁴.
    """
    held, sums = list[int](), list[int]()
    for target in targets:
        times = 2 if target.replicas is not None and target.replicas.index else 1
        held.append(times * math.prod(target.sizes))
        sums.append(times * state.digest(target.local, target.offsets, target.size) % 2**64)
    held, sums = group.sum_mod_2_64(held), group.sum_mod_2_64(sums)
    for target, count, total in zip(targets, held, sums, strict=True):
        numel, digest = source.digest(target.key)
        if total != (count // numel if numel else 1) * digest % 2**64:
            raise Broken("digest", f"{target.key} is not what was saved: its digest differs")


# ---------------------------------------------------------------- reading rows


@dataclass
class _Read:
    """One request: a range of a file into these buffers, and what puts them into the tensors."""

    file: str
    start: int
    end: int
    views: list[memoryview]
    copies: list[Callable[[], object]]


def _run(source: CheckpointSource, targets: list[Piece]) -> None:
    """Reads all pieces in THREADS threads; raises the first failure."""
    with proc.collection_paused():
        reads = _joined([read for target in targets for read in _reads_of(source, target)])
    device = next((target.local.device for target in targets if target.local.is_cuda), None)
    with ThreadPoolExecutor(THREADS, initializer=set_thread_device, initargs=(device,)) as pool:
        for _ in pool.map(partial(_fulfil, source), reads):
            pass


def _fulfil(source: CheckpointSource, read: _Read) -> None:
    source.store.read_into(source.folder, read.file, read.start, read.views)
    for copy in read.copies:
        copy()
    read.views, read.copies = [], []  # frees the buffers


def _joined(reads: list[_Read]) -> list[_Read]:
    """Joins near reads up to TOGETHER bytes: a thousand scalars need not be a thousand requests."""
    joined: list[_Read] = []
    for read in sorted(reads, key=lambda read: (read.file, read.start)):
        last = joined[-1] if joined else read
        gap = read.start - last.end if last.file == read.file else -1
        if 0 <= gap <= SMALL and read.end - last.start <= TOGETHER:
            last.views += [memoryview(bytearray(gap)), *read.views]
            last.copies += read.copies
            last.end = read.end
        else:
            joined.append(read)
    return joined


def _reads_of(source: CheckpointSource, target: Piece) -> Iterator[_Read]:
    """A read for each stored chunk that overlaps this piece."""
    saved, covered = source.tensors[target.key], 0
    for chunk in saved.chunks:
        shared = state.overlap((target.offsets, target.sizes), (chunk.offsets, chunk.sizes))
        if shared is None:
            continue
        covered += math.prod(shared[1])
        into, within = target.local[_box(*shared, target.offsets)], _box(*shared, chunk.offsets)
        if source.manifest is None:
            yield _foreign_read(chunk, saved.dtype, within, into)
        else:
            first = within[0].start if within else 0
            yield _rows_read(chunk, saved.dtype, first, into, source.manifest.head)
    if covered != math.prod(target.sizes):
        raise Broken("metadata", f"it does not cover {target.key}")


def _box(offsets: Sizes, sizes: Sizes, begin: Sizes) -> tuple[slice, ...]:
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(offsets, sizes, begin, strict=True))


def _rows_read(chunk: Chunk, dtype: torch.dtype, first: int, into: torch.Tensor, head: int) -> _Read:
    """Rows of this program's chunk: into the tensor itself if its memory can take the bytes."""
    straight = into.is_cpu and into.is_contiguous() and into.dtype == dtype
    buffer = into if straight else torch.empty(into.shape, dtype=dtype)
    start = chunk.range.start + head + first * math.prod(chunk.sizes[1:]) * dtype.itemsize
    copies: list[Callable[[], object]] = [] if straight else [partial(into.copy_, buffer)]
    return _Read(chunk.range.file, start, start + buffer.nbytes, [as_bytes(buffer)], copies)


def _foreign_read(chunk: Chunk, dtype: torch.dtype, within: tuple[slice, ...], into: torch.Tensor) -> _Read:
    """A whole chunk of another program's checkpoint, by torch.load."""
    stored, data = chunk.range, bytearray(chunk.range.length)

    def copy() -> None:
        try:
            tensor = torch.load(io.BytesIO(data), weights_only=True)
            if (tuple(tensor.shape), tensor.dtype) != (chunk.sizes, dtype):
                raise ValueError(f"it is {tuple(tensor.shape)} {tensor.dtype}")
        except (RuntimeError, ValueError, AttributeError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise Broken("format", f"{stored.file} at {stored.start} is not the tensor ({reason})") from None
        into.copy_(tensor[within] if tensor.dim() else tensor)

    return _Read(stored.file, stored.start, stored.start + stored.length, [memoryview(data)], [copy])


# ---------------------------------------------------------------- values, and reads by a single process


def _value(source: CheckpointSource, key: str) -> object:
    """A value other than a tensor, loaded with weights_only: nothing in it is executed."""
    stored = source.values[key]
    if stored.length > MOST_OF_A_VALUE:
        raise Broken("format", f"{key} is no value: it has {stored.length} bytes")
    data = bytearray(stored.length)
    source.store.read_into(source.folder, stored.file, stored.start, [memoryview(data)])
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch compares no checksum
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} differs")
        return torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise Broken("format", f"{key} is no value ({reason})") from None


def number(source: CheckpointSource, key: str) -> float | int | None:
    """A value, read by a single process; None if there is none, or it is no number from 0."""
    try:
        value: Any = _value(source, key) if key in source.values else None
    except pickle.UnpicklingError:  # an object that weights_only does not load
        return None
    except Exception as error:  # such as the end of a file that was cut off
        raise inspect.classify_failure(error, f"{key} of {source.path}") from None
    return value if type(value) in (int, float) and 0 <= value < 2**63 else None


def whole(source: CheckpointSource, key: str) -> torch.Tensor:
    """A whole tensor, read by a single process and compared with its digest if there is a manifest."""
    saved = source.tensors[key]
    tensor, zeros = torch.empty(saved.size, dtype=saved.dtype), (0,) * len(saved.size)
    _run(source, [Piece(key, (key,), saved.size, zeros, tensor)])
    if source.manifest is not None and state.digest(tensor, zeros, saved.size) != source.digest(key)[1]:
        raise Broken("digest", f"{key} is not what was saved: its digest differs")
    return tensor

"""Reads the rows that a rank needs from a checkpoint's files straight into its tensors, with their checksums.

A ByteRange is a part of a file that was read, with its crc32. The ranges of all ranks, in order, give each
file's checksum: a load verifies every byte in the pass in which it reads it. tensor_keys.py maps tensors to
keys.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fsdp.base.devices import set_thread_device
from fsdp.checkpoint import torch_archive, torch_file
from fsdp.checkpoint.crc import combine, crc32
from fsdp.checkpoint.inspect import crc_of
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.store import Store

Sizes = tuple[int, ...]

THREADS = 4
MOST_OF_A_VALUE = 1 << 30
TOGETHER = 8 << 20


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, end) of a file, and their crc32."""

    file: str
    start: int
    end: int
    crc: int


@dataclass(frozen=True)
class Task:
    """Rows of a stored chunk, to be read into a tensor. `into` has the shape `take_sizes`."""

    file: str
    offset: int
    length: int
    dtype: torch.dtype
    chunk: Sizes
    take_offsets: Sizes
    take_sizes: Sizes
    into: torch.Tensor

    @property
    def row_bytes(self) -> int:
        return math.prod(self.chunk[1:]) * self.dtype.itemsize

    @property
    def rows(self) -> tuple[int, int]:
        return (self.take_offsets[0], self.take_offsets[0] + self.take_sizes[0]) if self.chunk else (0, 1)


@dataclass
class _Read:
    """One request: a range of a file into these buffers, and the tasks that it fulfils."""

    file: str
    start: int
    end: int
    views: list[memoryview]
    targets: list[tuple[Task, torch.Tensor]]


def run(store: Store, folder: str, tasks: Iterable[Task], ours: bool, sums: bool) -> list[ByteRange]:
    """Runs all tasks in THREADS threads; raises the first failure. `ours`: written with torch_file.py."""
    ordered = sorted(tasks, key=lambda task: (task.file, task.offset, task.rows))
    with ThreadPoolExecutor(THREADS, initializer=set_thread_device, initargs=(_device(ordered),)) as pool:
        reads = _joined(pool.map(lambda task: _prepare(store, folder, task, ours, sums), ordered))
        return list(pool.map(lambda read: _fulfil(store, folder, read, sums), reads))


def _device(tasks: list[Task]) -> torch.device | None:
    """The CUDA device of the targets, if any: a rank has one."""
    return next((task.into.device for task in tasks if task.into.device.type == "cuda"), None)


def _prepare(store: Store, folder: str, task: Task, ours: bool, sums: bool) -> _Read:
    first, last = task.rows
    data = task.offset + (torch_file.HEAD if ours else _find_data(store, folder, task))
    target, view = _memory(task)
    start, end = data + first * task.row_bytes, data + last * task.row_bytes
    views = [view]
    if ours and sums:
        # The readers of a chunk's first and last rows also read its head and tail: ranges cover the file.
        head = bytearray(torch_file.HEAD if first == 0 else 0)
        stop = torch_file.aligned(task.offset + task.length)
        tail = bytearray(stop - end if last == (task.chunk[0] if task.chunk else 1) else 0)
        views = [memoryview(head), view, memoryview(tail)]
        start, end = start - len(head), end + len(tail)
    return _Read(task.file, start, end, views, [(task, target)])


def _joined(reads: Iterable[_Read]) -> list[_Read]:
    """Joins adjacent reads up to TOGETHER bytes: a thousand scalars need not be a thousand requests."""
    joined: list[_Read] = []
    for one in reads:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.file, last.end) == (one.file, one.start)
            and one.end - last.start <= TOGETHER
        ):
            last.end = one.end
            last.views += one.views
            last.targets += one.targets
        else:
            joined.append(one)
    return joined


def _fulfil(store: Store, folder: str, read: _Read, sums: bool) -> ByteRange:
    store.read_into(folder, read.file, read.start, read.views)
    crc = 0
    for view in read.views if sums else ():
        crc = crc32(view, crc)
    for task, target in read.targets:
        _place(task, target)
    return ByteRange(read.file, read.start, read.end, crc)


def _memory(task: Task) -> tuple[torch.Tensor, memoryview]:
    """The tensor to read into: the target if its memory can take the bytes, else a buffer."""
    first, last = task.rows
    straight = (
        task.into.device.type == "cpu"
        and task.into.is_contiguous()
        and task.into.dtype == task.dtype
        and tuple(task.take_sizes[1:]) == tuple(task.chunk[1:])
    )
    shape = (last - first, *task.chunk[1:]) if task.chunk else ()
    tensor = task.into if straight else torch.empty(shape, dtype=task.dtype)
    return tensor, as_bytes(tensor)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable."""
    return (
        tensor.detach().view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())
    )


def _place(task: Task, tensor: torch.Tensor) -> None:
    if tensor is task.into:
        return
    if task.chunk:
        tensor = tensor[
            (
                slice(None),
                *(slice(o, o + n) for o, n in zip(task.take_offsets[1:], task.take_sizes[1:], strict=True)),
            )
        ]
    task.into.copy_(tensor)


class _Slice(io.RawIOBase):
    """A range of a stored file as a stream, for zipfile."""

    def __init__(self, store: Store, folder: str, file: str, offset: int, length: int) -> None:
        self._source, self._offset, self._length, self._at = (store, folder, file), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = max(0, min(len(buffer), self._length - self._at))
        store, folder, file = self._source
        store.read_into(folder, file, self._offset + self._at, [memoryview(buffer)[:size]])
        self._at += size
        return size


def _find_data(store: Store, folder: str, task: Task) -> int:
    """The offset of the tensor's bytes in a stream that torch.save wrote."""
    stream = _Slice(store, folder, task.file, task.offset, task.length)
    try:
        with zipfile.ZipFile(io.BufferedReader(stream, 2048)) as archive:
            record = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
            whole = math.prod(task.chunk) * task.dtype.itemsize
            if record.file_size < whole or record.compress_type != zipfile.ZIP_STORED:
                raise Broken(
                    "format", f"{task.file} at {task.offset} holds {record.file_size} bytes and not {whole}"
                )
            stream.seek(record.header_offset)
            header = io.BufferedReader(stream, 30).read(30)
            return (
                record.header_offset
                + 30
                + int.from_bytes(header[26:28], "little")
                + int.from_bytes(header[28:30], "little")
            )
    except (zipfile.BadZipFile, StopIteration) as error:
        raise Broken("format", f"{task.file} at {task.offset} is no tensor ({error})") from None


def read_value(store: Store, folder: str, file: str, offset: int, length: int) -> object:
    """A value other than a tensor, loaded with weights_only: nothing in it is executed."""
    if length > MOST_OF_A_VALUE:
        raise Broken("format", f"{file} at {offset} is no value: it has {length} bytes")
    data = bytearray(length)
    store.read_into(folder, file, offset, [memoryview(data)])
    try:
        torch_archive.check_archive(io.BytesIO(data))
        return torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError) as error:  # its archive is damaged
        reason = str(error).partition("\n")[0]
        raise Broken("format", f"{file} at {offset} is no value ({reason})") from None


def sum_range(store: Store, folder: str, file: str, start: int, end: int) -> ByteRange:
    """Reads a range of a file for its checksum."""
    return ByteRange(file, start, end, crc_of(store, folder, file, start, end))


def tile(size: int, ranges: Iterable[ByteRange]) -> tuple[list[ByteRange], list[tuple[int, int]]]:
    """Ranges that follow one another from 0 to `size`, and the gaps that no rank read."""
    chain: list[ByteRange] = []
    gaps: list[tuple[int, int]] = []
    at = 0
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        if one.start < at or one.end == one.start:
            continue
        if one.start > at:
            gaps.append((at, one.start))
        chain.append(one)
        at = one.end
    if at < size:
        gaps.append((at, size))
    return chain, gaps


def total(ranges: Iterable[ByteRange]) -> int:
    """The crc32 of ranges that follow one another."""
    crc = 0
    for one in sorted(ranges, key=lambda one: one.start):
        crc = combine(crc, one.crc, one.end - one.start)
    return crc

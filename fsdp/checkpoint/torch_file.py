"""A tensor as the bytes that `torch.save` would write: a stored zip, with its data at a known offset.

DCP stores each chunk of a tensor as such a stream. Here it is head, data in place, tail: no copy of the data
and one pass for all checksums. Measured for 1 GiB in 64 tensors: 0.2 s of processor time; torch.save into
memory and a checksum of its streams take 0.9 s and a second copy of each tensor. The head has HEAD bytes, so
a reader finds the data without parsing. write_plan.py chooses tensors, files and offsets.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch

from fsdp.base.torch_private.saving import rebuild_call, storage_class
from fsdp.checkpoint.crc import crc32

HEAD = 1024
ALIGN = 64
_BIG = 0xFFFFFFFF
_UTF8 = 0x0800
Count = TypeVar("Count", int, np.ndarray)
"""A number of bytes, or one for each of many items."""


class _Rebuild:
    """Pickles to the call that torch.save writes for a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], record: str = "0") -> None:
        self.dtype, self.sizes, self.record = dtype, sizes, record

    def __reduce__(self) -> tuple[Any, ...]:
        kind = storage_class(self.dtype)
        numel = math.prod(self.sizes)
        if kind is not None:
            return rebuild_call(_Storage(kind, numel, self.record), self.sizes, None)
        # fp8 and other dtypes newer than typed storages: bytes, and the dtype as an argument.
        storage = _Storage(torch.UntypedStorage, numel * self.dtype.itemsize, self.record)
        return rebuild_call(storage, self.sizes, self.dtype)


class _Storage:
    def __init__(self, kind: Any, numel: int, record: str) -> None:
        self.kind, self.numel, self.record = kind, numel, record


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", obj.kind, obj.record, "cpu", obj.numel)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def state_dict_pickle(tensors: list[tuple[str, torch.dtype, tuple[int, ...], str]]) -> bytes:
    """The data.pkl of a dict of tensors: name, dtype, size, and the name of the tensor that owns the memory.

    Records are numbered in the owners' order.
    """
    records: dict[str, str] = {}
    tree = {}
    for name, dtype, sizes, owner in tensors:
        tree[name] = _Rebuild(dtype, sizes, records.setdefault(owner, str(len(records))))
    return _pickled(tree)


def _local_header(name: bytes, crc: int, size: int, pad_to: int = 0, at: int = 0) -> bytes:
    """A stored record's header. An extra field pads it: the data begins `pad_to` bytes into the archive."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    if pad_to:
        room = pad_to - at - 30 - len(name) - len(extra)
        extra += struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
    short = min(size, _BIG)
    fields = (
        0x04034B50,
        45 if size >= _BIG else 20,
        _UTF8,
        0,
        0,
        0x21,
        crc,
        short,
        short,
        len(name),
        len(extra),
    )
    return struct.pack("<IHHHHHIIIHH", *fields) + name + extra


def _central_header(name: bytes, crc: int, size: int, at: int) -> bytes:
    large = (struct.pack("<QQ", size, size) if size >= _BIG else b"") + (
        struct.pack("<Q", at) if at >= _BIG else b""
    )
    extra = struct.pack("<HH", 1, len(large)) + large if large else b""
    short = min(size, _BIG)
    version = 45 if large else 20
    fields = (
        0x02014B50,
        version,
        version,
        _UTF8,
        0,
        0,
        0x21,
        crc,
        short,
        short,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        min(at, _BIG),
    )
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields) + name + extra


def _end(records: int, size: int, at: int) -> bytes:
    big = b""
    if at >= _BIG or records > 0xFFFF:
        big = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, records, records, size, at)
        big += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
    few = min(records, 0xFFFF)
    return big + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(size, _BIG), min(at, _BIG), 0)


_NAMES = (b"archive/data.pkl", b"archive/byteorder", b"archive/version", b"archive/data/0")


def frame(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int, data_crc: int) -> tuple[bytes, bytes]:
    """The bytes before and after the data."""
    contents = (_pickled(_Rebuild(dtype, sizes)), b"little", b"3\n")
    head, central = b"", b""
    for name, content in zip(_NAMES, contents, strict=False):
        central += _central_header(name, crc32(content), len(content), len(head))
        head += _local_header(name, crc32(content), len(content)) + content
    central += _central_header(_NAMES[3], data_crc, nbytes, len(head))
    head += _local_header(_NAMES[3], data_crc, nbytes, pad_to=HEAD, at=len(head))
    return head, central + _end(len(_NAMES), len(central), HEAD + nbytes)


def tail_length(nbytes: Count) -> Count:
    """Depends on the size alone: offsets are known before anything is written."""
    big_record, big_end = 20 * (nbytes >= _BIG), 76 * (HEAD + nbytes >= _BIG)
    return sum(46 + len(name) for name in _NAMES) + big_record + big_end + 22


def item_length(nbytes: Count) -> Count:
    return HEAD + nbytes + tail_length(nbytes)


def aligned(offset: Count) -> Count:
    return -(-offset // ALIGN) * ALIGN


class Archive:
    """The zip of a whole state dict, written record by record to a stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._at = 0
        self._central: list[bytes] = []

    def add(self, name: str, data: bytes | memoryview, align: bool = False) -> None:
        """`align`: the data begins at a multiple of ALIGN, for readers that map the file."""
        full, crc = b"archive/" + name.encode(), crc32(data)
        self._central.append(_central_header(full, crc, len(data), self._at))
        start = aligned(self._at + 30 + len(full) + 20 + 4) - self._at if align else 0
        head = _local_header(full, crc, len(data), pad_to=start, at=0)
        self._stream.write(head)
        self._stream.write(data)
        self._at += len(head) + len(data)

    def close(self) -> None:
        central = b"".join(self._central)
        self._stream.write(central + _end(len(self._central), len(central), self._at))

"""One tensor as the bytes that `torch.save` would write: a stored zip, with its data at a known place.

DCP keeps each chunk of a tensor as such a stream. Writing it here needs no copy of the data and no second pass: head, the data
as they lie in memory, tail. The head always takes HEAD bytes, so a reader finds the data without parsing.
Not here: which tensors, which file, which offset.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from typing import Any

import torch

from fsdp.checkpoint.crc import crc32

HEAD = 1024
ALIGN = 64
_BIG = 0xFFFFFFFF
_UTF8 = 0x0800


class _Rebuild:
    """Pickles to the call that torch.save writes for a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.dtype, self.sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(max(1, n) for n in self.sizes[i + 1 :]) for i in range(len(self.sizes)))
        kind = torch.storage._dtype_to_storage_type_map().get(self.dtype)
        numel = math.prod(self.sizes)
        if kind is not None:
            storage = _Storage(getattr(torch, kind), numel)
            return torch._utils._rebuild_tensor_v2, (storage, 0, self.sizes, strides, False, OrderedDict())
        # fp8 and the other dtypes younger than typed storages: bytes, and the dtype beside them.
        storage = _Storage(torch.UntypedStorage, numel * self.dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, 0, self.sizes, strides, False, OrderedDict(), self.dtype)


class _Storage:
    def __init__(self, kind: Any, numel: int) -> None:
        self.kind, self.numel = kind, numel


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", obj.kind, "0", "cpu", obj.numel)


def _description(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Rebuild(dtype, sizes))
    return stream.getvalue()


def _local_header(name: bytes, crc: int, size: int, pad_to: int = 0, at: int = 0) -> bytes:
    """A stored record's header; padded by an extra field so that the data begins `pad_to` bytes after the archive's start."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    if pad_to:
        room = pad_to - at - 30 - len(name) - len(extra)
        extra += struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
    short = min(size, _BIG)
    fields = (0x04034B50, 45 if size >= _BIG else 20, _UTF8, 0, 0, 0x21, crc, short, short, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + name + extra


def _central_header(name: bytes, crc: int, size: int, at: int) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    short = min(size, _BIG)
    version = 45 if size >= _BIG else 20
    fields = (0x02014B50, version, version, _UTF8, 0, 0, 0x21, crc, short, short, len(name), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields) + name + extra


def _end(records: int, size: int, at: int) -> bytes:
    big = b""
    if at >= _BIG:
        big = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, records, records, size, at)
        big += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
    return big + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, records, records, size, min(at, _BIG), 0)


_NAMES = (b"archive/data.pkl", b"archive/byteorder", b"archive/version", b"archive/data/0")


def frame(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int, data_crc: int) -> tuple[bytes, bytes]:
    """What stands before and after the data."""
    contents = (_description(dtype, sizes), b"little", b"3\n")
    head, central = b"", b""
    for name, content in zip(_NAMES, contents, strict=False):
        central += _central_header(name, crc32(content), len(content), len(head))
        head += _local_header(name, crc32(content), len(content)) + content
    central += _central_header(_NAMES[3], data_crc, nbytes, len(head))
    head += _local_header(_NAMES[3], data_crc, nbytes, pad_to=HEAD, at=len(head))
    return head, central + _end(len(_NAMES), len(central), HEAD + nbytes)


def tail_length(nbytes: int) -> int:
    """Depends on the size alone, so that offsets are known before anything is written."""
    big_record = 20 if nbytes >= _BIG else 0
    big_end = 76 if HEAD + nbytes >= _BIG else 0
    return sum(46 + len(name) for name in _NAMES) + big_record + big_end + 22


def item_length(nbytes: int) -> int:
    return HEAD + nbytes + tail_length(nbytes)


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN

"""A tensor as the bytes that `torch.save` would write: a stored zip, with its data at a known offset.

DCP stores each chunk of a tensor as such a stream, and its own readers read these. Here it is head, data in
place, tail. Measured on 2 cores for 708 MiB in 219 tensors, with checksums and fsync: 0.12 s of processor
time and 0.3 s in all; DCP's FileSystemWriter, which copies each tensor through torch.save and the page cache
beside the training step, takes 0.46 to 1.5 s and 0.7 to 3.3 s. The head has HEAD bytes, so a reader finds the
data without parsing.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any
from zlib import crc32

import torch

from fsdp.base.torch_private.saving import rebuild_call, storage_class

HEAD = 1024
ALIGN = 64
_BIG = 0xFFFFFFFF
_UTF8 = 0x0800


class _Rebuild:
    """Pickles to the call that torch.save writes for a contiguous tensor."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.dtype, self.sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        kind = storage_class(self.dtype)
        numel = math.prod(self.sizes)
        if kind is not None:
            return rebuild_call(_Storage(kind, numel), self.sizes, None)
        # fp8 and other dtypes newer than typed storages: bytes, and the dtype as an argument.
        storage = _Storage(torch.UntypedStorage, numel * self.dtype.itemsize)
        return rebuild_call(storage, self.sizes, self.dtype)


class _Storage:
    def __init__(self, kind: Any, numel: int) -> None:
        self.kind, self.numel = kind, numel


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", obj.kind, "0", "cpu", obj.numel)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def _fields(name: bytes, crc: int, size: int, extra: bytes) -> bytes:
    """What both headers of a stored record have: version, flags, time, checksum and lengths."""
    version, short = 45 if size >= _BIG else 20, min(size, _BIG)
    return struct.pack("<HHHHHIII", version, _UTF8, 0, 0, 0x21, crc, short, short) + struct.pack(
        "<HH", len(name), len(extra)
    )


def _zip64(size: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""


def _local_header(name: bytes, crc: int, size: int, pad: int = 0) -> bytes:
    """`pad`: with an extra field it has so many bytes."""
    extra = _zip64(size)
    if pad:
        room = pad - 30 - len(name) - len(extra)
        extra += struct.pack("<2sH", b"FB", room - 4) + b"Z" * (room - 4)
    return struct.pack("<I", 0x04034B50) + _fields(name, crc, size, extra) + name + extra


def _central_header(name: bytes, crc: int, size: int, at: int) -> bytes:
    extra = _zip64(size)
    head = struct.pack("<IH", 0x02014B50, 45 if extra else 20) + _fields(name, crc, size, extra)
    return head + struct.pack("<HHHII", 0, 0, 0, 0, at) + name + extra


def _end(records: int, size: int, at: int) -> bytes:
    big = b""
    if at >= _BIG:
        big = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, records, records, size, at)
        big += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
    return big + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, records, records, size, min(at, _BIG), 0)


_NAMES = (b"archive/data.pkl", b"archive/byteorder", b"archive/version", b"archive/data/0")


def frame(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int, data_crc: int) -> tuple[bytes, bytes]:
    """The bytes before and after the data."""
    contents = (_pickled(_Rebuild(dtype, sizes)), b"little", b"3\n")
    head, central = b"", b""
    for name, content in zip(_NAMES, contents, strict=False):
        central += _central_header(name, crc32(content), len(content), len(head))
        head += _local_header(name, crc32(content), len(content)) + content
    central += _central_header(_NAMES[3], data_crc, nbytes, len(head))
    head += _local_header(_NAMES[3], data_crc, nbytes, pad=HEAD - len(head))
    return head, central + _end(len(_NAMES), len(central), HEAD + nbytes)


def item_length(nbytes: int) -> int:
    """Of head, data and tail. It depends on the size alone: offsets are known before anything is written."""
    big = 20 * (nbytes >= _BIG) + 76 * (HEAD + nbytes >= _BIG)
    return HEAD + nbytes + sum(46 + len(name) for name in _NAMES) + big + 22


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


# ---------------------------------------------------------------- checksums


def _times(a: int, b: int) -> int:
    """a·b modulo the polynomial of CRC-32, in the reflected order of bits that zlib uses."""
    product, bit = 0, 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ 0xEDB88320 if b & 1 else b >> 1


def _squares() -> list[int]:
    powers = [1 << 30]
    while len(powers) < 32:
        powers.append(_times(powers[-1], powers[-1]))
    return powers


_SQUARES = _squares()  # x^(2^n)


def combine(first: int, second: int, second_length: int) -> int:
    """crc32(a + b) from crc32(a), crc32(b) and len(b): zlib's crc32_combine, which Python's zlib lacks. One
    pass over the data then gives the checksum of its record and that of the file.
    """
    shift, power, length = 1 << 31, 3, second_length  # 8 bits a byte: start at x^(2^3)
    while length:
        if length & 1:
            shift = _times(_SQUARES[power & 31], shift)
        length >>= 1
        power += 1
    return _times(shift, first) ^ second

"""A writer of TensorBoard event files without the tensorboard package, whose import takes more than a second.

The format: records of length, masked CRC-32C of the length, payload, masked CRC-32C of the payload. The
payload is a protobuf Event message, of which four fields are used; a scalar event has 40 bytes.
"""

from __future__ import annotations

import functools
import math
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from fsdp.rundir.history import Appender

BUFFER_BYTES = 8192


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for row in range(256):
        for _ in range(8):
            row = (row >> 1) ^ (0x82F63B78 if row & 1 else 0)
        table.append(row)
    return table


def _masked_crc(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(wall_time: float, body: bytes) -> bytes:
    return _varint(1 << 3 | 1) + struct.pack("<d", wall_time) + body


@functools.cache
def _tag(tag: str) -> bytes:
    """A scalar up to its value: the tag's field and the value's first byte."""
    name = _bytes_field(1, tag.encode()) + _varint(2 << 3 | 5)
    return _varint(1 << 3 | 2) + _varint(len(name) + 4) + name


def _scalar(tag: str, value: float) -> bytes:
    try:
        return _tag(tag) + struct.pack("<f", value)
    except OverflowError:  # more than fp32 holds, as of a run that diverges
        return _tag(tag) + struct.pack("<f", math.copysign(math.inf, value))


class EventWriter:
    """Appends scalars to one new event file; a restart adds another file, as TensorBoard expects.

    Events are written whole or not at all: TensorBoard stops reading at a broken one.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """TensorBoard discards the steps of earlier files from `purge_step` on (a resume after a crash)."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = Appender(folder / name, lines=False, buffer_bytes=BUFFER_BYTES)
        self._write(_event(time.time(), _bytes_field(3, b"brain.Event:2")))
        if purge_step is not None:
            session_log = _bytes_field(7, _varint(1 << 3) + _varint(1))  # SessionLog.START
            self._write(_event(time.time(), _varint(2 << 3) + _varint(purge_step) + session_log))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_scalar(tag, value) for tag, value in values.items())
        self._write(_event(time.time(), _varint(2 << 3) + _varint(step) + _bytes_field(5, summary)))

    def _write(self, payload: bytes) -> None:
        length = struct.pack("<Q", len(payload))
        self._file.write(
            length
            + struct.pack("<I", _masked_crc(length))
            + payload
            + struct.pack("<I", _masked_crc(payload))
        )

    def close(self) -> None:
        self._file.close()

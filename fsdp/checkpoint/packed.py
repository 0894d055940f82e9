"""The bytes of a file that each save writes again, held compressed.

`.metadata` of 70B parameters on 4,096 ranks has 0.7 GB of records that are much alike. Rank 0 keeps it for
the next save, and never has it whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

BLOCK_BYTES = 1 << 18


class Packed:
    """A stream to write to, and after `flush` an iterable of its bytes, with their size and checksum."""

    def __init__(self, data: bytes = b"") -> None:
        self.size = self.crc = 0
        self._blocks: list[bytes] = []
        self._waiting = bytearray()
        if data:
            self.write(data)
            self.flush()

    def write(self, data: bytes | memoryview) -> int:
        self._waiting += data
        if len(self._waiting) >= BLOCK_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        if self._waiting:
            self.size += len(self._waiting)
            self.crc = zlib.crc32(self._waiting, self.crc)
            self._blocks.append(zlib.compress(self._waiting, 1))
            self._waiting = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        return map(zlib.decompress, self._blocks)

    def __bytes__(self) -> bytes:
        return b"".join(self)

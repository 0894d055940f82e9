"""The CRC-32 of joined parts from the CRC-32s of the parts: zlib's crc32_combine, which Python's zlib lacks.

One pass over the bytes then gives the checksum of the zip record and that of the file, also where several
ranks each read a part of the file.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ["combine", "crc32"]

_POLYNOMIAL = 0xEDB88320


def _times(a: int, b: int) -> int:
    """a·b modulo the polynomial, in the reflected order of bits that zlib uses."""
    product, bit = 0, 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1


def _squares() -> list[int]:
    powers = [1 << 30]
    while len(powers) < 32:
        powers.append(_times(powers[-1], powers[-1]))
    return powers


_SQUARES = _squares()  # x^(2^n)


def combine(first: int, second: int, second_length: int) -> int:
    """crc32(a + b) from crc32(a), crc32(b) and len(b)."""
    shift, power, length = 1 << 31, 3, second_length  # 8 bits a byte: start at x^(2^3)
    while length:
        if length & 1:
            shift = _times(_SQUARES[power & 31], shift)
        length >>= 1
        power += 1
    return _times(shift, first) ^ second

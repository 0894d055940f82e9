"""Refuses a pickle whose opcodes could take memory beyond its own size, before it is unpickled.

The unpickler makes room for a memo number before anything is stored there: a file of a few kilobytes with
damaged numbers took 17 GB. A pickle of so many bytes has fewer memo numbers than bytes. Opcodes that no
pickler of protocol 2 or later writes are refused too. One regular expression skips the opcodes of fixed
length: 48 MiB take 0.33 s, where pickletools.genops takes 4.4 s and the unpickling itself 4.0 s.
"""

from __future__ import annotations

import re

from fsdp.checkpoint.manifest import Broken

_WITHOUT_ARGUMENT = rb"[N\x88\x89\]ae\)t\x85\x86\x87}su\x8f\x90\x9102(1\x94\x93Rb\x81\x92]"
_WITH_LENGTH = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"\x8a": 1, b"\x8b": 4}
"""Opcode → bytes of its length, which stands before so many bytes."""


def check_opcodes(data: bytes) -> None:
    """Raises Broken for an opcode that is not expected, a memo number beyond the data, or no end."""
    skip = _fixed_lengths(len(data))
    at = 0
    while True:
        found = skip.match(data, at)
        assert found is not None, "no opcode at all is a match too"
        at = found.end()
        code = data[at : at + 1]
        if code == b".":
            return
        if code == b"c":
            at = _after_line(data, _after_line(data, at))
        elif (width := _WITH_LENGTH.get(code)) is not None:
            at += 1 + width
            at += int.from_bytes(data[at - width : at], "little")
        else:
            raise Broken("metadata", f".metadata cannot be read (byte {at} begins no opcode of a checkpoint)")


def _after_line(data: bytes, at: int) -> int:
    return data.find(b"\n", at) + 1 or len(data)


def _fixed_lengths(size: int) -> re.Pattern[bytes]:
    """Any number of opcodes of fixed length; memo numbers up to the next power of two."""
    bits = max(8, size.bit_length())
    whole, rest = divmod(bits, 8)
    number = b"." * whole
    if whole < 4:
        number += b"[\\x00-" + re.escape(bytes([2**rest - 1])) + b"]" + b"\\x00" * (3 - whole)
    opcodes = (
        _WITHOUT_ARGUMENT, rb"[Khq\x80].", rb"M..", rb"[Jj].{4}", b"r" + number, rb"[G\x95].{8}",
        rb"\x8a\x08.{8}",
    )  # fmt: skip
    return re.compile(b"(?:" + b"|".join(opcodes) + b")*+", re.DOTALL)

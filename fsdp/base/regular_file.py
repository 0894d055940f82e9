"""Reads files that may be anyone's: a FIFO is not waited for, and memory is limited."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fsdp.base.text import byte_size

SETTINGS = 16 << 20
"""Of a file of settings, such as config.json, which has some kilobytes."""
TABLE = 256 << 20
"""Of a file with a line for each tensor, rank or token: an index of weights, a tokenizer.json."""


def read_regular(file: Path, most: int) -> bytes:
    """A file's content; ValueError for a FIFO or a device, and for more than `most` bytes."""
    with open(file, "rb", opener=_open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        data = stream.read(most + 1) if status.st_size <= most else b""
    if max(status.st_size, len(data)) > most:
        raise ValueError(f"it has more than {byte_size(most)}")
    return data


def regular_text(file: Path, most: int) -> str:
    """The same as text in UTF-8."""
    return read_regular(file, most).decode()


def _open_at_once(path: str, flags: int) -> int:
    """O_NONBLOCK: opening a FIFO would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)

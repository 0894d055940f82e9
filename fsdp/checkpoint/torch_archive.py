"""Checks a zip of torch.save before torch reads it: torch unpacks an entry into memory, whatever its size.

torch.save compresses nothing, so what it writes needs no more memory than the file has bytes.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

MOST_AT_ONCE = 64 << 20
"""Of the zip's directory, which has some 100 bytes for each tensor: a million."""
MOST_OF_A_PICKLE = 256 << 20
"""Some 200 bytes for each tensor."""
_BEGIN, _END, _END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22


class _Limited(io.BufferedIOBase):
    """A file from which the zip module reads no more than MOST_AT_ONCE."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._stream.read(
            MOST_AT_ONCE + 1 if size is None or size < 0 else min(size, MOST_AT_ONCE + 1)
        )
        if len(data) > MOST_AT_ONCE:
            raise ValueError("its directory is too large")
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def seekable(self) -> bool:
        return True


def check_file(file: Path) -> None:
    """ValueError for what is no regular file, and for an archive that torch.save has not written."""
    if file.exists() and not file.is_file():
        raise ValueError("it is not a regular file")
    with file.open("rb") as stream:
        check_archive(stream)


def check_archive(stream: BinaryIO) -> None:
    """The same of a stream. Another format than a zip is left to torch."""
    if stream.read(4) != _BEGIN:
        return
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _END_BYTES))
    end = stream.read(_END_BYTES)
    # After it may be a comment with another directory, and readers differ in which they take.
    if not end.startswith(_END):
        raise ValueError("it is cut off, or not written by torch.save")
    try:
        entries = zipfile.ZipFile(_Limited(stream)).infolist()  # type: ignore[arg-type]
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"it is no zip of torch.save ({error})") from None
    if packed := next((one for one in entries if one.compress_type != zipfile.ZIP_STORED), None):
        raise ValueError(f"{packed.filename!a:.100} in it is compressed, and torch.save compresses nothing")
    if sum(one.file_size for one in entries) > size:
        raise ValueError("its entries are larger than the file")
    if large := next((one for one in entries if _is_pickle(one) and one.file_size > MOST_OF_A_PICKLE), None):
        raise ValueError(f"{large.filename!a:.100} in it has {large.file_size} bytes")


def _is_pickle(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith("data.pkl")

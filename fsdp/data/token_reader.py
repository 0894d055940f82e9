"""Reads the tokens of an open file.

By system calls, not by a map: where the file has become shorter since the start, a read ends early and is an
error with the position. In a mapped file the access would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import shlex
import weakref

import numpy as np

from fsdp.base.errors import TrainingError
from fsdp.data.token_file import TokenFile


class TokenReader:
    """An open token file; closed with this object."""

    def __init__(self, file: TokenFile) -> None:
        self._file = file
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            raise self._changed(f"cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` tokens from the position `first`."""
        file, size = self._file, self._file.dtype.itemsize
        found = os.pread(self._descriptor, count * size, file.offset + first * size)
        if len(found) < count * size:
            found = self._rest(found, first, count)
        return np.frombuffer(found, file.dtype)

    def _rest(self, found: bytes, first: int, count: int) -> bytes:
        """A read may return less than there is, as one of more than 2 GiB does."""
        file, size = self._file, self._file.dtype.itemsize
        while len(found) < count * size:
            at = file.offset + first * size + len(found)
            more = os.pread(self._descriptor, count * size - len(found), at)
            if not more:
                raise self._changed(f"ends at token {first + len(found) // size}")
            found += more
        return found

    def _changed(self, what: str) -> TrainingError:
        file = self._file
        return TrainingError(
            f"{file.path} {what}; it had {file.tokens} tokens at the start.",
            f"copy it again and start the run again: it resumes; ls -l {shlex.quote(str(file.path))}",
        )

"""A folder's files have the bytes that were written, whatever their sizes and whatever way they take."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp.checkpoint.store import BATCH_BYTES, BLOCK, DIRECT_BYTES, LocalStore


@pytest.mark.parametrize(
    "size", [1, BLOCK, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 5, BATCH_BYTES + 3 * BLOCK + 7]
)
@pytest.mark.parametrize("pieces", [0, 3, 50])
def test_what_is_written_is_read(size: int, pieces: int, tmp_path: Path) -> None:
    """The first buffer begins at a page, as staging's does: its whole blocks go past the page cache."""
    first = mmap.mmap(-1, size)
    first.write(os.urandom(size))
    rest = [os.urandom(nth % 5) for nth in range(pieces)]
    store = LocalStore(tmp_path)
    store.begin("step")
    store.write("step", "file", [memoryview(first), *rest])
    whole = first[:] + b"".join(rest)
    assert (tmp_path / "step" / "file").read_bytes() == whole
    start, cuts = size // 3, [memoryview(bytearray(len(one))) for one in rest]
    views = [memoryview(bytearray(size - start)), *cuts]
    store.read_into("step", "file", start, views)
    assert b"".join(views) == whole[start:]
    with pytest.raises(EOFError, match=f"ends at {len(whole)}, 1 bytes short"):
        store.read_into("step", "file", start, [memoryview(bytearray(len(whole) - start + 1))])


def failing_fsync(error: int, *, of_folders: bool) -> Callable[[int], None]:
    """An fsync that fails for folders, or for files."""
    fsync = os.fsync

    def call(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folders:
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    return call


def save(store: LocalStore, step: int) -> None:
    staged = store.staging(step, "0123abcd")
    store.begin(staged)
    store.write(staged, "file", [b"data"])
    store.seal(staged, store.final(step, "0123abcd"))


@pytest.mark.parametrize(("error", "of_folders"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_any_other_failed_sync_fails_the_save(
    error: int, of_folders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "fsync", failing_fsync(error, of_folders=of_folders))
    with pytest.raises(OSError, match=os.strerror(error)):
        save(store, 1)

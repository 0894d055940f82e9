"""A folder's files have the bytes that were written, whatever their sizes and whatever way they take."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from fsdp.checkpoint.local_store import BATCH_BYTES, BLOCK, DIRECT_BYTES, MANY, LocalStore


@pytest.mark.parametrize(
    "size", [1, BLOCK, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 5, BATCH_BYTES + 3 * BLOCK + 7]
)
@pytest.mark.parametrize("pieces", [0, 3, 3 * MANY])
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


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal, or a file server, may cut a call anywhere."""
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:3]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:2]], at))
    store, data = LocalStore(tmp_path), [b"0123456789", b"", b"ab", b"cdefg"]
    store.begin("step")
    store.write("step", "file", data)
    assert (tmp_path / "step" / "file").read_bytes() == b"".join(data)
    views = [memoryview(bytearray(5)), memoryview(bytearray(12))]
    store.read_into("step", "file", 0, views)
    assert b"".join(views) == b"".join(data)

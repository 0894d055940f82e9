"""A tensor's bytes are those that torch.save writes, and checksums of parts combine."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.base import digest
from fsdp.checkpoint import pieces, torch_file
from fsdp.checkpoint.torch_file import combine

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(), (5,), (3, 4), (0,), (2, 0, 3), (2, 3, 1, 2, 2, 3)], ids=str)
def test_torch_load_reads_back_every_bit(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    count = int(np.prod(sizes, dtype=int)) * dtype.itemsize
    data = bytes(int(one) & 1 for one in os.urandom(count)) if dtype == torch.bool else os.urandom(count)
    head, tail = torch_file.frame(dtype, sizes, len(data), zlib.crc32(data))
    item = head + data + tail
    assert (len(head), len(item)) == (torch_file.HEAD, torch_file.item_length(len(data)))
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None
    loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape), loaded.stride()) == (dtype, sizes, torch.empty(sizes).stride())
    assert loaded.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data if count else True


def test_a_tensor_of_more_than_4_gib_is_read_too(tmp_path: Path) -> None:
    """Sparse on disk: only its last elements are written."""
    count = (4 << 30) + 8
    head, tail = torch_file.frame(torch.uint8, (count,), count, 0)
    with (tmp_path / "big").open("wb") as stream:
        stream.write(head)
        stream.seek(torch_file.HEAD + count - 3)
        stream.write(b"end" + tail)
    assert (tmp_path / "big").stat().st_size == torch_file.item_length(count)
    loaded = torch.load(tmp_path / "big", mmap=True, weights_only=True)
    assert loaded.shape == (count,)
    assert bytes(loaded[-4:].tolist()) == b"\0end"


def test_checksums_of_parts_combine() -> None:
    data = os.urandom(100_000)
    for cut in (0, 1, 77, 65_536, 100_000):
        assert combine(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), len(data) - cut) == zlib.crc32(data)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_tensors_digest_is_the_sum_of_its_boxes_cut_along_any_axis(axis: int) -> None:
    whole = torch.randn(4, 5, 6, dtype=torch.float64)
    total, at = 0, 0
    for part in whole.chunk(3, dim=axis):
        offsets = tuple(at if dim == axis else 0 for dim in range(3))
        total += pieces.digest(part.contiguous(), offsets, (4, 5, 6))
        at += part.shape[axis]
    assert total % 2**64 == digest.digest_shard(whole).at(0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [(0,), (), (7,), (3, 5), (2 * pieces.CHUNK + 7,)], ids=str)
def test_a_digest_is_the_same_on_a_cpu_and_on_a_device(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """numpy computes it on a CPU, torch elsewhere: one checkpoint is verified on both."""
    whole = torch.arange(int(np.prod(size, dtype=int))).reshape(size).to(dtype)
    assert pieces.digest(whole, (0,) * len(size), size) == digest.digest_shard(whole).at(0)

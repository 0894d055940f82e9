"""Writes and reads layout-1.bin, a save's layout beside `.metadata`, which each rank reads at a resume.

`.metadata` has two records for each part. 70B parameters on 4,096 ranks are ten million parts: its objects
take gigabytes on every rank. This file has the tables of layout.py, a few megabytes, from which the places of
all parts follow. It is data: JSON and integers, checked against its own length and the tensors' sizes.

    8 bytes    the length of the JSON, little-endian
    JSON       ranks; tensors: keys, size, dtype, division; values: key, offset, length; each division's rows
    tables     of each division: ranks (int32), offsets, sizes (int64) of boxes with one writer, then offsets
               and sizes of the others; then the writers of the others, tensor by tensor (int32)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp.base.checked_values import checked_text
from fsdp.base.torch_private.saving import StorageInfo
from fsdp.checkpoint import file_names
from fsdp.checkpoint.layout import Division, Layout, WholeTensor, Writers
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.snapshot import KeyPath

INDEX, NUMBER = np.dtype("<i4"), np.dtype("<i8")
LARGEST = 2**62
"""Of an offset, a size, and the bytes of all tensors: sums of them fit in 64 bits."""
MOST_RANKS = 1 << 20


# ---------------------------------------------------------------- writing


def encode(layout: Layout, values: Sequence[tuple[str, KeyPath, bytes]]) -> bytes:
    """`values` lie at the end of rank 0's file, in their order."""
    places, at = [], layout.values_begin
    for key, _, data in values:
        places.append([key, at, len(data)])
        at += len(data)
    about = {
        "ranks": layout.ranks,
        "tensors": [
            [[key for key, _ in one.keys], one.size, str(one.dtype).removeprefix("torch."), division]
            for one, division in zip(layout.tensors, layout.division_of.tolist(), strict=True)
        ],
        "values": places,
        "rows": [[len(one.fixed.ranks), len(one.sizes), one.sizes.shape[1]] for one in layout.divisions],
    }
    text = json.dumps(about).encode()
    tables = [len(text).to_bytes(8, "little"), text]
    for one in layout.divisions:
        tables.append(one.fixed.ranks.astype(INDEX).tobytes())
        numbers = (one.fixed.offsets, one.fixed.sizes, one.offsets, one.sizes)
        tables += [table.astype(NUMBER).tobytes() for table in numbers]
    tables += [layout.chosen[tensor].astype(INDEX).tobytes() for tensor in sorted(layout.chosen)]
    return b"".join(tables)


# ---------------------------------------------------------------- reading


def decode(data: bytes) -> tuple[Layout, Metadata]:
    """The layout, and DCP's metadata of it without the parts: keys, sizes, dtypes, places of the values."""
    try:
        tables = _LayoutTables(data)
        layout = _layout(tables.about, tables)
        return layout, _metadata(layout, tables.about)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Broken("layout", f"{file_names.LAYOUT} cannot be read ({reason})") from None


class _LayoutTables:
    """The JSON, and the tables after it in their order."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        self.about: dict[str, Any] = json.loads(data[8 : 8 + length])
        self._data, self._at = data, 8 + length

    def next(self, dtype: np.dtype[Any], rows: int, columns: int | None = None) -> np.ndarray:
        count = rows if columns is None else rows * columns
        if count * dtype.itemsize > len(self._data) - self._at:  # numpy's own check overflows
            raise ValueError("a table leaves the file")
        table = np.frombuffer(self._data, dtype, count, self._at)
        self._at += count * dtype.itemsize
        return table if columns is None else table.reshape(rows, columns)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow the tables")


def _layout(about: dict[str, Any], tables: _LayoutTables) -> Layout:
    ranks = _count(about["ranks"], MOST_RANKS)
    tensors, division_of = [], []
    for keys, size, dtype, division in about["tensors"]:
        names = tuple((checked_text(key), (key,)) for key in keys)
        tensors.append(WholeTensor(names, tuple(map(_count, size)), _dtype(dtype)))
        division_of.append(_count(division))
    _count(sum(math.prod(one.size) * one.dtype.itemsize for one in tensors))
    divisions = [_division(tables, ranks, *map(_count, rows)) for rows in about["rows"]]
    ends = [_ends(one) for one in divisions]
    chosen = {}
    for nth, (tensor, division) in enumerate(zip(tensors, division_of, strict=True)):
        if len(tensor.size) != len(ends[division]) or any(ends[division] > np.array(tensor.size, NUMBER)):
            raise ValueError(f"a part of {tensor.keys[0][0]} leaves its tensor of {tensor.size}")
        if others := len(divisions[division].sizes):
            chosen[nth] = _writers(tables.next(INDEX, others), ranks)
    tables.end()
    return Layout(tensors, divisions, np.array(division_of, np.int64), ranks, chosen)


def _division(tables: _LayoutTables, ranks: int, fixed: int, others: int, dims: int) -> Division:
    writers = _writers(tables.next(INDEX, fixed), ranks)
    boxes = [tables.next(NUMBER, rows, dims) for rows in (fixed, fixed, others, others)]
    for table in boxes:
        if table.size and not 0 <= table.min() <= table.max() <= LARGEST:
            raise ValueError("an offset or a size is out of range")
    # rows within a rank's own tensor, which its save alone needs
    unknown = np.zeros(fixed, np.int64)
    holders = np.empty((others, 0), np.int32)
    return Division(Writers(writers, unknown, unknown, boxes[0], boxes[1]), holders, boxes[2], boxes[3])


def _writers(table: np.ndarray, ranks: int) -> np.ndarray:
    if table.size and not 0 <= table.min() <= table.max() < ranks:
        raise ValueError("a part is written by a rank that does not exist")
    return table


def _ends(division: Division) -> np.ndarray:
    """The largest end of a box in each dimension."""
    ends = np.concatenate([division.fixed.offsets + division.fixed.sizes, division.offsets + division.sizes])
    return ends.max(axis=0, initial=0)


def _metadata(layout: Layout, about: dict[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    for tensor in layout.tensors:
        entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.size), [])
        entries |= dict.fromkeys((key for key, _ in tensor.keys), entry)
    storage = {}
    for key, offset, length in about["values"]:
        entries[checked_text(key)] = BytesStorageMetadata()
        place = StorageInfo(file_names.data_file(0), _count(offset), _count(length))
        storage[MetadataIndex(key)] = place
    return Metadata(entries, None, storage)


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(checked_text(name))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is no dtype")
    return found


def _count(value: Any, most: int = LARGEST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number of bytes, rows or ranks")
    return value

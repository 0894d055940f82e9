"""Writes DCP's `.metadata` from a layout: the pickle of `Metadata`, without its objects.

Seven million parts would be 20 million objects. Here the records of a tensor's parts are rows of a table of
bytes: everything but some numbers is the same in each. torch.distributed.checkpoint reads the result as its
own; metadata.py reads it without executing code.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp.base import garbage
from fsdp.base.torch_private.saving import StorageInfo
from fsdp.checkpoint import file_names
from fsdp.checkpoint.layout import Layout, Writers
from fsdp.checkpoint.packed import Packed
from fsdp.checkpoint.snapshot import KeyPath

DCP_VERSION = "1.0.0"
PROTOCOL = 3
"""The last without frames and without implicit numbers of memoized objects."""
NEW_OBJECT = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
BUILT = pickle.SETITEMS + pickle.BUILD
TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
Field = bytes | np.ndarray


def metadata_pickle(layout: Layout, values: Sequence[tuple[str, KeyPath, bytes]]) -> Packed:
    """`.metadata` of a save; `values` lie at the end of rank 0's file, in their order."""
    tensors: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for nth, tensor in enumerate(layout.tensors):
        for key, path in tensor.keys:
            properties = TensorProperties(dtype=tensor.dtype)
            chunks: Any = _ChunkList(nth)
            tensors[key] = TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
            paths[key] = path
    for key, path, _ in values:
        tensors[key], paths[key] = BytesStorageMetadata(), path
    stream = Packed()
    storage = _StorageIndex([(key, len(data)) for key, _, data in values])
    with garbage.held():
        _MetadataPickler(stream, layout).dump(Metadata(tensors, paths, storage, version=DCP_VERSION))
    stream.flush()
    return stream


@dataclass(frozen=True)
class _ChunkList:
    """Stands for the list of a tensor's chunks."""

    tensor: int


@dataclass(frozen=True)
class _StorageIndex:
    """Stands for the dict from index to place of all parts and values."""

    values: list[tuple[str, int]]


# Its methods in Python are private to the stubs, which know a Pickler's C form only.
_PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class _MetadataPickler(_PythonPickler):  # type: ignore[misc]
    dispatch = _PythonPickler.dispatch.copy()

    def __init__(self, stream: Packed, layout: Layout) -> None:
        super().__init__(stream, PROTOCOL)
        self._layout, self._stream = layout, stream
        self._kept: dict[object, object] = {}
        """Objects that records refer to: a pickler knows objects by their address."""
        self._offsets_of: dict[int, Field] = {}
        self._chunks_of: dict[int, memoryview] = {}
        """By division: tensors that are distributed alike have the same records of chunks."""

    def _reference(self, one: Any) -> int:
        """The number of a memoized object; equal strings and sizes have one."""
        one = self._kept.setdefault((type(one), one), one)
        if id(one) not in self.memo:
            self.save(one)
            self._stream.write(pickle.POP)
        return int(self.memo[id(one)][0])

    def _get(self, one: Any) -> bytes:
        return pickle.LONG_BINGET + struct.pack("<I", self._reference(one))

    def _short_get(self, one: Any) -> bytes:
        number = self._reference(one)
        return pickle.BINGET + bytes([number]) if number < 256 else self._get(one)

    def _size(self, columns: np.ndarray) -> list[Field]:
        """A torch.Size of each row."""
        dims = columns.shape[1]
        numbers = [_integers(column) for column in columns.T]
        opening, closing = ([pickle.MARK], [pickle.TUPLE]) if dims not in TUPLES else ([], [TUPLES[dims]])
        return [self._short_get(torch.Size), *opening, *numbers, *closing, pickle.TUPLE1 + pickle.REDUCE]

    def _same_sizes(self, columns: np.ndarray) -> Field:
        """References to a torch.Size of each row, of which few differ."""
        if not columns.shape[1]:
            return self._get(torch.Size(()))
        sizes, which = np.unique(columns, axis=0, return_inverse=True)
        numbers = np.array([self._reference(torch.Size(size)) for size in sizes.tolist()], "<u4")
        return _with_opcode(pickle.LONG_BINGET, numbers[which.reshape(-1)])

    def _offsets(self, tensor: int, writers: Writers) -> list[Field]:
        """A torch.Size of each row: a reference, if other tensors may have the same rows."""
        if tensor in self._layout.chosen:
            return self._size(writers.offsets)
        division = int(self._layout.division_of[tensor])
        if division not in self._offsets_of:
            self._offsets_of[division] = self._same_sizes(writers.offsets)
        return [self._offsets_of[division]]

    def save_chunks(self, chunks: _ChunkList) -> None:
        tensor, layout = chunks.tensor, self._layout
        if tensor in layout.chosen:
            records = self._chunk_records(tensor)
        else:
            division = int(layout.division_of[tensor])
            if division not in self._chunks_of:
                self._chunks_of[division] = self._chunk_records(tensor)
            records = self._chunks_of[division]
        self._stream.write(pickle.EMPTY_LIST + pickle.MARK)
        self._stream.write(records)
        self._stream.write(pickle.APPENDS)

    def _chunk_records(self, tensor: int) -> memoryview:
        writers = self._layout.writers(tensor)
        fields: list[Field] = [self._short_get(ChunkStorageMetadata), NEW_OBJECT]
        fields += [self._short_get("offsets"), *self._offsets(tensor, writers)]
        fields += [self._short_get("sizes"), self._same_sizes(writers.sizes), BUILT]
        return _records(len(writers.ranks), fields)

    def save_storage(self, storage: _StorageIndex) -> None:
        layout = self._layout
        files = [self._reference(file_names.data_file(rank)) for rank in range(layout.ranks)]
        file_numbers = np.array(files, "<u4")
        opening = pickle.EMPTY_DICT
        for nth, writers, begins, lengths in layout.places():
            place = self._place(file_numbers[writers.ranks], begins, lengths)
            offsets = self._offsets(nth, writers)
            for key, _ in layout.tensors[nth].keys:
                records = _records(len(begins), [*self._index(key, offsets), *place])
                self._stream.write(opening + pickle.MARK)
                self._stream.write(records)
                self._stream.write(pickle.SETITEMS)
                opening = b""
        self._stream.write(opening)
        end = layout.values_begin
        for key, length in storage.values:
            self.save(MetadataIndex(key))
            self.save(StorageInfo(file_names.data_file(0), end, length))
            self._stream.write(pickle.SETITEM)
            end += length

    def _index(self, key: str, offsets: Sequence[Field]) -> list[Field]:
        fields = [self._short_get(MetadataIndex), NEW_OBJECT]
        fields += [self._short_get("fqn"), self._get(key), self._short_get("index"), pickle.NONE]
        return [*fields, self._short_get("offset"), *offsets, BUILT]

    def _place(self, files: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> list[Field]:
        fields: list[Field] = [self._short_get(StorageInfo), NEW_OBJECT]
        fields += [self._short_get("relative_path"), _with_opcode(pickle.LONG_BINGET, files)]
        fields += [self._short_get("offset"), _integers(begins)]
        return [*fields, self._short_get("length"), _integers(lengths), BUILT]

    dispatch[_ChunkList] = save_chunks
    dispatch[_StorageIndex] = save_storage


def _integers(numbers: np.ndarray) -> Field:
    """The pickled form of each; one form for all if they are equal."""
    if not len(numbers):
        return b""
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        return pickle.dumps(low, PROTOCOL)[2:-1]  # without protocol and STOP
    if high < 2**31:
        return _with_opcode(pickle.BININT, numbers.astype("<i4"))
    return _with_opcode(pickle.LONG1 + b"\x08", numbers.astype("<i8"))


def _with_opcode(opcode: bytes, numbers: np.ndarray) -> np.ndarray:
    out = np.empty((len(numbers), len(opcode) + numbers.itemsize), np.uint8)
    out[:, : len(opcode)] = np.frombuffer(opcode, np.uint8)
    out[:, len(opcode) :] = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)
    return out


def _records(count: int, fields: Sequence[Field]) -> memoryview:
    """The fields side by side in each of so many rows."""
    widths = [len(one) if isinstance(one, bytes) else one.shape[1] for one in fields]
    out, at = np.empty((count, sum(widths)), np.uint8), 0
    for one, width in zip(fields, widths, strict=True):
        out[:, at : at + width] = np.frombuffer(one, np.uint8) if isinstance(one, bytes) else one
        at += width
    return out.reshape(-1).data

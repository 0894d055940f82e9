"""Reads DCP's `.metadata`, a pickle, without executing code from it.

The unpickler knows the names that DCP writes there and the few of torch inside them; any other name, and so
any other call, is refused before it is looked up. A pickle may also set attributes of the objects it is
given: it is given stand-in classes made for this one read, which are dropped after it. DCP's own objects are
made from the stand-ins, with each type, size and path checked.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from fsdp.base import proc
from fsdp.base.text import checked_count, checked_text
from fsdp.base.torch_private.saving import (
    DCP_OLD_PROPERTIES,
    DCP_OLD_UNREAD,
    DCP_PLACE,
    DCP_UNREAD,
    StorageInfo,
)
from fsdp.checkpoint.manifest import Broken

_DCP = "torch.distributed.checkpoint.metadata"
_KINDS = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
)
_CLASSES = {(_DCP, kind.__name__): kind for kind in _KINDS} | {DCP_PLACE: StorageInfo}
_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DEEPEST = 8
"""Levels of nesting allowed in planner_data."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.stand_ins = {name: _stand_in(name[1]) for name in _CLASSES}
        self._known: dict[tuple[str, str], Any] = {
            **_DTYPES,
            **self.stand_ins,
            DCP_OLD_PROPERTIES: self.stand_ins[_DCP, "TensorProperties"],
            (_DCP, "StorageMeta"): _stand_in("StorageMeta"),
            ("torch", "Size"): torch.Size,
            ("collections", "OrderedDict"): dict,
            # fields of a tensor that are not used here, and the path that dcp.save wrote to
            **dict.fromkeys((*DCP_UNREAD, DCP_OLD_UNREAD), lambda *_: None),
            # Python 3.11.2 (Debian 12) writes an enum's member, one of these fields, as getattr(class, name)
            ("builtins", "getattr"): lambda *_: None,
            ("pathlib", "PosixPath"): lambda *parts: None,
            ("pathlib._local", "PosixPath"): lambda *parts: None,  # as Python 3.13 writes it
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise Broken(
                "foreign-pickle",
                f".metadata names {module}.{name}, which is not part of a checkpoint; no code was run",
            )
        return self._known[module, name]


def _stand_in(name: str) -> type:
    """The stand-in for a class of DCP while the pickle is read; TensorProperties has a state of its own."""
    body = {"__setstate__": lambda self, state: setattr(self, "state", state)}
    return type(name, (), body if name == "TensorProperties" else {})


def read(data: bytes) -> dcp.Metadata:
    """The metadata; Broken if it is damaged or unsafe."""
    try:
        with proc.collection_paused():
            reader = _Reader(data)
            found = _Converter(reader).made(reader.load())
            if not isinstance(found, dcp.Metadata):
                raise TypeError("it holds something else")
            return found
    except Broken:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None


class _Converter:
    """Makes DCP's objects from stand-ins; an exception for a form that DCP does not write."""

    def __init__(self, reader: _Reader) -> None:
        self._real = {stand_in: _CLASSES[name] for name, stand_in in reader.stand_ins.items()}

    def made(self, found: Any) -> Any:
        """DCP's object for a stand-in. Its constructor refuses unknown fields."""
        kind = self._real[type(found)]
        if kind is dcp.TensorProperties:
            if type(found.state[0]) is not torch.dtype:
                raise TypeError("a tensor has no dtype")
            return dcp.TensorProperties(dtype=found.state[0])
        fields = vars(found)
        if kind is dcp.Metadata:
            entries = {
                checked_text(key): self.made(entry) for key, entry in fields["state_dict_metadata"].items()
            }
            places = (fields.get("storage_data") or {}).items()
            storage = {self.made(index): self.made(place) for index, place in places}
            return dcp.Metadata(entries, _plain(fields.get("planner_data")), storage)
        if kind is dcp.TensorStorageMetadata:
            chunks = [self.made(chunk) for chunk in fields["chunks"]]
            return _checked_tensor(kind(self.made(fields["properties"]), _size(fields["size"]), chunks))
        return _CHECKS[kind](kind(**fields))


def _checked_tensor(entry: Any) -> Any:
    size = entry.size
    for chunk in entry.chunks:
        ends = map(operator.add, chunk.offsets, chunk.sizes)
        same = len(chunk.offsets) == len(chunk.sizes) == len(size)
        if not same or not all(map(operator.le, ends, size)):
            raise ValueError(f"a chunk of {chunk.sizes} at {chunk.offsets} leaves its tensor of {size}")
    if sum([math.prod(chunk.sizes) for chunk in entry.chunks]) < math.prod(size):
        raise ValueError(f"chunks do not cover a tensor of {tuple(size)}")
    return entry


def _checked_chunk(chunk: Any) -> Any:
    _size(chunk.offsets), _size(chunk.sizes)
    return chunk


def _checked_index(index: Any) -> Any:
    checked_text(index.fqn)
    if index.offset is not None:
        _size(index.offset)
    if index.index is not None:
        checked_count(index.index)
    return index


def _checked_place(place: Any) -> Any:
    if place.transform_descriptors:
        raise Broken("format", f"{place.relative_path!a} is compressed or encrypted")
    path = checked_text(place.relative_path)
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise Broken("foreign-path", f".metadata points outside the checkpoint, to {path!a}")
    checked_count(place.offset), checked_count(place.length)
    return place


_CHECKS = {
    dcp.BytesStorageMetadata: lambda value: value,
    dcp.ChunkStorageMetadata: _checked_chunk,
    dcp.MetadataIndex: _checked_index,
    StorageInfo: _checked_place,
}


def _size(value: Any) -> torch.Size:
    if type(value) is not torch.Size or min(value, default=0) < 0:
        raise ValueError(f"{value!a:.40} is not a size")
    return value


def _plain(value: Any, deep: int = 0) -> Any:
    """A value of strings and numbers in dicts, lists and tuples; an exception for anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if deep > _DEEPEST:
        raise ValueError("planner_data is nested too deeply")
    if type(value) is dict:
        return {_plain(key, _DEEPEST): _plain(item, deep + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, deep + 1) for item in value)
    raise TypeError(f"a {type(value).__name__} in planner_data")

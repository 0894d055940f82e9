"""Reads DCP's `.metadata`, a pickle, without executing code from it.

The unpickler knows the names that DCP writes there and the few of torch inside them; any other name, and so
any other call, is refused before it is looked up. A pickle may also set attributes of the objects it is
given: it is given stand-in classes made for this one read, which are dropped after it. DCP's own objects are
made from the stand-ins, with each type, size and path checked.
"""

from __future__ import annotations

import dataclasses
import io
import math
import operator
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from fsdp.base import garbage
from fsdp.base.checked_values import checked_text
from fsdp.base.torch_private.saving import (
    DCP_OLD_PROPERTIES,
    DCP_OLD_UNREAD,
    DCP_PLACE,
    DCP_UNREAD,
    StorageInfo,
)
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.pickle_opcodes import check_opcodes

_DCP = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
    "StorageMeta", "TensorProperties", "TensorStorageMetadata",
)  # fmt: skip
_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DEEPEST = 8
"""Levels of nesting allowed in planner_data."""

_METADATA = frozenset(field.name for field in dataclasses.fields(Metadata))
_TENSOR = frozenset(field.name for field in dataclasses.fields(dcp.TensorStorageMetadata))
_CHUNK = frozenset(field.name for field in dataclasses.fields(ChunkStorageMetadata))
_INDEX = frozenset(field.name for field in dataclasses.fields(MetadataIndex))
_PLACE = frozenset(field.name for field in dataclasses.fields(StorageInfo))


def _stand_in(name: str) -> type:
    """The stand-in for a class of DCP while the pickle is read."""
    return type(name, (), {"__setstate__": _set_state} if name == "TensorProperties" else {})


def _set_state(properties: Any, state: Any) -> None:
    properties.state = state


def _allowed_names() -> dict[tuple[str, str], Any]:
    """Names that the pickle may contain → their objects. Python's and torch's own classes are immutable."""
    kinds = {(_DCP, name): _stand_in(name) for name in _CLASSES}
    return {
        **_DTYPES,
        **kinds,
        DCP_OLD_PROPERTIES: kinds[_DCP, "TensorProperties"],
        DCP_PLACE: _stand_in(DCP_PLACE[1]),
        ("torch", "Size"): torch.Size,
        ("collections", "OrderedDict"): dict,
        # fields of a tensor that are not used here, and the path that dcp.save wrote to
        **dict.fromkeys((*DCP_UNREAD, DCP_OLD_UNREAD), lambda *_: None),
        # Python 3.11.2 (Debian 12) writes an enum's member, one of these fields, as getattr(class, name)
        ("builtins", "getattr"): lambda *_: None,
        ("pathlib", "PosixPath"): lambda *parts: None,
        ("pathlib._local", "PosixPath"): lambda *parts: None,  # as Python 3.13 writes it
    }


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.known = _allowed_names()

    def find_class(self, module: str, name: str) -> Any:
        known = self.known.get((module, name))
        if known is None:
            raise Broken(
                "foreign-pickle",
                f".metadata names {module}.{name}, which is not part of a checkpoint; no code was run",
            )
        return known


def read(data: bytes) -> Metadata:
    """The metadata; Broken if it is damaged or unsafe."""
    try:
        with garbage.held():
            check_opcodes(data)
            reader = _Reader(data)
            return _Converter(reader.known).metadata(reader.load())
    except Broken:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None


class _Converter:
    """Converts stand-ins to DCP's objects; TypeError, ValueError or KeyError for a form DCP does not write.

    A checkpoint of 1,000 ranks has 100,000 chunks and places. These keep their attributes and change their
    class, and shared sizes and paths are checked once.
    """

    def __init__(self, known: Mapping[tuple[str, str], Any]) -> None:
        self._kinds = {name: known[_DCP, name] for name in _CLASSES}
        self._info = known[DCP_PLACE]
        self._sizes_seen: dict[int, torch.Size] = {}
        self._paths_seen: set[str] = set()

    def metadata(self, found: Any) -> Metadata:
        if type(found) is not self._kinds["Metadata"]:
            raise Broken("metadata", ".metadata holds something else")
        fields = _fields(found, self._kinds["Metadata"], _METADATA)
        tensors = {
            checked_text(key): self._entry(entry)
            for key, entry in _dict(fields["state_dict_metadata"]).items()
        }
        storage = {
            self._index(key): self._place(info)
            for key, info in _dict(fields.get("storage_data") or {}).items()
        }
        version = fields.get("version")
        return Metadata(
            tensors, _plain(fields.get("planner_data")), storage, version=version and checked_text(version)
        )

    def _entry(self, found: Any) -> dcp.STORAGE_TYPES:
        if type(found) is self._kinds["BytesStorageMetadata"]:
            return dcp.BytesStorageMetadata()
        fields = _fields(found, self._kinds["TensorStorageMetadata"], _TENSOR)
        properties, size = fields["properties"], self._sizes(fields["size"])
        if (
            type(properties) is not self._kinds["TensorProperties"]
            or type(properties.state[0]) is not torch.dtype
        ):
            raise TypeError("a tensor has no dtype")
        chunks = [self._chunk(chunk, size) for chunk in fields["chunks"]]
        if sum([math.prod(chunk.sizes) for chunk in chunks]) < math.prod(size):
            raise ValueError(f"chunks do not cover a tensor of {tuple(size)}")
        return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=properties.state[0]), size, chunks)

    def _chunk(self, found: Any, whole: torch.Size) -> ChunkStorageMetadata:
        fields = _fields(found, self._kinds["ChunkStorageMetadata"], _CHUNK)
        offsets, sizes = self._sizes(fields["offsets"]), self._sizes(fields["sizes"])
        same = len(offsets) == len(sizes) == len(whole)
        if not same or not all(map(operator.le, map(operator.add, offsets, sizes), whole)):
            raise ValueError(
                f"a chunk of {tuple(sizes)} at {tuple(offsets)} leaves its tensor of {tuple(whole)}"
            )
        found.__class__ = ChunkStorageMetadata
        return cast(ChunkStorageMetadata, found)

    def _index(self, found: Any) -> MetadataIndex:
        fields = _fields(found, self._kinds["MetadataIndex"], _INDEX)
        checked_text(fields["fqn"])
        if fields.get("offset") is not None:
            self._sizes(fields["offset"])
        if fields.get("index") is not None:
            _count(fields["index"])
        found.__class__ = MetadataIndex
        return cast(MetadataIndex, found)

    def _place(self, found: Any) -> StorageInfo:
        fields = _fields(found, self._info, _PLACE)
        if fields.get("transform_descriptors"):
            raise Broken("format", f"{fields['relative_path']!a} is compressed or encrypted")
        path = checked_text(fields["relative_path"])
        if path not in self._paths_seen:
            self._paths_seen.add(inside(path))
        _count(fields["offset"])
        _count(fields["length"])
        found.__class__ = StorageInfo
        return cast(StorageInfo, found)

    def _sizes(self, value: Any) -> torch.Size:
        if id(value) not in self._sizes_seen:  # kept below, or another object could get its id
            if type(value) is not torch.Size or min(value, default=0) < 0:
                raise ValueError(f"{value!a:.40} is not a size")
            self._sizes_seen[id(value)] = value
        return cast(torch.Size, value)


def _fields(found: Any, kind: type, names: frozenset[str]) -> dict[str, Any]:
    if type(found) is not kind or not vars(found).keys() <= names:
        raise TypeError(f"a {type(found).__name__} instead of a {kind.__name__}")
    return vars(found)


def inside(path: str) -> str:
    """A file's path within its checkpoint; Broken if it points outside. Checks the string, not a Path."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise Broken("foreign-path", f".metadata points outside the checkpoint, to {path!a}")
    return path


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} instead of a dict")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a number of bytes or elements")
    return value


def _plain(value: Any, deep: int = 0, known: dict[tuple[int, int], Any] | None = None) -> Any:
    """A value of strings and numbers in dicts, lists and tuples; TypeError for anything else.

    `known` are containers that occur again: some kilobytes can refer to a list a million times.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if deep > _DEEPEST:
        raise ValueError("planner_data is nested too deeply")
    known = {} if known is None else known
    if (id(value), deep) not in known:
        known[id(value), deep] = _plain_container(value, deep, known)
    return known[id(value), deep]


def _plain_container(value: Any, deep: int, known: dict[tuple[int, int], Any]) -> Any:
    if type(value) is dict:
        return {_plain(key, _DEEPEST, known): _plain(one, deep + 1, known) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one, deep + 1, known) for one in value)
    raise TypeError(f"a {type(value).__name__} in planner_data")

"""Opens a checkpoint: reads DCP's `.metadata`, a pickle, without executing code from it.

The unpickler knows the names that DCP writes there and the few of torch inside them; any other name, and so
any other call, is refused before it is looked up. A pickle may also set attributes of the objects it is
given: it is given stand-in classes made for this one read, which are dropped after it. From them come the
tensors and values with their places in the files, each type, size and path checked.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from fsdp.base import proc
from fsdp.base.errors import CheckpointError
from fsdp.base.text import checked_count, checked_text
from fsdp.base.torch_private import DCP_OLD_PROPERTIES, DCP_OLD_UNREAD, DCP_PLACE, DCP_UNREAD
from fsdp.checkpoint import file_names
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.store import Store

MOST_OF_METADATA = 4 << 30
_DCP = "torch.distributed.checkpoint.metadata"
_KINDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)
_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True)
class FileRange:
    """A range of a file of the checkpoint."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A stored box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    range: FileRange


@dataclass(frozen=True)
class SavedTensor:
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Saved = tuple[dict[str, SavedTensor], dict[str, FileRange]]
"""The tensors of a checkpoint and its other values, by key."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        kinds = {(_DCP, name): _stand_in(name) for name in _KINDS}
        self.tensor_kind = kinds[_DCP, "TensorStorageMetadata"]
        self._known: dict[tuple[str, str], Any] = {
            **_DTYPES,
            **kinds,
            DCP_PLACE: _stand_in(DCP_PLACE[1]),
            DCP_OLD_PROPERTIES: kinds[_DCP, "TensorProperties"],
            ("torch", "Size"): torch.Size,
            ("collections", "OrderedDict"): dict,
            # fields of a tensor that are not used here, and the path that dcp.save wrote to
            **dict.fromkeys((*DCP_UNREAD, DCP_OLD_UNREAD), lambda *_: None),
            # Python 3.11.2 (Debian 12) writes an enum's member, one of these fields, as getattr(class, name)
            ("builtins", "getattr"): lambda *_: None,
            ("pathlib", "PosixPath"): lambda *_: None,
            ("pathlib._local", "PosixPath"): lambda *_: None,  # as Python 3.13 writes it
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


def read(data: bytes) -> Saved:
    """Tensors and values; Broken if the file is damaged or unsafe."""
    try:
        with proc.collection_paused():
            reader = _Reader(data)
            return _checked(vars(reader.load()), reader.tensor_kind)
    except Broken:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None


def _checked(metadata: dict[str, Any], tensor_kind: Any) -> Saved:
    places = {}
    for index, info in metadata["storage_data"].items():
        offset = vars(index).get("offset")
        places[index.fqn, None if offset is None else _size(offset)] = _place(vars(info))
    tensors, values = {}, {}
    for key, entry in metadata["state_dict_metadata"].items():
        if not isinstance(entry, tensor_kind):
            values[checked_text(key)] = places[key, None]
            continue
        size, chunks, dtype = _size(entry.size), [], entry.properties.state[0]
        for chunk in entry.chunks:
            offsets, sizes = _size(chunk.offsets), _size(chunk.sizes)
            ends = [start + count for start, count in zip(offsets, sizes, strict=True)]
            if any(end > most for end, most in zip(ends, size, strict=True)):
                raise ValueError(f"a chunk of {sizes} at {offsets} leaves its tensor of {size}")
            chunks.append(Chunk(offsets, sizes, places[key, offsets]))
        if sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(size):
            raise ValueError(f"chunks do not cover a tensor of {size}")
        if type(dtype) is not torch.dtype:
            raise TypeError("a tensor has no dtype")
        tensors[checked_text(key)] = SavedTensor(dtype, size, tuple(chunks))
    return tensors, values


def _place(info: dict[str, Any]) -> FileRange:
    path = checked_text(info["relative_path"])
    if info.get("transform_descriptors"):
        raise Broken("format", f"{path!a} is compressed or encrypted")
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise Broken("foreign-path", f".metadata points outside the checkpoint, to {path!a}")
    return FileRange(path, checked_count(info["offset"]), checked_count(info["length"]))


def _size(value: Any) -> tuple[int, ...]:
    if type(value) is not torch.Size:
        raise ValueError(f"{value!a:.40} is not a size")
    return tuple(map(checked_count, value))


# ---------------------------------------------------------------- an opened checkpoint


@dataclass
class CheckpointSource:
    """An opened checkpoint. Without a manifest it is another program's, and is not verified."""

    store: Store
    folder: str
    tensors: dict[str, SavedTensor]
    values: dict[str, FileRange]
    manifest: Manifest | None

    @property
    def keys(self) -> set[str]:
        return {*self.tensors, *self.values}

    @property
    def exact(self) -> bool:
        """Whether it is a run's own, which fits in every key and dtype."""
        return self.manifest is not None

    @property
    def path(self) -> str:
        return self.store.path(self.folder)

    def digest(self, key: str) -> tuple[int, int]:
        """The number of elements and the digest of a tensor."""
        assert self.manifest is not None
        if key not in self.manifest.digests:
            raise Broken("digest", f"the manifest has no digest of {key}")
        numel, digest = self.manifest.digests[key]
        return numel, int(digest, 16)

    def misfit(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not of this model: {reason}.",
            "give the flags that the run had (config.toml beside it), or a new --run.dir",
        )


def opened(store: Store, folder: str, manifest: Manifest | None, data: bytes) -> CheckpointSource:
    """The source with this content of `.metadata`; Broken if that is not the file that was sealed."""
    if manifest is not None:
        if file_names.METADATA not in manifest.files:
            raise Broken("missing-file", f"its manifest lacks {file_names.METADATA}")
        if manifest.files[file_names.METADATA][1] != crc32(data):
            raise Broken("checksum", f"{file_names.METADATA} is not what was written: its checksum differs")
    return CheckpointSource(store, folder, *read(data), manifest)


def read_metadata(store: Store, folder: str) -> bytes:
    size = store.size(folder, file_names.METADATA)
    if size is None:
        raise Broken("missing-file", f"{file_names.METADATA} is missing")
    if size > MOST_OF_METADATA:
        raise Broken("size", f"{file_names.METADATA} has {size} bytes")
    return store.read(folder, file_names.METADATA)


def open_one(store: Store, folder: str, manifest: Manifest | None) -> CheckpointSource:
    """The source, opened by a single process; Broken if its contents are damaged or unsafe."""
    source = opened(store, folder, manifest, read_metadata(store, folder))
    for key, saved in source.tensors.items() if manifest is not None else ():
        count = math.prod(saved.size)
        if count and source.digest(key)[0] != count:  # empty tensors are not written
            raise Broken("digest", f"the manifest's digest of {key} is of another size")
    return source

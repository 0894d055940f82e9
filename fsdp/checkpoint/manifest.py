"""What a checkpoint's folder says of itself: its name, its manifest, and DCP's `.metadata`.

    step-00000100                 a checkpoint, if it has a manifest (an object store adds the attempt's name)
    step-00000100.tmp-1f2e3d4c    written by that attempt, or left by it
    step-00000100.broken-…        set aside, with the reason
    step-00000100.gone-1f2e3d4c   in deletion

The manifest has the checksum of every file. It is written last and is the seal: plain JSON with a checksum of
itself, and with the counters, so that from the other files only tensors and optimizer state are read.

`.metadata` is a pickle. The unpickler here knows the names that DCP writes and the few of torch inside them;
any other name, and so any other call, is refused before it is looked up. A pickle may also set attributes of
the objects it is given: it is given stand-in classes made for this one read, which are dropped after it. From
them come the tensors and values with their places in the files, each type, size and path checked.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast
from zlib import crc32

import torch

from fsdp.base import proc
from fsdp.base.errors import CheckpointError, ShardrunError
from fsdp.base.text import checked_count, checked_text
from fsdp.base.torch_private import DCP_OLD_PROPERTIES, DCP_OLD_UNREAD, DCP_PLACE, DCP_UNREAD

# ---------------------------------------------------------------- names

MANIFEST = "manifest.json"
METADATA = ".metadata"

_FORM = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?(?:\.(tmp|broken|gone)-(.+))?", re.ASCII)

Kind = Literal["final", "tmp", "broken", "gone"]


@dataclass(frozen=True)
class FolderName:
    step: int
    kind: Kind
    attempt: str
    """The attempt for tmp and gone, the reason for broken."""


def final_name(step: int, attempt: str = "") -> str:
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")


def staging_name(step: int, attempt: str) -> str:
    return f"{final_name(step)}.tmp-{attempt}"


def parse_name(text: str) -> FolderName | None:
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    step, attempt, kind, rest = match.groups()
    return FolderName(int(step), cast(Kind, kind or "final"), rest or attempt or "")


def step_of(text: str) -> int:
    """-1 for the name of something else."""
    name = parse_name(text)
    return -1 if name is None else name.step


def data_file(rank: int) -> str:
    """DCP's own name for the first file of a rank."""
    return f"__{rank}_0.distcp"


def _checked_file(name: str) -> str:
    """The name may be a stranger's: no path leads out, and the system accepts it."""
    if name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise ValueError(f"{name!a:.40} is no name of a file")
    return name


# ---------------------------------------------------------------- the manifest

FORMAT = 2
"""1: no `head`, which was 1024."""
MOST_BYTES = 128 << 20
"""A larger one is not read: 16,384 ranks have a megabyte of files, a million tensors 100 MB of digests."""
LONGEST_TEXT = 4096
"""A path, at most."""
LATEST = 2.0**40
"""Seconds since 1970: 36,000 years."""


class Broken(ShardrunError):
    """A checkpoint is not whole. `why`, a word or two, becomes part of its name when it is set aside."""

    exit_code, verdict = CheckpointError.exit_code, CheckpointError.verdict

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(f"{why}: {detail}")
        self.why, self.detail = why, detail
        self.args = why, detail  # it is pickled and sent to other ranks

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    attempt: str
    created: float
    torch: str
    strategy: str
    replicate: int
    shard: int
    ranks: int
    config: str
    reason: str
    counters: Mapping[str, float | int]
    metrics: Mapping[str, float]
    files: Mapping[str, tuple[int, int]]
    """Name → size and crc32 of every file but the manifest."""
    digests: Mapping[str, tuple[int, str]]
    """Key of each tensor → its number of elements and the digest of its bits, in hex."""
    bytes: int = 0
    head: int = 1024
    """The bytes of a tensor's frame before its data."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """In a checkpoint of adapters alone: the frozen weights under them."""
    optimizer: str = ""
    """--optim.name of its states; empty in older checkpoints."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The position of a mixture or a stream; checked by the reader (fsdp/data)."""

    @property
    def mesh(self) -> str:
        return f"{self.strategy} {self.replicate}×{self.shard}"


def encode(manifest: Manifest) -> bytes:
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, sort_keys=True, ensure_ascii=False)
    return f'{{"crc32": {crc32(text.encode()):10d}, "manifest":\n{text}}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """The manifest; Broken if a byte of it is not what was written."""
    head, newline, rest = data.partition(b"\n")
    try:
        if not newline or rest[-2:] != b"}\n" or crc32(rest[:-2]) != int(json.loads(head + b"0}")["crc32"]):
            raise ValueError("its checksum differs")
        body = json.loads(rest[:-2])
        form, step = body.pop("format"), body.get("step")
        if form in (1, FORMAT):
            if unknown := body.keys() - {entry.name for entry in fields(Manifest)}:
                raise ValueError(f"{min(unknown)!a:.40} is no field of it")
            return _checked(Manifest(**body))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Broken("manifest", f"the manifest cannot be read ({error})") from None
    # It may be whole: it is not set aside.
    raise CheckpointError(
        f"a checkpoint of step {step!a:.40} has format {form!a:.40}; this program reads format {FORMAT}.",
        "resume with the version of this program that wrote it, or a newer one",
    )


def _checked(manifest: Manifest) -> Manifest:
    """The manifest with the type of each field checked: the file may come from anywhere."""
    for entry in fields(Manifest):
        _check(entry.name, getattr(manifest, entry.name), str(entry.type))
    for number in (*manifest.counters.values(), *manifest.metrics.values()):
        _check("a number", number, "float")
    if not 0 <= manifest.created < LATEST:
        raise ValueError(f"created {manifest.created!a} is no time of a save")
    if base := manifest.base:
        for name, kind in (("digest", "str"), ("origin", "str"), ("alpha", "float"), ("rank", "int")):
            _check(f"base.{name}", base[name], kind)
    files = {
        _checked_file(name): (checked_count(size), checked_count(crc))
        for name, (size, crc) in manifest.files.items()
    }
    digests = {
        key: (checked_count(numel), f"{int(digest, 16):016x}")
        for key, (numel, digest) in manifest.digests.items()
    }
    return replace(manifest, files=files, digests=digests)


def _check(name: str, value: Any, kind: str) -> None:
    """Raises ValueError if the value is not of this kind: the type of a field."""
    if kind == "int":
        checked_count(value)
    elif kind == "float":  # NaN is allowed, for metrics
        if type(value) is not float and not (type(value) is int and abs(value) < 2**63):
            raise ValueError(f"{name}: {value!a:.40} is not a number")
    elif kind == "str":
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise ValueError(f"{name} is not a string of up to {LONGEST_TEXT} characters")
        # the log would give a terminal its escape sequences
        if name not in ("reason", "base.origin") and not value.isprintable():
            raise ValueError(f"{name} has control characters")
    elif not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")


# ---------------------------------------------------------------- .metadata

_DCP = "torch.distributed.checkpoint.metadata"
_KINDS = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
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
        self.tensor_kind = type("TensorStorageMetadata", (), {})
        set_state = {"__setstate__": lambda self, state: setattr(self, "state", state)}
        properties = type("TensorProperties", (), set_state)
        self._known: dict[tuple[str, str], Any] = {
            **_DTYPES,
            **{(_DCP, name): type(name, (), {}) for name in _KINDS},
            (_DCP, "TensorStorageMetadata"): self.tensor_kind,
            (_DCP, "TensorProperties"): properties,
            DCP_OLD_PROPERTIES: properties,
            DCP_PLACE: type(DCP_PLACE[1], (), {}),
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


def read_metadata(data: bytes) -> Saved:
    """Tensors and values; Broken if the file is damaged or unsafe."""
    try:
        with proc.collection_paused():
            reader = _Reader(data)
            return _described(vars(reader.load()), reader.tensor_kind)
    except Broken:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None


def _described(metadata: dict[str, Any], tensor_kind: type[Any]) -> Saved:
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

"""What a checkpoint's folder says of itself: its name, its manifest, and DCP's `.metadata`.

    step-00000100                 a checkpoint, if it has a manifest (an object store adds the attempt's name)
    step-00000100.tmp-1f2e3d4c    written by that attempt, or left by it
    step-00000100.broken-…        set aside, with the reason
    step-00000100.gone-1f2e3d4c   in deletion

The manifest has the checksum of every file. It is written last and is the seal: plain JSON with a checksum of
itself, and with the counters, so that from the other files only tensors and optimizer state are read.

`.metadata` is a pickle. The unpickler here knows the names that DCP writes and the few of torch inside them;
any other name, and so any other call, is refused before it is looked up. A pickle may also set attributes of
the objects it is given: for each name it receives a stand-in class of its own, dropped after the read. From
these come the tensors and values with their places in the files, each type, size and path checked.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from zlib import crc32

import torch

from fsdp.base import proc
from fsdp.base.errors import CheckpointError, ShardrunError
from fsdp.base.text import checked_count, checked_text
from fsdp.base.torch_private import DCP_OLD_PROPERTIES, DCP_OLD_UNREAD, DCP_PLACE, DCP_UNREAD
from fsdp.distributed.mesh import MeshSizes

# ---------------------------------------------------------------- names

MANIFEST = "manifest.json"
METADATA = ".metadata"
_FORM = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?(?:\.(tmp|broken|gone)-(.+))?", re.ASCII)


@dataclass(frozen=True)
class FolderName:
    """`kind`: final, tmp, broken or gone. `attempt`: of tmp and gone; the reason of broken."""

    step: int
    kind: str
    attempt: str


def final_name(step: int, attempt: str = "") -> str:
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")


def staging_name(step: int, attempt: str) -> str:
    return f"{final_name(step)}.tmp-{attempt}"


def parse_name(text: str) -> FolderName | None:
    if (match := _FORM.fullmatch(text)) is None:
        return None
    step, attempt, kind, rest = match.groups()
    return FolderName(int(step), kind or "final", rest or attempt or "")


def step_of(text: str) -> int:
    """-1 for the name of something else."""
    name = parse_name(text)
    return -1 if name is None else name.step


def data_file(rank: int) -> str:
    """DCP's own name for the first file of a rank."""
    return f"__{rank}_0.distcp"


# ---------------------------------------------------------------- the manifest

FORMAT = 3
"""1: no `head`, which was 1024. 2: no `context`, `tensor` and `expert`. A program of before calls a field
that it does not know damage, and sets the checkpoint aside: a new field is a new format.
"""
MOST_BYTES = 128 << 20
"""A larger one is not read: 16,384 ranks have a megabyte of files, a million tensors 100 MB of digests."""


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
    context: int = 1
    tensor: int = 1
    expert: int = 1
    base: Mapping[str, Any] = field(default_factory=dict)
    """In a checkpoint of adapters alone: the frozen weights under them."""
    optimizer: str = ""
    """--optim.name of its states; empty in older checkpoints."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The position of a mixture or a stream; checked by the reader (fsdp/data)."""

    @property
    def mesh(self) -> str:
        return str(MeshSizes(**{one.name: getattr(self, one.name) for one in fields(MeshSizes)}))


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
        if form in (1, 2, FORMAT):
            manifest = Manifest(**body)
            if outside := [name for name in manifest.files if name in (".", "..") or "/" in name]:
                raise ValueError(f"{outside[0]!a:.40} is no name of a file")
            return manifest
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Broken("manifest", f"the manifest cannot be read ({error})") from None
    # It may be whole: it is not set aside.
    raise CheckpointError(
        f"a checkpoint of step {step!a:.40} has format {form!a:.40}; this program reads format {FORMAT}.",
        "resume with the version of this program that wrote it, or a newer one",
    )


# ---------------------------------------------------------------- .metadata

_DCP = "torch.distributed.checkpoint.metadata"
_TENSOR = "TensorStorageMetadata"
_NAMES = {
    *((_DCP, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_DCP, name) for name in ("StorageMeta", "TensorProperties", _TENSOR)),
    *(DCP_OLD_PROPERTIES, DCP_OLD_UNREAD, DCP_PLACE, *DCP_UNREAD),
    # Python 3.11.2 (Debian 12) writes an enum's member, one of the unread fields, as getattr(class, name)
    ("builtins", "getattr"),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),  # where dcp.save wrote to; from Python 3.13
}
_REAL: dict[tuple[str, str], Any] = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): dict} | {
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


class _Record:
    """Stands for a class or a function of `_NAMES`: it takes any arguments, and keeps the state."""

    state: Any

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return type(name, (_Record,), {})
        if (module, name) not in _REAL:
            raise Broken(
                "foreign-pickle",
                f".metadata names {module}.{name}, which is not part of a checkpoint; no code was run",
            )
        return _REAL[module, name]


def read_metadata(data: bytes) -> Saved:
    """Tensors and values; Broken if the file is damaged or unsafe."""
    try:
        with proc.collection_paused():
            return _described(_Reader(io.BytesIO(data)).load().state)
    except Broken:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None


def _described(metadata: dict[str, Any]) -> Saved:
    places = {
        (index.state["fqn"], index.state.get("offset")): _place(info.state)
        for index, info in metadata["storage_data"].items()
    }
    tensors, values = {}, {}
    for key, entry in metadata["state_dict_metadata"].items():
        if type(entry).__name__ != _TENSOR:
            values[checked_text(key)] = places[key, None]
            continue
        size, chunks, dtype = _size(entry.state["size"]), [], entry.state["properties"].state[0]
        for chunk in entry.state["chunks"]:
            offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            chunks.append(Chunk(offsets, sizes, places[key, offsets]))
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
    return tuple(map(checked_count, value))

"""A whole model's state dict in torch's format or safetensors: written tensor by tensor, read lazily.

Writing holds one tensor in memory at a time. `safetensors.torch.save_file` and `torch.save` need all tensors
of a file at once: measured for a file of 2 GiB in tensors of 64 MiB, save_file takes 2,050 MiB of memory and
7.3 s, the writer here 67 MiB and 4.5 s. Reading maps the files: a rank that needs some rows reads those
alone. export.py chooses the tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from fsdp.base.errors import ConfigError
from fsdp.base.proc import TABLE, regular_text
from fsdp.base.torch_private import EXTRA_STATE
from fsdp.checkpoint.state import as_bytes
from fsdp.models.factory import check_no_adapter
from fsdp.models.units import clean_name

TORCH_FILE = "full-model.pt"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to write. `same_as` is the earlier name of the same memory (tied weights)."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    same_as: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


Fetch = Callable[[Entry], torch.Tensor]


def write_torch(stream: BinaryIO, entries: Sequence[Entry], fetch: Fetch) -> None:
    """Writes what `torch.save(state_dict)` writes: the file without data, then each tensor into its mapping.
    Tied weights share one storage.
    """
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:  # of untouched memory, which takes none
        tied = tensors.get(entry.same_as)
        tensors[entry.name] = torch.empty(entry.size, dtype=entry.dtype) if tied is None else tied
    with torch.serialization.skip_data():
        torch.save(tensors, stream)
    stream.flush()
    # A full disk is an error here, and a SIGBUS below. Without fallocate (FUSE, NFS) glibc reads the file.
    os.posix_fallocate(stream.fileno(), 0, stream.tell())
    del tensors
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(stream.name, mmap=True, weights_only=True)
    for entry in entries:
        if not entry.same_as:
            mapped[entry.name].copy_(fetch(entry))


def write_safetensors(stream: BinaryIO, entries: Sequence[Entry], fetch: Fetch) -> None:
    """Writes the header with all offsets, then the tensors; tied weights twice, as the format shares none."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise ConfigError(
                f"{entry.name} is {entry.dtype}, which safetensors does not support.",
                "--checkpoint.export_format torch",
            )
        span = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.size), "data_offsets": span}
        offset += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        stream.write(as_bytes(fetch(entry).contiguous()))


def into_files(entries: Sequence[Entry], largest: int) -> list[list[Entry]]:
    """Splits entries in order into files of at most `largest` bytes; a larger tensor gets its own file."""
    files: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        if files[-1] and held + entry.nbytes > largest:
            files.append([])
            held = 0
        files[-1].append(entry)
        held += entry.nbytes
    return files


# ---------------------------------------------------------------- reading


class FullState(Mapping[str, torch.Tensor]):
    """Name → tensor, mapped from its file; data is read when it is accessed."""

    def __init__(self, where: str, tensors: dict[str, Callable[[], torch.Tensor]]) -> None:
        self.where = where
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_full_state(path: str | Path) -> FullState:
    """Opens a whole model's state dict: safetensors with or without an index, or a file of torch.save."""
    location = Path(path)
    if not location.is_dir():
        check_no_adapter(location, "--model.weights", str(path))
    files = _files(location) if location.is_dir() else [location]
    tensors: dict[str, Callable[[], torch.Tensor]] = {}
    for file in files:
        stored: Mapping[str, Callable[[], torch.Tensor]] = (
            open_safetensors(file) if file.suffix == ".safetensors" else _open_torch(file)
        )
        tensors |= {
            clean_name(name, ddp=True): tensor for name, tensor in stored.items() if not _is_extra_state(name)
        }
    return FullState(str(path), tensors)


def newest_export(folder: Path) -> Path | None:
    """The file with which a reader of the folder's newest export begins."""
    ours = [folder / name for name in (INDEX_FILE, TORCH_FILE, SINGLE_FILE)]
    present = [file for file in ours if file.is_file()]
    return max(present, key=lambda file: file.stat().st_mtime_ns, default=None)


def _files(folder: Path) -> list[Path]:
    """The files of a run directory's export, of an export folder, or with names that other tools use. Of
    exports in several formats the newest counts: the others may be of an earlier step.
    """
    for parent in (folder, folder / "full_model"):
        if (newest := newest_export(parent)) is not None:
            return files_of_index(newest) if newest.name == INDEX_FILE else [newest]
        if (parent / "pytorch_model.bin").is_file():
            return [parent / "pytorch_model.bin"]
    check_no_adapter(folder, "--model.weights", str(folder))
    raise ConfigError(
        f"--model.weights {folder} holds no {TORCH_FILE}, {INDEX_FILE} or model.safetensors.",
        f"--checkpoint.resume {folder} if it is a checkpoint, or export one: "
        "python -m fsdp.checkpoint RUN export",
    )


def files_of_index(index: Path, flag: str = "--model.weights") -> list[Path]:
    """The safetensors files that an index names, all in its folder. `flag` begins the message of an error."""
    try:
        named = json.loads(regular_text(index, TABLE))["weight_map"].values()
        names = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{flag} {index} is no index of safetensors files ({reason}).", "give a whole export"
        ) from None
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(
            f"{flag} {index} points outside its folder, to {outside[0]}.", "give a whole folder"
        )
    return [index.with_name(name) for name in names]


def open_safetensors(file: Path, flag: str = "--model.weights") -> dict[str, StoredTensor]:
    """The tensors of one file by name, from its header; no data is read."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            f"{flag} {file} needs the package safetensors.", "pip install safetensors"
        ) from None
    try:
        if file.exists() and not file.is_file():
            raise OSError("it is not a regular file")
        opened = safe_open(file, framework="pt")
        return {name: StoredTensor(opened, name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{flag} {file} cannot be read: {reason}.", "give a whole .safetensors file"
        ) from None


class StoredTensor:
    """One tensor of a safetensors file: mapped when called, or copied by rows."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened, self._name = opened, name
        part = opened.get_slice(name)
        self.size: tuple[int, ...] = tuple(part.get_shape())
        self.dtype = _TYPES[part.get_dtype()]

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows of dim 0 in memory of their own; a scalar is one row."""
        tensor: torch.Tensor = self._opened.get_slice(self._name)[first:last] if self.size else self()
        return tensor.clone()

    def __call__(self) -> torch.Tensor:
        tensor: torch.Tensor = self._opened.get_tensor(self._name)
        return tensor


def _open_torch(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ConfigError(
            f"--model.weights {file} does not exist.", "a .pt or .safetensors file, or a folder of them"
        ) from None
    except Exception as error:  # torch.load's failures have no common class
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"--model.weights {file} is no state dict of torch.save: {reason}.",
            "give a .pt or .safetensors file",
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(value, torch.Tensor) or _is_extra_state(name) for name, value in loaded.items()
    ):
        raise ConfigError(
            f"--model.weights {file} holds something else than a state dict.",
            "torch.save(model.state_dict(), FILE)",
        )
    sharded = next((name for name, value in loaded.items() if isinstance(value, DTensor)), None)
    if sharded is not None:
        raise ConfigError(
            f"--model.weights {file}: {sharded} is a DTensor, one rank's shard.",
            "torch.save({name: tensor.full_tensor() for name, tensor in model.state_dict().items()}, FILE) "
            "on all ranks",
        )
    return {name: partial(_same, tensor) for name, tensor in loaded.items()}


def _is_extra_state(name: object) -> bool:
    """Whether it is what a module's get_extra_state returns, which a run does not keep."""
    return str(name).rpartition(".")[2] == EXTRA_STATE


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

"""Exports a checkpoint's model as one state dict: full_model/full-model.pt, or safetensors with an index.

One process reads the checkpoint, saved by any number of ranks, compares each tensor with its digest and holds
one tensor in memory at a time. A file gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fsdp.checkpoint import adapter_weights, full_state, load
from fsdp.checkpoint.adapter_weights import Base
from fsdp.checkpoint.full_state import Entry
from fsdp.checkpoint.load import CheckpointSource
from fsdp.checkpoint.local_store import sync_folder

Format = Literal["torch", "safetensors", "both"]


def export(
    source: CheckpointSource,
    folder: Path,
    format: Format,
    shard_gib: float,
    prefix: str = "model.",
    base: Base | None = None,
) -> list[Path]:
    """Writes the model of a checkpoint into a folder; returns the files.

    Adapters are merged into `base`, and also written alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    if base is None:
        entries, fetch = _entries(source, prefix), _fetch(source, prefix)
    else:
        entries, fetch = adapter_weights.whole_model(source, base)
        files += [
            _whole_file(file, write)
            for file, write in adapter_weights.peft_files(source, folder, base).items()
        ]
    if format in ("torch", "both"):
        files.append(
            _whole_file(
                folder / full_state.TORCH_FILE, partial(full_state.write_torch, entries=entries, fetch=fetch)
            )
        )
    if format in ("safetensors", "both"):
        files += _safetensors(folder, entries, fetch, int(shard_gib * 2**30))
    sync_folder(folder)
    return files


def _fetch(source: CheckpointSource, prefix: str) -> full_state.Fetch:
    return lambda entry: load.whole(source, prefix + entry.name)


def _entries(source: CheckpointSource, prefix: str) -> list[Entry]:
    """The model's tensors; names at the same place in the files are one tied weight."""
    entries: list[Entry] = []
    owners: dict[object, str] = {}
    for key, about in source.metadata.state_dict_metadata.items():
        if not key.startswith(prefix) or not isinstance(about, TensorStorageMetadata):
            continue
        name = key.removeprefix(prefix)
        info = (
            source.metadata.storage_data[MetadataIndex(key, about.chunks[0].offsets)]
            if about.chunks
            else None
        )
        place = (info.relative_path, info.offset) if info is not None else key
        owner = owners.setdefault(place, name)
        entries.append(Entry(name, about.properties.dtype, tuple(about.size), owner if owner != name else ""))
    return entries


def _safetensors(folder: Path, entries: list[Entry], fetch: full_state.Fetch, largest: int) -> list[Path]:
    parts = full_state.into_files(entries, largest)
    old = set(folder.glob("model-*-of-*.safetensors"))
    files: list[Path] = []
    where: dict[str, str] = {}
    for nth, part in enumerate(parts, start=1):
        file = folder / f"model-{nth:05d}-of-{len(parts):05d}.safetensors"
        files.append(_whole_file(file, partial(full_state.write_safetensors, entries=part, fetch=fetch)))
        where |= {entry.name: file.name for entry in part}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": where}
    text = json.dumps(index, indent=1).encode()
    files.append(_whole_file(folder / full_state.INDEX_FILE, lambda stream: stream.write(text)))
    for file in old - set(files):
        file.unlink()
    return files


def _whole_file(file: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Writes under a temporary name and renames the file when it is whole and synced."""
    # "x" and a random name: an existing link is not written through.
    staged = file.with_name(f".{file.name}.tmp-{secrets.token_hex(8)}")
    try:
        with staged.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        staged.rename(file)
    finally:
        staged.unlink(missing_ok=True)
    return file

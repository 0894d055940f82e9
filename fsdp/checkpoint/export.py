"""Exports a checkpoint's model as one state dict: full_model/full-model.pt, or safetensors with an index.

One process reads the checkpoint, saved by any number of ranks, compares each tensor with its digest and holds
one tensor in memory at a time. The files get their names when all are whole (export_files.py).
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fsdp.base.dtypes import DTYPES
from fsdp.checkpoint import adapter_weights, full_state, load, pretrained_export
from fsdp.checkpoint.adapter_weights import Base
from fsdp.checkpoint.export_files import ExportFiles, new_files
from fsdp.checkpoint.full_state import Entry
from fsdp.checkpoint.load import CheckpointSource
from fsdp.checkpoint.pretrained import SINGLE_FILE
from fsdp.checkpoint.save_plan import chunks
from fsdp.models.registry import SourceFolder

Format = Literal["auto", "torch", "safetensors", "both", "hf"]


def export(
    source: CheckpointSource,
    folder: Path,
    format: Format,
    shard_gib: float,
    prefix: str = "model.",
    base: Base | None = None,
    pretrained: SourceFolder | None = None,
    dtype: str = "auto",
) -> list[Path]:
    """Writes the model of a checkpoint into a folder; returns the files.

    Adapters are merged into `base`, and also written alone. For a `pretrained` source the folder is one that
    from_pretrained reads.
    """
    with new_files(folder) as files:
        _add_all(files, source, format, int(shard_gib * 2**30), prefix, base, pretrained, dtype)
        return files.take_names()


def _add_all(
    files: ExportFiles,
    source: CheckpointSource,
    format: Format,
    largest: int,
    prefix: str,
    base: Base | None,
    pretrained: SourceFolder | None,
    dtype: str,
) -> None:
    if format in ("auto", "hf"):
        format = "torch" if pretrained is None else "safetensors"
    if base is None:
        entries, fetch = _entries(source, prefix), _fetch(source, prefix)
    else:
        entries, fetch = adapter_weights.whole_model(source, base)
        for file, write in adapter_weights.peft_files(source, files.folder, base, pretrained).items():
            files.add(file, write)
    own = pretrained.dtype if pretrained is not None and format != "torch" else None
    entries, fetch = pretrained_export.with_dtype(entries, fetch, DTYPES.get(dtype, own))
    if format in ("torch", "both"):
        write_all = partial(full_state.write_torch, entries=entries, fetch=fetch)
        files.add(files.folder / full_state.TORCH_FILE, write_all)
    if format in ("safetensors", "both"):
        if pretrained is None:
            _add_safetensors(files, entries, fetch, largest)
        else:
            _add_folder_of_transformers(files, entries, fetch, largest, pretrained)


def of_averages(source: CheckpointSource) -> CheckpointSource | None:
    """The same checkpoint with the moving averages as its model; None if it holds none. What is not trained
    is the model's own.
    """
    stored = source.metadata.state_dict_metadata
    owners: dict[object, str] = {}
    replaced = {}
    for key in stored:
        if key.startswith("model."):
            # A tied weight has several names, and its average the first one trained.
            owner = owners.setdefault(load.memory_of(source, key), f"ema.{key.removeprefix('model.')}")
            replaced[key] = owner if owner in stored else key
    if not any(key.startswith("ema.") for key in replaced.values()):
        return None
    entries = {**stored, **{key: stored[other] for key, other in replaced.items()}}
    manifest = source.manifest
    if manifest is not None:
        digests = manifest.digests
        taken = {key: digests[other] for key, other in replaced.items() if other in digests}
        manifest = dataclasses.replace(manifest, digests={**digests, **taken})
    storage = dict(source.metadata.storage_data)
    for key, other in replaced.items():
        for chunk in chunks(stored[other]):
            storage[MetadataIndex(key, chunk.offsets)] = storage[MetadataIndex(other, chunk.offsets)]
    metadata = dataclasses.replace(source.metadata, state_dict_metadata=entries, storage_data=storage)
    return dataclasses.replace(source, metadata=metadata, manifest=manifest)


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
        owner = owners.setdefault(load.memory_of(source, key), name)
        entries.append(Entry(name, about.properties.dtype, tuple(about.size), owner if owner != name else ""))
    return entries


def _add_safetensors(files: ExportFiles, entries: list[Entry], fetch: full_state.Fetch, largest: int) -> None:
    parts = full_state.into_files(entries, largest)
    where: dict[str, str] = {}
    for nth, part in enumerate(parts, start=1):
        file = files.folder / f"model-{nth:05d}-of-{len(parts):05d}.safetensors"
        files.add(file, partial(full_state.write_safetensors, entries=part, fetch=fetch))
        where |= {entry.name: file.name for entry in part}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": where}
    text = json.dumps(index, indent=1).encode()
    files.add(files.folder / full_state.INDEX_FILE, lambda stream: stream.write(text))
    files.replace(*_in_parts(files.folder))


def _add_folder_of_transformers(
    files: ExportFiles,
    entries: list[Entry],
    fetch: full_state.Fetch,
    largest: int,
    pretrained: SourceFolder,
) -> None:
    """As save_pretrained: one file without an index if everything fits in it."""
    stored = next(one.dtype for one in entries if one.dtype.is_floating_point)
    for file, write in pretrained_export.side_files(pretrained, files.folder, stored).items():
        files.add(file, write)
    named, take = pretrained_export.with_saved_names(pretrained, entries, fetch)
    single = files.folder / SINGLE_FILE
    if len(full_state.into_files(named, largest)) > 1:
        _add_safetensors(files, named, take, largest)
        files.replace(single)
        return
    files.add(single, partial(full_state.write_safetensors, entries=named, fetch=take))
    files.replace(*_in_parts(files.folder))


def _in_parts(folder: Path) -> list[Path]:
    """The files of an earlier export in parts."""
    return [*folder.glob("model-*-of-*.safetensors"), folder / full_state.INDEX_FILE]

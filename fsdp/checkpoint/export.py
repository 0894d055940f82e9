"""Exports a checkpoint's model as one state dict: full_model/full-model.pt, safetensors with an index, or a
folder that `from_pretrained` reads.

One process reads the checkpoint, saved by any number of ranks, compares each tensor with its digest and holds
one tensor in memory at a time. All files are whole before the first one gets its name, and the index gets its
name last: a reader sees the old export, the new one, or, in the moment between them, one without an index,
which it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from fsdp.base.digest import DTYPES
from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.base.proc import TABLE, read_regular
from fsdp.checkpoint import adapter_weights, load
from fsdp.checkpoint.adapter_weights import Base
from fsdp.checkpoint.full_state import (
    INDEX_FILE,
    SINGLE_FILE,
    TORCH_FILE,
    Entry,
    Fetch,
    into_files,
    write_safetensors,
    write_torch,
)
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.store import sync_folder
from fsdp.models.registry import SourceFolder

SHARD_GIB = 5.0
"""Maximum size of a safetensors file, without --shard-gib."""
Format = Literal["auto", "torch", "safetensors", "both", "hf"]
Write = Callable[[BinaryIO], object]
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "tekken.json",
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
    "video_preprocessor_config.json", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "spm.model", "spm_char.model", "sentencepiece.model", "normalizer.json", "bpe.codes",
    "dict.txt", "emoji.json", "entity_vocab.json", "byte_maps.json", "prophetnet.tokenizer",
    "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
"""Of a source folder: the tokenizer's and processor's files; no code and no weights."""


def export(
    source: CheckpointSource,
    folder: Path,
    format: Format,
    shard_gib: float | None = None,
    base: Base | None = None,
    pretrained: SourceFolder | None = None,
    dtype: str = "auto",
) -> list[Path]:
    """Writes the model of a checkpoint into a folder; returns the files.

    Adapters are merged into `base`, and also written alone. For a `pretrained` source the folder is one that
    from_pretrained reads.
    """
    if format in ("auto", "hf"):
        format = "torch" if pretrained is None else "safetensors"
    saved_dtype = pretrained.dtype if pretrained is not None and format != "torch" else None
    with _NewFiles(folder).discarded_on_failure() as files:
        if base is None:
            entries, fetch = _model(source)
        else:
            entries, fetch = adapter_weights.whole_model(source, base)
            for file, write in adapter_weights.peft_files(source, folder, base, pretrained).items():
                files.add(file, write)
        entries, fetch = _with_dtype(entries, fetch, DTYPES.get(dtype, saved_dtype))
        if format in ("torch", "both"):
            files.add(folder / TORCH_FILE, partial(write_torch, entries=entries, fetch=fetch))
        if format in ("safetensors", "both"):
            if pretrained is not None:
                stored = next(entry.dtype for entry in entries if entry.dtype.is_floating_point)
                for file, write in _side_files(pretrained, folder, stored).items():
                    files.add(file, write)
                entries, fetch = _with_saved_names(pretrained, entries, fetch)
            _add_safetensors(
                files, entries, fetch, int((shard_gib or SHARD_GIB) * 2**30), pretrained is not None
            )
        return files.take_names()


def of_averages(source: CheckpointSource) -> CheckpointSource | None:
    """The same checkpoint with the moving averages as its model; None if it holds none. What is not trained
    is the model's own.
    """
    tensors, digests = dict(source.tensors), dict(source.manifest.digests if source.manifest else {})
    owners: dict[object, str] = {}
    for key, saved in source.tensors.items():
        if key.startswith("model."):
            # A tied weight has several names, and its average the first one trained.
            average = owners.setdefault(saved.chunks[:1] or key, f"ema.{key.removeprefix('model.')}")
            if average in source.tensors:
                tensors[key] = source.tensors[average]
                if average in digests:
                    digests[key] = digests[average]
    if tensors == source.tensors:
        return None
    manifest = source.manifest and dataclasses.replace(source.manifest, digests=digests)
    return dataclasses.replace(source, tensors=tensors, manifest=manifest)


def _model(source: CheckpointSource) -> tuple[list[Entry], Fetch]:
    """The model's tensors; names at the same place in the files are one tied weight."""
    entries: list[Entry] = []
    owners: dict[object, str] = {}
    for key, saved in source.tensors.items():
        if key.startswith("model."):
            name = key.removeprefix("model.")
            owner = owners.setdefault(saved.chunks[:1] or key, name)
            entries.append(Entry(name, saved.dtype, saved.size, owner if owner != name else ""))
    return entries, lambda entry: load.whole(source, f"model.{entry.name}")


def _with_dtype(entries: list[Entry], fetch: Fetch, dtype: torch.dtype | None) -> tuple[list[Entry], Fetch]:
    """Casts floating-point tensors; None leaves them as the checkpoint has them."""
    if dtype is None:
        return entries, fetch
    before = {entry.name: entry for entry in entries}
    cast = [
        dataclasses.replace(entry, dtype=dtype) if entry.dtype.is_floating_point else entry
        for entry in entries
    ]
    return cast, lambda entry: fetch(before[entry.name]).to(entry.dtype)


def _add_safetensors(
    files: _NewFiles, entries: Sequence[Entry], fetch: Fetch, largest: int, may_be_single: bool
) -> None:
    """In parts with an index; as save_pretrained, one file without an index if everything fits in it."""
    folder, parts = files.folder, into_files(entries, largest)
    files.replace(*folder.glob("model-*-of-*.safetensors"), folder / INDEX_FILE)
    if may_be_single and len(parts) == 1:
        files.add(folder / SINGLE_FILE, partial(write_safetensors, entries=entries, fetch=fetch))
        return
    names: dict[str, str] = {}
    for nth, part in enumerate(parts, start=1):
        file = folder / f"model-{nth:05d}-of-{len(parts):05d}.safetensors"
        files.add(file, partial(write_safetensors, entries=part, fetch=fetch))
        names |= {entry.name: file.name for entry in part}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": names}
    files.add(folder / INDEX_FILE, _writes(json.dumps(index, indent=1).encode()))
    if may_be_single:
        files.replace(folder / SINGLE_FILE)


# ---------------------------------------------------------------- a folder of transformers


def _with_saved_names(
    source: SourceFolder, entries: Sequence[Entry], fetch: Fetch
) -> tuple[list[Entry], Fetch]:
    """Entries as save_pretrained names them, tied tensors once; one tensor of the model is held at a time."""
    with torch.device("meta"):
        model: Any = source.build()
    stored = {entry.name: entry for entry in entries}
    owners: dict[str, str] = {}
    saved: list[Entry] = []
    for name, pieces in source.saved_pieces(model).items():
        if name not in stored:
            raise CheckpointError(
                f"the checkpoint has no {name} of {source.class_name}.",
                "export with the --model flags of the run",
            )
        owners |= dict.fromkeys(pieces, name)
        saved += [Entry(piece, stored[name].dtype, tuple(meta.shape)) for piece, meta in pieces.items()]
    last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def take(entry: Entry) -> torch.Tensor:
        nonlocal last
        name = owners[entry.name]
        if last[0] != name:
            last = ("", {})  # freed before the next is read
            tensor = fetch(stored[name])
            last = (name, {name: tensor} if name == entry.name else source.reverted(model, name, tensor))
        return last[1][entry.name]

    return saved, take


def _side_files(source: SourceFolder, folder: Path, dtype: torch.dtype) -> dict[Path, Write]:
    """File → the function that writes it: config.json, and the copied files that the source folder has."""
    texts = {"config.json": source.config_json(dtype).encode()}
    for name in COPIED:
        if source.folder is not None and (source.folder / name).is_file():
            try:
                texts[name] = read_regular(source.folder / name, TABLE)
            except ValueError as error:
                raise ConfigError(
                    f"{source.folder / name} is not copied: {error}.", "a folder that save_pretrained wrote"
                ) from None
    return {folder / name: _writes(text) for name, text in texts.items()}


def _writes(text: bytes) -> Write:
    return lambda stream: stream.write(text)


# ---------------------------------------------------------------- files


class _NewFiles:
    """New files of a folder under temporary names, until `take_names`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._staged: dict[Path, Path] = {}
        self._old: set[Path] = set()

    @contextmanager
    def discarded_on_failure(self) -> Iterator[_NewFiles]:
        try:
            yield self
        finally:
            for staged in self._staged.values():
                staged.unlink(missing_ok=True)

    def add(self, file: Path, write: Write) -> None:
        """Writes and syncs a file under a temporary name, in place of what a killed export left there."""
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = self._staged[file] = file.with_name(f".{file.name}.tmp")
        staged.unlink(missing_ok=True)
        with staged.open("x+b") as stream:  # an existing link is not written through
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def replace(self, *old: Path) -> None:
        """Deletes these files of an earlier export when the new ones take their names."""
        self._old |= set(old)

    def take_names(self) -> list[Path]:
        """Gives the new files their names; returns them."""
        names, index = list(self._staged), self.folder / INDEX_FILE
        old = {file for file in self._old if file.exists()}
        # A reader begins with one of these. A single file is itself replaced by one rename.
        for file in old & ({index, self.folder / SINGLE_FILE} - (self._staged.keys() - {index})):
            file.unlink()
        sync_folder(self.folder)  # or a power cut could keep the old index beside new parts
        for file in sorted(names, key=lambda name: name == index):
            if file == index:
                sync_folder(self.folder)
            self._staged.pop(file).rename(file)
        for file in old - set(names):
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in names}:
            sync_folder(folder)
        return names

"""Exports a checkpoint's model as one state dict: full_model/full-model.pt, safetensors with an index, or a
folder that `from_pretrained` reads; adapters merged into the weights under them, and alone as peft has them.

One process reads the checkpoint, saved by any number of ranks, compares each tensor with its digest and holds
one tensor in memory at a time, of safetensors those of one file: at most SHARD_GIB, or one larger tensor.

All files are whole before the first one gets its name, and the index gets its name last: a reader sees the
old export, the new one, or, in the moment between them, one without an index, which it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fsdp.base.devices import DTYPES, digest_shard
from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.checkpoint import restore
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.pretrained import INDEX_FILE, SINGLE_FILE, TORCH_FILE, Base, digest_of
from fsdp.checkpoint.store import sync_folder
from fsdp.models.lora import A, B, is_transposed, merged
from fsdp.models.units import names_in_state
from fsdp.tokenize.conversations import BYTES, find_tokenizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader

    from fsdp.models.hf import SourceFolder

SHARD_GIB = 5.0
"""Maximum size of a safetensors file."""
COPIED = (".json", ".txt", ".model", ".spm", ".codes", ".tokenizer", ".jinja")
"""The ends of names of a tokenizer's and a processor's files: no code and no weights."""
OF_MODEL = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
"""Files beside those of a tokenizer."""
PEFT = "adapter"
TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""The end of a class's name in transformers, and peft's task, by which its Auto classes load the adapters."""
Format = Literal["auto", "torch", "safetensors", "both", "hf"]
Write = Callable[[Path], object]


@dataclass(frozen=True)
class Entry:
    """A tensor to write. `same_as` is the earlier name of the same memory (tied weights)."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    fetch: Callable[[], Tensor]
    same_as: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """In another floating-point dtype; None leaves it as the checkpoint has it."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return dataclasses.replace(self, dtype=dtype, fetch=lambda: self.fetch().to(dtype))


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
    entries = _model(source) if base is None else _merged_model(source, base)
    entries = [entry.cast(DTYPES.get(dtype, saved_dtype)) for entry in entries]
    writers = {} if base is None else _peft_files(source, folder / PEFT, base, pretrained)
    if format in ("torch", "both"):
        writers[folder / TORCH_FILE] = partial(write_torch, entries=entries)
    if format in ("safetensors", "both"):
        if pretrained is not None:
            floating = next(entry.dtype for entry in entries if entry.dtype.is_floating_point)
            writers |= _side_files(pretrained, folder, floating)
            entries = _as_saved(pretrained, entries)
        largest = int((shard_gib or SHARD_GIB) * 2**30)
        writers |= _safetensors(folder, entries, largest, pretrained is not None)
    return _write_all(folder, writers)


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


def _model(source: CheckpointSource) -> list[Entry]:
    """The model's tensors; names at the same place in the files are one tied weight."""
    entries: list[Entry] = []
    owners: dict[object, str] = {}
    for key, saved in source.tensors.items():
        if key.startswith("model."):
            name = key.removeprefix("model.")
            owner = owners.setdefault(saved.chunks[:1] or key, name)
            fetch = partial(restore.whole, source, key)
            entries.append(Entry(name, saved.dtype, saved.size, fetch, owner if owner != name else ""))
    return entries


# ---------------------------------------------------------------- adapters


def _merged_model(source: CheckpointSource, base: Base) -> list[Entry]:
    """The plain model: base and adapters merged, each tensor when it is read. CheckpointError if the weights
    have changed since the run read them.
    """
    stored = {key.removeprefix("model.") for key in source.tensors if key.startswith("model.")}
    model = base.build()
    weights, state = base.open(), model.state_dict()

    def frozen(name: str) -> Tensor:
        """As the ranks round it."""
        tensor = state[name]
        return weights[name].to(base.stored if tensor.is_floating_point() else tensor.dtype)

    def fetch(name: str, dtype: torch.dtype) -> Tensor:
        if name in stored:
            return restore.whole(source, f"model.{name}")
        plain, layer = frozen(name).to(dtype), name.removesuffix(".weight")
        if f"{layer}.{A}" not in stored:
            return plain
        a, b = (restore.whole(source, f"model.{layer}.{part}") for part in (A, B))
        return merged(plain, a, b, base.lora.scale, transposed=is_transposed(model.get_submodule(layer)))

    entries, digests = [], {}
    for name, (owner, *_) in names_in_state(model).items():
        tensor = state[name]
        dtype = base.dtype if tensor.is_floating_point() else tensor.dtype
        same_as = owner if owner != name else ""
        entries.append(Entry(name, dtype, tuple(tensor.shape), partial(fetch, name, dtype), same_as))
        if name not in stored and not same_as:
            digests[name] = digest_shard(frozen(name)).weighted
    if digest_of(digests) != base.digest:
        raise CheckpointError(
            f"{base.origin} has changed: its weights have the digest {digest_of(digests)}, "
            f"those under the adapters had {base.digest}.",
            "restore the old weights, then python -m fsdp.checkpoint RUN export",
        )
    return entries


def _peft_files(
    source: CheckpointSource, folder: Path, base: Base, pretrained: SourceFolder | None
) -> dict[Path, Write]:
    """The adapters alone, in the names and layout of the peft library. Layers have their names in the model
    of the `pretrained` folder.
    """
    saved_layer: Callable[[str], str] = str if pretrained is None else pretrained.saved_layer
    class_name = "" if pretrained is None else pretrained.class_name
    entries, layers = [], set()
    for key, saved in source.tensors.items():
        layer, _, part = key.removeprefix("model.").rpartition(".")
        if key.startswith("model.") and part in (A, B):
            layers.add(layer)
            name = f"base_model.model.{saved_layer(layer)}.{'lora_A' if part == A else 'lora_B'}.weight"
            entries.append(Entry(name, saved.dtype, saved.size, partial(restore.whole, source, key)))
    model = base.build()
    origin = base.origin.removeprefix("--model.weights ").removeprefix("--model.name ").removeprefix("hf:")
    config = {
        "peft_type": "LORA",
        "task_type": next((task for end, task in TASKS.items() if class_name.endswith(end)), None),
        "base_model_name_or_path": origin,
        "r": base.lora.rank,
        "lora_alpha": base.lora.alpha,
        "lora_dropout": base.lora.dropout,
        "bias": "none",
        "target_modules": sorted(map(saved_layer, layers)),
        "inference_mode": True,
        "fan_in_fan_out": any(is_transposed(model.get_submodule(layer)) for layer in layers),
    }
    return {
        folder / "adapter_config.json": _json(config),
        folder / "adapter_model.safetensors": partial(write_safetensors, entries=entries),
    }


# ---------------------------------------------------------------- a folder of transformers


def _as_saved(source: SourceFolder, entries: Sequence[Entry]) -> list[Entry]:
    """Entries as save_pretrained names them, tied tensors once; one tensor of the model is held at a time."""
    with torch.device("meta"):
        model: Any = source.build()
    stored = {entry.name: entry for entry in entries}
    last: tuple[str, Mapping[str, Tensor]] = ("", {})

    def piece(owner: str, name: str) -> Tensor:
        nonlocal last
        if last[0] != owner:
            last = ("", {})  # freed before the next is read
            tensor = stored[owner].fetch()
            last = (owner, {name: tensor} if name == owner else source.reverted(model, owner, tensor))
        return last[1][name]

    saved: list[Entry] = []
    for owner, pieces in source.saved_pieces(model).items():
        for name, meta in pieces.items():
            saved.append(Entry(name, stored[owner].dtype, tuple(meta.shape), partial(piece, owner, name)))
    return saved


def _side_files(source: SourceFolder, folder: Path, dtype: torch.dtype) -> dict[Path, Write]:
    """config.json, the processor's files of the source folder, and those of the tokenizer, which may be
    another's, with the chat template that was trained on.
    """
    texts = {"config.json": source.config_json(dtype).encode()}
    files = [] if source.folder is None else sorted(source.folder.iterdir())
    with suppress(ConfigError):  # of a folder of tokens that was made elsewhere
        tokenizer = None if source.tokenizer in ("", BYTES) else find_tokenizer(source.tokenizer)
        if tokenizer is not None and not (source.folder and tokenizer.samefile(source.folder)):
            files = [file for file in files if file.name in OF_MODEL]
            files += [file for file in sorted(tokenizer.iterdir()) if file.name not in OF_MODEL]
    for file in files:
        if file.suffix in COPIED and file.name not in texts and not file.name.endswith(".index.json"):
            texts[file.name] = file.read_bytes()
    if source.chat_template:
        texts["chat_template.jinja"] = source.chat_template.encode()
        settings = json.loads(texts.get("tokenizer_config.json", b"{}"))
        texts["tokenizer_config.json"] = json.dumps(
            {**settings, "chat_template": source.chat_template}, indent=2, ensure_ascii=False
        ).encode()
    return {folder / name: _text(text) for name, text in texts.items()}


# ---------------------------------------------------------------- files


def _safetensors(
    folder: Path, entries: Sequence[Entry], largest: int, may_be_single: bool
) -> dict[Path, Write]:
    """In parts with an index; as save_pretrained, one file without an index if everything fits in it."""
    parts: list[list[Entry]] = [[]]
    for entry in entries:  # a larger tensor gets its own file
        if parts[-1] and sum(earlier.nbytes for earlier in parts[-1]) + entry.nbytes > largest:
            parts.append([])
        parts[-1].append(entry)
    if may_be_single and len(parts) == 1:
        return {folder / SINGLE_FILE: partial(write_safetensors, entries=entries)}
    writers: dict[Path, Write] = {}
    names: dict[str, str] = {}
    for nth, part in enumerate(parts, start=1):
        file = folder / f"model-{nth:05d}-of-{len(parts):05d}.safetensors"
        writers[file] = partial(write_safetensors, entries=part)
        names |= {entry.name: file.name for entry in part}
    total = sum(entry.nbytes for entry in entries)
    return {**writers, folder / INDEX_FILE: _json({"metadata": {"total_size": total}, "weight_map": names})}


def write_torch(file: Path, entries: Sequence[Entry]) -> None:
    """Writes what `torch.save(state_dict)` writes: the file without data, then each tensor into its mapping.
    Tied weights share one storage.
    """
    tensors: dict[str, Tensor] = {}
    for entry in entries:  # of untouched memory, which takes none
        tied = tensors.get(entry.same_as)
        tensors[entry.name] = torch.empty(entry.size, dtype=entry.dtype) if tied is None else tied
    with torch.serialization.skip_data():
        torch.save(tensors, file)
    with file.open("r+b") as stream:
        # A full disk is an error here, and a SIGBUS below. Without fallocate (FUSE) glibc reads the file.
        os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
    del tensors
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(file, mmap=True, weights_only=True)
    for entry in entries:
        if not entry.same_as:
            mapped[entry.name].copy_(entry.fetch())


def write_safetensors(file: Path, entries: Sequence[Entry]) -> None:
    """Tied weights are written twice, and views copied: the format shares no memory."""
    from safetensors.torch import save_file

    save_file(
        {entry.name: entry.fetch().clone(memory_format=torch.contiguous_format) for entry in entries},
        file,
        {"format": "pt"},
    )


def _json(value: object) -> Write:
    return _text(json.dumps(value, indent=1).encode())


def _text(data: bytes) -> Write:
    return lambda file: file.write_bytes(data)


def _write_all(folder: Path, writers: Mapping[Path, Write]) -> list[Path]:
    """Writes and syncs all files under temporary names, then gives them their names, the index last, in place
    of an earlier export in this format.
    """
    staged = {file: file.with_name(f".{file.name}.tmp") for file in writers}
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    try:
        for file, write in writers.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            staged[file].unlink(missing_ok=True)  # of a killed export; a link is not written through
            write(staged[file])
            with staged[file].open("rb") as stream:
                os.fsync(stream.fileno())
        old = set[Path]()
        if heads := {index, single} & writers.keys():
            old = {*folder.glob("model-*-of-*.safetensors")} - writers.keys()
            # A reader begins with one of these. A single file is itself replaced by one rename.
            for file in {index} if single in heads else {index, single}:
                file.unlink(missing_ok=True)
        sync_folder(folder)  # or a power cut could keep the old index beside new parts
        for file in sorted(writers, key=lambda file: file == index):
            if file == index:
                sync_folder(folder)
            staged[file].rename(file)
        for file in old:
            file.unlink()
        for parent in {file.parent for file in writers}:
            sync_folder(parent)
        return list(writers)
    finally:
        for file in staged.values():
            file.unlink(missing_ok=True)


def app_reader(checkpoint: str | Path, name: str = "app") -> StorageReader:
    """A reader for `dcp.load({name: AppState(model, optimizer)}, storage_reader=…)` of another program, with
    the checkpoint's `model` and `optim` under that name.
    """
    from torch.distributed.checkpoint import FileSystemReader, Metadata

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            read = super().read_metadata(*args, **kwargs)
            tensors, paths = read.state_dict_metadata, read.planner_data
            return dataclasses.replace(
                read,
                state_dict_metadata={f"{name}.{key}": value for key, value in tensors.items()},
                planner_data={f"{name}.{key}": (name, *path) for key, path in paths.items()},
                storage_data={
                    dataclasses.replace(index, fqn=f"{name}.{index.fqn}"): place
                    for index, place in read.storage_data.items()
                },
            )

    return Reader(checkpoint)

"""An export that `from_pretrained` of transformers reads: its names and files.

config.json is written from the run's configuration or sizes; the tokenizer's and processor's files are copied
from the source folder. Not here: how tensors are fetched and files are sealed (export.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.base.regular_file import TABLE, read_regular
from fsdp.checkpoint.full_state import Entry, Fetch
from fsdp.models.registry import SourceFolder

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
"""No code and no weights."""


def with_saved_names(
    source: SourceFolder, entries: Sequence[Entry], fetch: Fetch
) -> tuple[list[Entry], Fetch]:
    """Entries as save_pretrained names them, tied tensors once; one tensor of the model is held at a time."""
    with torch.device("meta"):
        model: Any = source.build()
    own = {entry.name: entry for entry in entries}
    owners: dict[str, str] = {}
    found: list[Entry] = []
    for name, pieces in source.saved_pieces(model).items():
        if name not in own:
            raise CheckpointError(
                f"the checkpoint has no {name} of {source.class_name}.",
                "export with the --model flags of the run",
            )
        owners |= dict.fromkeys(pieces, name)
        found += [Entry(piece, own[name].dtype, tuple(meta.shape)) for piece, meta in pieces.items()]
    last: tuple[str, dict[str, Tensor]] = ("", {})

    def take(entry: Entry) -> Tensor:
        nonlocal last
        name = owners[entry.name]
        if last[0] != name:
            last = ("", {})  # freed before the next is read
            tensor = fetch(own[name])
            last = (name, {name: tensor} if name == entry.name else source.reverted(model, name, tensor))
        return last[1][entry.name]

    return found, take


def with_dtype(
    entries: Sequence[Entry], fetch: Fetch, dtype: torch.dtype | None
) -> tuple[list[Entry], Fetch]:
    """Casts floating-point tensors; None leaves them as the checkpoint has them."""
    if dtype is None:
        return list(entries), fetch
    cast = [replace(one, dtype=dtype) if one.dtype.is_floating_point else one for one in entries]
    before = {one.name: one for one in entries}
    return cast, lambda entry: fetch(before[entry.name]).to(entry.dtype)


def side_files(
    source: SourceFolder, folder: Path, dtype: torch.dtype
) -> dict[Path, Callable[[BinaryIO], object]]:
    """File → the function that writes it: config.json, and the copied files that the source folder has."""
    texts = {"config.json": source.config_json(dtype).encode()}
    for name in COPIED:
        if source.folder is not None and (source.folder / name).is_file():
            texts[name] = _copied(source.folder / name)
    return {folder / name: _writer(text) for name, text in texts.items()}


def _copied(file: Path) -> bytes:
    try:
        return read_regular(file, TABLE)
    except ValueError as error:
        raise ConfigError(f"{file} is not copied: {error}.", "a folder that save_pretrained wrote") from None


def _writer(text: bytes) -> Callable[[BinaryIO], object]:
    return lambda stream: stream.write(text)

"""The tokenizer of a model's own folder, for data that are tokenized on first use.

    --model.name hf:FOLDER --data.name FILE.jsonl      reads FILE.jsonl with the tokenizer of FOLDER

--data.tokenizer replaces it; `--data.tokenizer bytes` reads bytes. A log line names a tokenizer whose tokens
have other numbers than those of the model's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import TABLE, regular_text
from fsdp.config import DataSection, ModelSection
from fsdp.config.sections import expanded
from fsdp.data.registry import takes_tokenizer
from fsdp.models.hub import PREFIX, find_folder

log = logging.getLogger(__name__)
FILES = ("tokenizer_config.json", "tokenizer.json")
FOREIGN = 0.5
"""Share of a tokenizer's tokens with another number in the model's, from which on a warning is logged."""


def with_model_tokenizer(data: DataSection, model: ModelSection) -> DataSection:
    """The section with the tokenizer of the model's folder, where the data take one and none is given."""
    named = model.name if model.name.startswith(PREFIX) else model.weights
    if not named.startswith(PREFIX) and not (expanded(named) / "config.json").is_file():
        return data
    try:
        folder = find_folder(named)
    except ConfigError:  # named when the model is resolved
        return data
    from fsdp.tokenize.tokenizer import BYTES

    known = any((folder / file).is_file() for file in FILES)
    if data.tokenizer:
        if known and data.tokenizer != BYTES:
            _warn_of_foreign_tokens(data.tokenizer, folder)
        return data
    if not takes_tokenizer(data):
        return data
    if not known:
        log.warning(
            "documents: %s has no tokenizer, so a token is a byte of UTF-8. HINT: --data.tokenizer DIR",
            folder,
        )
        return data
    tokenizer = named.removeprefix(PREFIX)
    log.info("documents: the tokenizer of --data.tokenizer %s, the model's", tokenizer)
    return dataclasses.replace(data, tokenizer=tokenizer)


def _warn_of_foreign_tokens(given: str, folder: Path) -> None:
    from fsdp.tokenize.tokenizer import find_tokenizer

    place = find_tokenizer(given)
    ours, theirs = (_numbers(one if one.is_file() else one / "tokenizer.json") for one in (place, folder))
    apart = sum(theirs.get(token) != number for token, number in ours.items())
    if theirs and apart > FOREIGN * len(ours):
        log.warning(
            "--data.tokenizer %s is not the model's: %s of its %s tokens have another number in %s, or none. "
            "Pretrained weights read them as other tokens. HINT: leave it out",
            given,
            f"{apart:,}",
            f"{len(ours):,}",
            folder,
        )


def _numbers(file: Path) -> dict[str, int]:
    """Token → number, from a tokenizer.json; empty if it cannot be read."""
    try:
        fields: Any = json.loads(regular_text(file, TABLE))
        vocabulary = fields["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    if isinstance(vocabulary, list):  # a unigram model's pieces with their scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{one["content"]: one["id"] for one in fields.get("added_tokens", ())}}

"""How a raw token file was written: the dtype of its tokens, and where they begin.

A file's own statement comes first, in this order:

    FILE.json or DIR/tokens.json    {"dtype": "uint32", "vocab_size": 128256, "tokens": 1000000}, the last two optional
    llm.c's header                  256 int32 before the tokens: magic, version, count (its dev/data/data_common.py)
    FILE.idx beside FILE.bin        Megatron's index, whose 18th byte is a dtype code (its indexed_dataset.py)

Then --data.args.dtype; else uint16, or uint32 where the vocabulary does not fit in it. nanoGPT's files state
nothing. nanoGPT's meta.pkl is not read: unpickling runs code. Not here: the tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fsdp.base.errors import ConfigError

Dtype = Literal["auto", "uint16", "uint32", "int32", "int64", "uint64", "uint8"]
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")

FOLDERS_OWN = "tokens.json"
LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
LLM_C_BYTES = 256 * 4
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}

LOOKED_AT = 1 << 16  # tokens at each end of a file that are examined before the run
FEW = 16
"""Fewer tokens than this show nothing about their width."""
LARGEST_UPPER = 15
"""A vocabulary of a million leaves no more than this in the upper half of 32 bits."""


@dataclass(frozen=True)
class Stated:
    """What a file's sidecar, header or index says of it; `source` is "" where nothing does."""

    source: str = ""
    dtype: str = ""
    offset: int = 0
    tokens: int = -1
    vocab_size: int = 0


def stated(path: Path) -> Stated:
    """OSError and a malformed sidecar are a ConfigError that names the file."""
    for sidecar in (path.with_name(path.name + ".json"), path.with_name(FOLDERS_OWN)):
        if sidecar.is_file():
            # A count belongs to one file.
            return _of_sidecar(sidecar, counted=sidecar.name != FOLDERS_OWN)
    return _of_header(path) or _of_index(path.with_suffix(".idx")) or Stated()


def _of_sidecar(sidecar: Path, *, counted: bool) -> Stated:
    hint = f"""echo '{{"dtype": "uint32", "vocab_size": 128256}}' > {sidecar}, with the dtype that the tokens were written in"""
    try:
        said: Any = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{sidecar} cannot be read as JSON: {error}.", hint) from None
    if not isinstance(said, dict) or said.get("dtype") not in DTYPES:
        shown = said.get("dtype") if isinstance(said, dict) else said
        raise ConfigError(f"{sidecar}: dtype {json.dumps(shown)} is not one of {', '.join(DTYPES)}.", hint)
    numbers = {name: said.get(name, default) for name, default in (("tokens", -1), ("vocab_size", 0))}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{sidecar}: {name} {json.dumps(value)} is not a whole number.", hint)
    tokens = numbers["tokens"] if counted else -1
    return Stated(str(sidecar), said["dtype"], 0, tokens, numbers["vocab_size"])


def _of_header(path: Path) -> Stated | None:
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) < 12:
        return None
    magic, version, count = struct.unpack("<iii", head)
    dtype = LLM_C.get((magic, version))
    return Stated(f"{path}'s header", dtype, LLM_C_BYTES, count) if dtype else None


def _of_index(index: Path) -> Stated | None:
    if not index.is_file():
        return None
    with index.open("rb") as file:
        head = file.read(18)
    if len(head) < 18 or not head.startswith(MEGATRON):
        return None
    if head[17] not in MEGATRON_DTYPES:
        raise ConfigError(
            f"{index} gives its tokens dtype code {head[17]}, which is none of {MEGATRON_DTYPES}.",
            f"write {index.with_suffix('.bin')} again with whole numbers from 0",
        )
    return Stated(str(index), MEGATRON_DTYPES[head[17]])


def dtype_of(path: Path, said: Stated, given: Dtype, vocab_size: int) -> np.dtype:
    """The file's own statement, or the flag; they may not disagree."""
    if said.source and given not in ("auto", said.dtype):
        raise ConfigError(
            f"{said.source} says {said.dtype}, and --data.args.dtype says {given}.",
            "leave --data.args.dtype out",
        )
    name = said.dtype or given
    if name == "auto":
        name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    return np.dtype(name).newbyteorder("<")


def ends(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(position, tokens) of a file's first and last tokens; the last from a multiple of four on: a wider
    token's start.
    """
    yield 0, tokens[:LOOKED_AT]
    if len(tokens) > LOOKED_AT:
        start = max(LOOKED_AT, (len(tokens) - LOOKED_AT) // 4 * 4)
        yield start, tokens[start:]


def wider(tokens: np.ndarray) -> str:
    """The wider dtype that these tokens were written in by the look of them, or "".

    Read at half their width, tokens of 32 bits are each followed by their own upper half: zeros, or a small
    number.
    """
    for times in (4, 2):
        width = tokens.itemsize * times
        if width in (4, 8) and all(_interleaved(part, times) for _, part in ends(tokens)):
            return "uint32" if width == 4 else "int64"
    return ""


def _interleaved(part: np.ndarray, times: int) -> bool:
    part = part[: len(part) // times * times].reshape(-1, times)
    if part.size < FEW:
        return False
    lower, upper = part[:, 0], part[:, 1:]
    largest = int(upper.max())
    return (largest == 0 and int(lower.max()) > 0) or (
        largest <= LARGEST_UPPER and int(upper[:, 1:].max(initial=0)) == 0 and int(lower.max()) > 255
    )


def fits_as(raw: np.ndarray, vocab_size: int) -> str:
    """Another dtype in which these bytes (uint8) are tokens of the vocabulary, or "": a HINT's guess."""
    for name in ("uint16", "uint32", "int64"):
        size = np.dtype(name).itemsize
        tokens = raw[: len(raw) // size * size].view(np.dtype(name).newbyteorder("<"))
        inside = len(tokens) >= FEW and int(tokens.max()) < vocab_size and int(tokens.min()) >= 0
        if inside and not wider(tokens):
            return name
    return ""

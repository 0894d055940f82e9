"""The format of a raw token file: the dtype of its tokens, and the offset of the first.

Sources, in this order:

    FILE.json or DIR/tokens.json    {"dtype": "uint32", "vocab_size": 128256, "tokens": 1000000};
                                    the last two are optional
    llm.c's header                  256 int32 before the tokens: magic, version, count
                                    (its dev/data/data_common.py)
    FILE.idx beside FILE.bin        Megatron's index, whose 18th byte is a dtype code (its indexed_dataset.py)

Then --data.args.dtype; else uint16, or uint32 if the vocabulary does not fit in it. nanoGPT's files have no
such source. nanoGPT's meta.pkl is not read: unpickling runs code. Not here: the tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
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
"""Fewer tokens than this do not show their width."""
LARGEST_UPPER = 15
"""A vocabulary of a million leaves no more than this in the upper half of 32 bits."""


@dataclass(frozen=True)
class Stated:
    """The contents of a file's sidecar, header or index; `source` is "" if there is none."""

    source: str = ""
    dtype: str = ""
    offset: int = 0
    tokens: int = -1
    vocab_size: int = 0


def stated(path: Path, by_folder: Callable[[Path], Stated | None]) -> Stated:
    """Reads the first source that exists. An unreadable or malformed sidecar raises ConfigError.

    `by_folder` is `stated_by_folder`, or a cache of it.
    """
    sidecar = path.with_name(path.name + ".json")
    if sidecar.is_file():
        return _of_sidecar(sidecar, counted=True)
    return by_folder(path.parent) or _of_header(path) or _of_index(path.with_suffix(".idx")) or Stated()


def stated_by_folder(folder: Path) -> Stated | None:
    """The sidecar for every file of the folder, or None. A count in it belongs to no file."""
    sidecar = folder / FOLDERS_OWN
    return _of_sidecar(sidecar, counted=False) if sidecar.is_file() else None


def _of_sidecar(sidecar: Path, *, counted: bool) -> Stated:
    example = '{"dtype": "uint32", "vocab_size": 128256}'
    hint = f"echo '{example}' > {sidecar}, with the dtype that the tokens were written in"
    try:
        said: Any = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    """Returns the dtype from the file's source, else from the flag; ConfigError if both exist and differ."""
    if said.source and given not in ("auto", said.dtype):
        raise ConfigError(
            f"{said.source} gives {said.dtype}, but --data.args.dtype is {given}.",
            "leave --data.args.dtype out",
        )
    name = said.dtype or given
    if name == "auto":
        name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    return np.dtype(name).newbyteorder("<")


def ends(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (position, tokens) of a file's first and last tokens; the last start at a multiple of four,
    where a wider token would start.
    """
    yield 0, tokens[:LOOKED_AT]
    if len(tokens) > LOOKED_AT:
        start = max(LOOKED_AT, (len(tokens) - LOOKED_AT) // 4 * 4)
        yield start, tokens[start:]


def wider(tokens: np.ndarray) -> str:
    """Returns the wider dtype that these tokens appear to have been written in, or "".

    Tokens of 32 bits that are read at half their width are each followed by their upper half: zeros, or a
    small number.
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
    """Guesses, for a HINT, a dtype in which these bytes (uint8) are tokens of the vocabulary, or ""."""
    for name in ("uint16", "uint32", "int64"):
        size = np.dtype(name).itemsize
        tokens = raw[: len(raw) // size * size].view(np.dtype(name).newbyteorder("<"))
        inside = len(tokens) >= FEW and int(tokens.max()) < vocab_size and int(tokens.min()) >= 0
        if inside and not wider(tokens):
            return name
    return ""

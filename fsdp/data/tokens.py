"""tokens: token files, DIR/*.bin (raw) or DIR/*.npy, or one such file.

The files, in the order of their names, form one long row of tokens, split into windows of seq_len. val* files
and those named after another split are held out; without any, the last part of the row is. The width of a raw
file's tokens is read from, in this order:

    FILE.json or DIR/tokens.json    {"dtype": "uint32", "vocab_size": 128256, "tokens": 1000000};
                                    the last two are optional
    llm.c's header                  256 int32 before the tokens: magic, version, count
                                    (its dev/data/data_common.py)
    FILE.idx beside FILE.bin        Megatron's index, whose 18th byte is a dtype code (its indexed_dataset.py)

Then --data.args.dtype; else uint16, or uint32 if the vocabulary does not fit in it. nanoGPT's files have no
such source; its meta.pkl is not read: unpickling runs code. Not here: a tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.base.text import quoted
from fsdp.data.types import DataInfo, DataSet, Samples, Where, check_range, shifted
from fsdp.tokenize.sources import ends_with, held_out_line, is_other

log = logging.getLogger(__name__)
Dtype = Literal["auto", "uint16", "uint32", "int32", "int64", "uint64", "uint8"]
SUFFIXES = (".bin", ".npy")
OPEN_AT_ONCE = 128
"""Each open file holds a descriptor, and 1024 is a common limit."""
IN_FINGERPRINT = 4096
"""Tokens at each end of a file."""
LOOKED_AT = 1 << 16
"""Tokens at each end of a file that are checked before the run."""
LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
LLM_C_BYTES = 256 * 4
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
LARGEST_UPPER = 15
"""A vocabulary of a million leaves no more than this in the upper half of 32 bits."""


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens as it was checked at the start."""

    path: Path
    dtype: np.dtype
    offset: int
    tokens: int
    guessed: bool = False
    """Whether the file has no source for the width of its tokens."""
    documents: int = 0
    """Of a folder of fsdp.tokenize."""

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


def build(where: Where, *, vocab_size: int = 0, dtype: Dtype = "auto", heldout: float = 0.01) -> DataSet:
    check_range("heldout", heldout, 0, 0.5)
    paths = _paths(where)
    formats = {path: format_of(path) for path in paths if not ends_with(path.name, (".npy",))}
    vocab_size = vocab_size or max((known.vocab_size for known in formats.values()), default=0)
    vocab_size = vocab_size or int(where.model_facts.get("vocab_size", 0))
    if vocab_size < 1:
        raise ConfigError(
            "the token files do not give the size of their vocabulary.", "--data.args.vocab_size 50257"
        )
    named = {path for path in paths if path.name.startswith("val")}
    others = {path for path in paths if path in named or is_other(path.name)}
    held_out = set() if paths == [Path(where.dir)] else others if len(others) < len(paths) else named
    if held_out:
        log.info("tokens: %s", held_out_line(sorted(map(str, held_out))))
    files, fingerprint = [], hashlib.sha256()
    for path in paths:
        file = _raw(path, formats[path], dtype, vocab_size) if path in formats else _npy(path)
        if not file.tokens:
            continue
        files.append(file)
        ends = _checked_ends(file, vocab_size)
        if path not in held_out:
            line = f"{path.name} {file.tokens} {file.dtype.str}\n"
            fingerprint.update(line.encode("utf-8", "surrogateescape") + ends)
    row = TokenRow([file for file in files if file.path not in held_out], vocab_size)
    val = TokenRow([file for file in files if file.path in held_out], vocab_size)
    if not len(row):
        raise ConfigError(
            f"{where} has no token file to train on.", f"put *.bin or *.npy files into {where.dir}"
        )
    train, held = split_windows(row, val, where, heldout, lambda row: functools.partial(Windows, row))
    info = DataInfo(
        kind="text",
        facts={
            "vocab_size": vocab_size,
            "seq_len": where.seq_len,
            "fingerprint": fingerprint.hexdigest()[:16],
        },
        tokens_per_sample=where.seq_len,
        masks_targets=False,
        default_steps=1000,
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def split_windows(
    row: TokenRow, val: TokenRow, where: Where, heldout: float, samples: Callable[[TokenRow], Any]
) -> tuple[Samples, Samples]:
    """Windows to train on and held-out ones: those of `val`, or the last part of `row`. `samples(row)` makes
    the samples of (first window, count, seq_len).
    """
    seq_len = where.seq_len
    count, held = (max(0, (len(part) - 1) // seq_len) for part in (row, val))
    spared = 0 if len(val) else math.ceil(count * heldout)
    if count - spared < 1:
        raise ConfigError(
            f"{where} has {len(row)} tokens to train on: not one sample of --data.seq_len {seq_len} and "
            f"{spared} held out.",
            f"--data.seq_len {max(1, (len(row) - 1) // 4)}, or more text",
        )
    if len(val) and not held:
        log.warning(
            "%s: %d tokens are held out, not one sample of --data.seq_len %d: nothing is evaluated",
            where,
            len(val),
            seq_len,
        )
    train: Samples = samples(row)(0, count - spared, seq_len)
    return train, samples(val)(0, held, seq_len) if len(val) else samples(row)(
        count - spared, spared, seq_len
    )


def _paths(where: Where) -> list[Path]:
    root = Path(where.dir)
    if where.dir and root.is_file() and ends_with(root.name, SUFFIXES):
        return [root]
    if not where.dir or not root.is_dir():
        raise ConfigError(
            f"--data.name tokens needs a folder of token files, not {where}.",
            "--data.dir FOLDER with *.bin or *.npy in it",
        )
    paths = sorted(path for path in root.iterdir() if ends_with(path.name, SUFFIXES))
    paths = [path for path in paths if not path.name.startswith(".") and not path.is_dir()]
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} is a link to a file that does not exist.", f"rm {quoted(path)}")
        if path.with_suffix(".loss").is_file():
            raise ConfigError(
                f"{path.with_suffix('.loss')} masks targets, which tokens does not read.",
                f"--data.name {root}",
            )
    return paths


# ---------------------------------------------------------------- the format of a file


@dataclass(frozen=True)
class Format:
    """The contents of a raw file's sidecar, header or index; `source` is "" if there is none."""

    source: str = ""
    dtype: str = ""
    offset: int = 0
    tokens: int = -1
    vocab_size: int = 0


def format_of(path: Path) -> Format:
    """Reads the first source that exists. An unreadable or malformed sidecar raises ConfigError."""
    sidecar, shared = path.with_name(path.name + ".json"), path.parent / "tokens.json"
    if sidecar.is_file():
        return _of_sidecar(sidecar, counted=True)
    if shared.is_file():  # a count in it belongs to no file
        return _of_sidecar(shared, counted=False)
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    if dtype := LLM_C.get((magic, version)):
        return Format(f"{path}'s header", dtype, LLM_C_BYTES, count)
    index = path.with_suffix(".idx")
    code = index.read_bytes()[:18] if index.is_file() else b""
    if len(code) < 18 or not code.startswith(MEGATRON):
        return Format()
    if code[17] not in MEGATRON_DTYPES:
        raise ConfigError(
            f"{index} gives its tokens dtype code {code[17]}, which is none of {MEGATRON_DTYPES}.",
            f"write {path} again with whole numbers from 0",
        )
    return Format(str(index), MEGATRON_DTYPES[code[17]])


def _of_sidecar(sidecar: Path, *, counted: bool) -> Format:
    try:
        fields: Any = json.loads(sidecar.read_text(encoding="utf-8"))
        dtype, numbers = fields["dtype"], (fields.get("tokens", -1), fields.get("vocab_size", 0))
        if dtype not in get_args(Dtype)[1:] or not all(type(number) is int for number in numbers):
            raise ValueError(f"dtype {dtype}, tokens and vocab_size {numbers}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{sidecar} does not describe tokens: {error}.",
            f"""echo '{{"dtype": "uint32", "vocab_size": 128256}}' > {sidecar}; or another of """
            f"{', '.join(get_args(Dtype)[1:])}",
        ) from None
    return Format(str(sidecar), dtype, 0, numbers[0] if counted else -1, numbers[1])


def _raw(path: Path, known: Format, flag: Dtype, vocab_size: int) -> TokenFile:
    if known.source and flag not in ("auto", known.dtype):
        raise ConfigError(
            f"{known.source} gives {known.dtype}, but --data.args.dtype is {flag}.",
            "leave --data.args.dtype out",
        )
    by_vocabulary = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype = np.dtype(known.dtype or (by_vocabulary if flag == "auto" else flag)).newbyteorder("<")
    size = path.stat().st_size - known.offset
    count = size // dtype.itemsize
    if size % dtype.itemsize or known.tokens not in (-1, count):
        raise ConfigError(
            f"{path} has {size} bytes, not those of {'' if known.tokens < 0 else known.tokens} tokens of "
            f"{dtype.name}.",
            "copy it again, or --data.args.dtype with the width of its tokens",
        )
    return TokenFile(path, dtype, known.offset, count, guessed=not known.source)


def _npy(path: Path) -> TokenFile:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
        if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
            raise ValueError(f"{mapped.dtype} {list(mapped.shape)} is not one row of whole numbers")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not a file of tokens: {error}.", "numpy.save one row again") from None
    return TokenFile(path, mapped.dtype, mapped.offset, len(mapped))


def _checked_ends(file: TokenFile, vocab_size: int) -> bytes:
    """Both ends of the file, as the fingerprint has them. Raises ConfigError if they are not its tokens."""
    tokens = file.open()
    # The last ones start at a multiple of four, where a wider token would start.
    last = max(LOOKED_AT, (len(tokens) - LOOKED_AT) // 4 * 4)
    parts = {start: tokens[start : start + LOOKED_AT + 4] for start in (0, last) if start < len(tokens)}
    if file.guessed and (found := _wider(list(parts.values()))):
        own = f"""echo '{{"dtype": "{file.dtype.name}"}}' > {file.path}.json"""
        raise ConfigError(
            f"{file.path} is read as {file.dtype.name} and looks like {found}: each token is followed by "
            "zeros or a small number.",
            f"--data.args.dtype {found}; or, if the tokens are {file.dtype.name}, {own}",
        )
    for start, part in parts.items():
        wrong = np.flatnonzero((part >= vocab_size) | (part < 0))
        if len(wrong):
            place = int(wrong[0])
            raise ConfigError(*_beyond(file, start + place, int(part[place]), vocab_size))
    return tokens[:IN_FINGERPRINT].tobytes() + tokens[-IN_FINGERPRINT:].tobytes()


def _wider(parts: Sequence[np.ndarray]) -> str:
    """The wider dtype that these tokens appear to have been written in, or "".

    Tokens of 32 bits that are read at half their width are each followed by their upper half: zeros, or a
    small number.
    """
    for times in (4, 2):
        width = parts[0].itemsize * times
        if width in (4, 8) and all(_interleaved(part, times) for part in parts):
            return "uint32" if width == 4 else "int64"
    return ""


def _interleaved(part: np.ndarray, times: int) -> bool:
    part = part[: len(part) // times * times].reshape(-1, times)
    if part.size < 16:  # too few to show their width
        return False
    lower, upper = part[:, 0], part[:, 1:]
    zeros = not upper.any() and bool(lower.any())
    small = int(upper.max()) <= LARGEST_UPPER and not upper[:, 1:].any() and int(lower.max()) > 255
    return zeros or small


def _beyond(file: TokenFile, place: int, token: int, vocab_size: int) -> tuple[str, str]:
    """Returns the message and the HINT."""
    return (
        f"{file.path}: the token at position {place} is {token} as {file.dtype.name}, beyond a vocabulary of "
        f"{vocab_size}.",
        f"--data.args.vocab_size {token + 1} or more, or --data.args.dtype with the width of the tokens"
        if token >= 0
        else f"write {file.path} again, with whole numbers from 0",
    )


# ---------------------------------------------------------------- reading


class TokenReader:
    """An open token file; closed with this object.

    Read by system calls, not by a map: where the file has become shorter since the start, a read ends early
    and is an error with the position. In a mapped file the access would end the process with SIGBUS.
    """

    def __init__(self, file: TokenFile) -> None:
        self._file = file
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            raise self._changed(f"cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` tokens from the position `first`."""
        file, size = self._file, self._file.dtype.itemsize
        content = b""
        while len(content) < count * size:  # a read of more than 2 GiB returns less than there is
            offset = file.offset + first * size + len(content)
            more = os.pread(self._descriptor, count * size - len(content), offset)
            if not more:
                raise self._changed(f"ends at token {first + len(content) // size}")
            content += more
        return np.frombuffer(content, file.dtype)

    def _changed(self, what: str) -> TrainingError:
        file = self._file
        return TrainingError(
            f"{file.path} {what}; it had {file.tokens} tokens at the start.",
            f"copy it again and start the run again: it resumes; ls -l {quoted(file.path)}",
        )


class TokenRow:
    """Several files as one row of tokens, read across their boundaries."""

    def __init__(self, files: Sequence[TokenFile], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self.ends = np.cumsum([file.tokens for file in files], dtype=np.int64)
        self._open: Callable[[int], TokenReader] = functools.lru_cache(OPEN_AT_ONCE)(
            lambda number: TokenReader(files[number])
        )

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, start: int) -> tuple[int, int]:
        """Returns the number of the file that holds a token of the row, and the token's position in it."""
        number = int(np.searchsorted(self.ends, start, side="right"))
        return number, start - (int(self.ends[number - 1]) if number else 0)

    def read_into(self, out: np.ndarray, start: int) -> None:
        number, within = self.locate(start)
        filled = 0
        while filled < len(out):
            count = min(len(out) - filled, self.files[number].tokens - within)
            out[filled : filled + count] = self._open(number).read(within, count)
            filled, number, within = filled + count, number + 1, 0

    def check(self, tokens: np.ndarray, start: Callable[[int], int]) -> None:
        """TrainingError for a token outside the vocabulary; `start(n)` is where line n of `tokens` begins.

        A later lookup beyond the embedding would return garbage on CPU, or fail a device-side assertion.
        """
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            line, column = np.argwhere((tokens >= self.vocab_size) | (tokens < 0))[0].tolist()
            number, place = self.locate(start(line) + column)
            raise TrainingError(
                *_beyond(self.files[number], place, int(tokens[line, column]), self.vocab_size)
            )


class Windows:
    """`count` samples of a row, starting at its window `first`."""

    def __init__(self, row: TokenRow, first: int, count: int, seq_len: int) -> None:
        self.row, self.first, self.count, self.seq_len = row, first, count, seq_len

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        windows = np.empty((len(indices), self.seq_len + 1), np.int64)
        starts = ((self.first + indices) * self.seq_len).tolist()
        for out, start in zip(windows, starts, strict=True):
            self.row.read_into(out, start)
        self.row.check(windows, lambda line: int(starts[line]))
        return shifted(windows)

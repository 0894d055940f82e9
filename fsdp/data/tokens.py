"""tokens: token files, DIR/*.bin (raw) or DIR/*.npy, or one such file. text: text files as bytes.

The token files, in the order of their names, form one long row of tokens, split into windows of seq_len. val*
files and those named after another split are held out; without any, the last part of the row is. The width of
a raw file's tokens is read from, in this order:

    FILE.json or DIR/tokens.json    {"dtype": "uint32", "vocab_size": 128256, "tokens": 1000000};
                                    the last two are optional
    llm.c's header                  256 int32 before the tokens: magic, version, count
                                    (its dev/data/data_common.py)
    FILE.idx beside FILE.bin        Megatron's index, whose 18th byte is a dtype code (its indexed_dataset.py)

Then --data.args.dtype; else uint16, or uint32 if the vocabulary does not fit in it. nanoGPT's files have no
such source; its meta.pkl is not read: unpickling runs code.

text has a vocabulary of 256: the bytes of a file, of every text file of a folder in the order of names, up to
max_mb, or of Python's standard library, whose bytes differ between its versions. In a folder hidden files and
binary ones (a zero byte near the beginning) are skipped, and counted in the log. Files named after another
split are held out, up to a bound; without any every tenth file is, or, if those are too short, the last tenth
of the text. Not here: a tokenizer.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import logging
import math
import os
import struct
import sysconfig
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.base.text import quoted
from fsdp.data.types import MASKED, DataSet, Where, check_range, shifted, text_info
from fsdp.tokenize.rows import checked_text, ends_with, files_below, held_out, held_out_line, is_other

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
# Tests are long lists of data; site-packages depends on what is installed.
SKIPPED = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "pydoc_data",
}
SOURCES = "*.py"
HELD_OUT = 1 << 18
"""Bytes of held-out text at most, to keep an evaluation shorter than the training."""
PROBED = 1 << 13


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens as it was checked at the start."""

    path: Path
    dtype: np.dtype
    offset: int
    tokens: int

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


def build(where: Where, *, vocab_size: int = 0, dtype: Dtype = "auto", heldout: float = 0.01) -> DataSet:
    """
    vocab_size: of the tokens; 0: as the files say
    dtype: width of a token in a file without sidecar or header; auto: by the vocabulary
    heldout: part of the tokens that is held out, the last ones
    """
    check_range("heldout", heldout, 0, 0.5)
    root = Path(where.dir)
    paths = sorted(root.iterdir()) if where.dir and root.is_dir() else [root]
    paths = [p for p in paths if ends_with(p.name, SUFFIXES) and p.name[0] != "." and p.is_file()]
    if not paths:
        reason = f"--data.name tokens needs a folder of token files, not {where}."
        raise ConfigError(reason, "--data.dir FOLDER with *.bin or *.npy in it")
    for loss in (path.with_suffix(".loss") for path in paths):
        if loss.is_file():
            raise ConfigError(f"{loss} masks targets, which tokens does not read.", f"--data.name {root}")
    formats = {path: format_of(path) for path in paths if not ends_with(path.name, (".npy",))}
    vocab_size = vocab_size or max((known.vocab_size for known in formats.values()), default=0)
    vocab_size = vocab_size or int(where.model_facts.get("vocab_size", 0))
    if vocab_size < 1:
        reason = "the token files do not give the size of their vocabulary."
        raise ConfigError(reason, "--data.args.vocab_size 50257")
    named = {path for path in paths if path.name.startswith("val")}
    others = {path for path in paths if path in named or is_other(path.name)}
    held_out = set() if paths == [root] else others if len(others) < len(paths) else named
    if held_out:
        log.info("tokens: %s", held_out_line(sorted(map(str, held_out))))
    files, fingerprint = [], hashlib.sha256()
    for path in paths:
        file = raw_file(path, formats[path], dtype, vocab_size) if path in formats else _npy(path)
        if file.tokens:
            files.append(file)
            ends = _checked_ends(file, vocab_size)
            if path not in held_out:
                line = f"{path.name} {file.tokens} {file.dtype.str}\n"
                fingerprint.update(line.encode("utf-8", "surrogateescape") + ends)
    row, val = (
        TokenRow([file for file in files if (file.path in held_out) == held], vocab_size)
        for held in (False, True)
    )
    train, held = split_windows(row, val, where, heldout)
    info = text_info(where, vocab_size, fingerprint.hexdigest()[:16], masks_targets=False, default_steps=1000)
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def split_windows(
    row: TokenRow,
    val: TokenRow,
    where: Where,
    heldout: float,
    loss_of: Callable[[TokenRow], TokenRow | None] = lambda _: None,
) -> tuple[Windows, Windows]:
    """Windows to train on and held-out ones: those of `val`, or the last part of `row`."""
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
        log.warning("%s: %d held-out tokens are not one sample: nothing is evaluated", where, len(val))
    train = Windows(row, 0, count - spared, seq_len, loss_of(row))
    if len(val):
        return train, Windows(val, 0, held, seq_len, loss_of(val))
    return train, Windows(row, count - spared, spared, seq_len, train.loss)


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
        reason = f"{index} gives its tokens dtype code {code[17]}, which is none of {MEGATRON_DTYPES}."
        raise ConfigError(reason, f"write {path} again with whole numbers from 0")
    return Format(str(index), MEGATRON_DTYPES[code[17]])


def _of_sidecar(sidecar: Path, *, counted: bool) -> Format:
    try:
        fields: Any = json.loads(sidecar.read_text(encoding="utf-8"))
        dtype, numbers = fields["dtype"], (fields.get("tokens", -1), fields.get("vocab_size", 0))
        if dtype not in get_args(Dtype)[1:] or not all(type(number) is int for number in numbers):
            raise ValueError(f"dtype {dtype}, tokens and vocab_size {numbers}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        example = """as in {"dtype": "uint32", "vocab_size": 128256}"""
        raise ConfigError(f"{sidecar} does not describe tokens: {error}.", example) from None
    return Format(str(sidecar), dtype, 0, numbers[0] if counted else -1, numbers[1])


def raw_file(path: Path, known: Format, flag: Dtype, vocab_size: int) -> TokenFile:
    if known.source and flag not in ("auto", known.dtype):
        reason = f"{known.source} gives {known.dtype}, but --data.args.dtype is {flag}."
        raise ConfigError(reason, "leave --data.args.dtype out")
    by_vocabulary = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype = np.dtype(known.dtype or (by_vocabulary if flag == "auto" else flag)).newbyteorder("<")
    size = path.stat().st_size - known.offset
    count = size // dtype.itemsize
    if size % dtype.itemsize or known.tokens not in (-1, count):
        tokens = f"{'' if known.tokens < 0 else f'{known.tokens} '}tokens of {dtype.name}"
        hint = "copy it again, or --data.args.dtype with the width of its tokens"
        raise ConfigError(f"{path} has {size} bytes, not those of {tokens}.", hint)
    if not known.source and flag == "auto":
        log.info("tokens: %s does not say how wide its tokens are: read as %s", path, dtype.name)
    return TokenFile(path, dtype, known.offset, count)


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
    for start in {0, max(0, len(tokens) - LOOKED_AT)}:
        part = tokens[start : start + LOOKED_AT]
        wrong = np.flatnonzero((part >= vocab_size) | (part < 0))
        if len(wrong):
            first = int(wrong[0])
            raise ConfigError(*_beyond(file, start + first, int(part[first]), vocab_size))
    return tokens[:IN_FINGERPRINT].tobytes() + tokens[-IN_FINGERPRINT:].tobytes()


def _beyond(file: TokenFile, position: int, token: int, vocab_size: int) -> tuple[str, str]:
    """Returns the message and the HINT."""
    return (
        f"{file.path}: the token at position {position} is {token} as {file.dtype.name}, beyond a vocabulary "
        f"of {vocab_size}.",
        f"--data.args.vocab_size {max(token + 1, 1)} or more; or --data.args.dtype, the width of the tokens",
    )


# ---------------------------------------------------------------- reading


class TokenRow:
    """Several files as one row of tokens, read across their boundaries.

    Read by system calls, not by a map: where a file has become shorter since the start, a read ends early and
    is an error with the position. In a mapped file the access would end the process with SIGBUS.
    """

    def __init__(self, files: Sequence[TokenFile], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self.ends = np.cumsum([file.tokens for file in files], dtype=np.int64)
        self._open: Callable[[int], IO[bytes]] = functools.lru_cache(OPEN_AT_ONCE)(
            lambda number: files[number].path.open("rb", buffering=0)
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
            out[filled : filled + count] = self._read(number, within, count)
            filled, number, within = filled + count, number + 1, 0

    def _read(self, number: int, first: int, count: int) -> np.ndarray:
        """`count` tokens of a file from the position `first`."""
        file = self.files[number]
        size = file.dtype.itemsize
        try:
            opened = self._open(number)  # held: threads may open it at once, or close it for others
            content = os.pread(opened.fileno(), count * size, file.offset + first * size)
            problem = f"ends at token {first + len(content) // size}"
        except OSError as error:
            content, problem = b"", f"cannot be read ({error.strerror})"
        if len(content) < count * size:
            raise TrainingError(
                f"{file.path} {problem}; it had {file.tokens} tokens at the start.",
                f"copy it again and start the run again: it resumes; ls -l {quoted(file.path)}",
            )
        return np.frombuffer(content, file.dtype)

    def check(self, tokens: np.ndarray, start: Callable[[int], int]) -> None:
        """TrainingError for a token outside the vocabulary; `start(n)` is where line n of `tokens` begins.

        A later lookup beyond the embedding would return garbage on CPU, or fail a device-side assertion.
        """
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            line, column = np.argwhere((tokens >= self.vocab_size) | (tokens < 0))[0].tolist()
            number, position = self.locate(start(line) + column)
            wrong = int(tokens[line, column])
            raise TrainingError(*_beyond(self.files[number], position, wrong, self.vocab_size))


class Windows:
    """`count` samples of a row, starting at its window `first`; masked where `loss` is not 1."""

    def __init__(
        self, row: TokenRow, first: int, count: int, seq_len: int, loss: TokenRow | None = None
    ) -> None:
        self.row, self.loss = row, loss
        self.first, self.count, self.seq_len = first, count, seq_len

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        batch = shifted(self._read(self.row, indices))
        if self.loss is not None:
            untrained = torch.from_numpy(self._read(self.loss, indices)[:, 1:] == 0)
            batch["targets"].masked_fill_(untrained, MASKED)
        return batch

    def _read(self, row: TokenRow, indices: np.ndarray) -> np.ndarray:
        windows = np.empty((len(indices), self.seq_len + 1), np.int64)
        starts = ((self.first + indices) * self.seq_len).tolist()
        for out, start in zip(windows, starts, strict=True):
            row.read_into(out, start)
        row.check(windows, lambda line: int(starts[line]))
        return windows


# ---------------------------------------------------------------- text


def text(where: Where, *, max_mb: float = 8.0, files: str = "*") -> DataSet:
    """
    max_mb: megabytes that are read
    files: pattern of the names of a folder's files, as in *.md
    """
    check_range("max_mb", max_mb, 0.001, 1000)
    root, limit = Path(where.dir or sysconfig.get_paths()["stdlib"]), int(max_mb * 1e6)
    # A folder's sources are read as bytes, as the library's are: existing runs on them can resume.
    sources = not where.dir or files == SOURCES
    paths = _text_files(where, root, SOURCES if sources else files, SKIPPED if sources else ())
    named = [] if sources else held_out(list(map(str, paths)))
    if named:
        log.info("text: %s", held_out_line(named))
        train = b"".join(_texts(root, [path for path in paths if str(path) not in named], limit))
        heldout = b"".join(_texts(root, [Path(path) for path in named], HELD_OUT))
    else:
        contents = _texts(root, paths, limit, sources)
        train = b"".join(content for number, content in enumerate(contents) if number % 10 != 9)
        heldout = b"".join(contents[9::10])[:HELD_OUT]
        if len(heldout) <= where.seq_len:  # the last tenth, which is at least one sample
            joined = b"".join(contents)
            cut = max(0, len(joined) - min(max(len(joined) // 10, where.seq_len + 1), HELD_OUT))
            train, heldout = joined[:cut], joined[cut:]
    if min(len(train), len(heldout)) <= where.seq_len:
        raise ConfigError(
            f"text under {root} has {len(train)} bytes to train on, {len(heldout)} to hold out: no sample of "
            f"--data.seq_len {where.seq_len}.",
            "a folder with more text as --data.dir, or a shorter --data.seq_len",
        )
    fingerprint = hashlib.sha256(train + heldout).hexdigest()[:16]
    facts: dict[str, Any] = {"default_steps": 300, "preprocess": {"tokenizer": "bytes"}}
    info = text_info(where, 256, fingerprint, masks_targets=False, **facts)
    samples = [ByteSamples(part, where.seq_len) for part in (train, heldout)]
    return DataSet(train=samples[0], heldout=samples[1], info=info)


def _text_files(where: Where, root: Path, pattern: str, skipped: Collection[str]) -> list[Path]:
    if not root.exists():
        raise ConfigError(f"{where} is neither a file nor a folder.", f"ls {quoted(root.parent)}")
    if not root.is_dir():
        return [root]
    # In the order of a walk: a folder's own files before those of the folders in it.
    paths = sorted(files_below(root, skipped), key=lambda path: (path.parent.parts, path.name))
    matched = [path for path in paths if fnmatch.fnmatch(path.name, pattern)]
    return [path for path in matched if path.exists()] if skipped else matched


def _texts(root: Path, paths: Sequence[Path], limit: int, sources: bool = False) -> list[bytes]:
    """At most `limit` bytes of the files, of UTF-8 unless they are sources."""
    texts, left = list[bytes](), limit
    for path in paths:
        with path.open("rb") as file:
            raw = file.read(left) + (b"" if sources else file.readline())  # no character is cut in two
        if sources or path == root or b"\0" not in raw[:PROBED]:
            texts.append(raw if sources else checked_text(raw, path).encode()[:left])
            left -= len(texts[-1])
        if not left:
            log.info("text: %g MB of %s are read; --data.args.max_mb 1000 reads more", limit / 1e6, root)
            break
    else:
        binary = len(paths) - len(texts)
        if not texts:
            raise ConfigError(f"{root} has no text file; {binary} are binary.", f"ls -a {quoted(root)}")
        log.info("text: %d files of %s are read; %d binary ones are left out", len(texts), root, binary)
    return texts


class ByteSamples:
    """Adjacent windows: the last target of one is the first input of the next."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self._bytes = np.frombuffer(text, np.uint8)
        self._offsets = np.arange(seq_len + 1)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.seq_len

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return shifted(self._bytes[indices[:, None] * self.seq_len + self._offsets])

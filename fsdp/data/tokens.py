"""tokens: token files, DIR/*.bin (raw) or DIR/*.npy, or one such file.

The files, in the order of their names, form one long row of tokens, split into windows of seq_len. val* files
and those named after another split are held out; without any, the last part of the row is. Not here: a
tokenizer, and the width of a raw file's tokens (token_width.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import numpy as np
from torch import Tensor

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.data.arguments import Where, check_range
from fsdp.data.next_token import shifted
from fsdp.data.threaded import threaded
from fsdp.data.token_file import TokenFile, ends_of
from fsdp.data.token_reader import TokenReader
from fsdp.data.token_width import (
    LOOKED_AT,
    Dtype,
    Stated,
    dtype_of,
    ends,
    fits_as,
    stated,
    stated_by_folder,
    wider,
)
from fsdp.data.types import DataInfo, DataSet
from fsdp.tokenize.file_names import broken_link, shown
from fsdp.tokenize.sources import ends_with
from fsdp.tokenize.split_names import held_out_line, is_other

log = logging.getLogger(__name__)
OPEN_AT_ONCE = 128  # each open file holds a descriptor, and 1024 is a common limit
IN_FINGERPRINT = 4096
"""Tokens at each end of a file."""
SUFFIXES = (".bin", ".npy")


def build(where: Where, *, vocab_size: int = 0, dtype: Dtype = "auto", heldout: float = 0.01) -> DataSet:
    check_range("heldout", heldout, 0, 0.5)
    paths = _paths(where)
    held_out = _held_out(paths, where)
    files, vocab_size, fingerprint = _examined(paths, held_out, where, dtype, vocab_size)
    row = TokenRow([file for file in files if file.path not in held_out], vocab_size)
    val = TokenRow([file for file in files if file.path in held_out], vocab_size)
    if not len(row):
        raise ConfigError(
            f"{where} has no token file to train on.", f"put *.bin or *.npy files into {where.dir}"
        )
    train, held = _windows(row, val, where, heldout)
    info = DataInfo(
        kind="text",
        facts={"vocab_size": vocab_size, "seq_len": where.seq_len, "fingerprint": fingerprint},
        tokens_per_sample=where.seq_len,
        masks_targets=False,
        default_steps=1000,
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def _examined(
    paths: list[Path], held_out: Set[Path], where: Where, dtype: Dtype, vocab_size: int
) -> tuple[list[TokenFile], int, str]:
    """The files that hold tokens, the size of the vocabulary, and the fingerprint of those to train on: their
    names and sizes, and the tokens at both ends.

    Of several wrong files the first is named.
    """
    _refuse_masks(paths)
    said = _stated(paths)
    vocab_size = vocab_size or max((one.vocab_size for one in said if one), default=0)
    vocab_size = vocab_size or int(where.model_facts.get("vocab_size", 0))
    if vocab_size < 1:
        raise ConfigError(
            "the token files do not give the size of their vocabulary.", "--data.args.vocab_size 50257"
        )

    def examine(place: int) -> tuple[TokenFile, bytes]:
        of_file = said[place]
        file = _raw(paths[place], of_file, dtype, vocab_size) if of_file else _npy(paths[place])
        return file, _checked_ends(file, vocab_size) if file.tokens else b""

    files, whole = [], hashlib.sha256()
    for file, both_ends in threaded(examine, range(len(paths))):
        if not file.tokens:
            continue
        files.append(file)
        if file.path not in held_out:
            line = f"{file.path.name} {file.tokens} {file.dtype.str}\n"
            whole.update(line.encode("utf-8", "surrogateescape"))
            whole.update(both_ends)
    return files, vocab_size, whole.hexdigest()[:16]


def _refuse_masks(paths: list[Path]) -> None:
    masked = next((path for path in paths if path.with_suffix(".loss").is_file()), None)
    if masked is not None:
        raise ConfigError(
            f"{masked.with_suffix('.loss')} masks targets, which tokens does not read.",
            f"--data.name {masked.parent}",
        )


def _stated(paths: list[Path]) -> list[Stated | None]:
    """What is known of each raw file's tokens; None of a .npy file. Equal ones are one object."""
    seen: dict[Stated, Stated] = {}
    by_folder = functools.cache(stated_by_folder)

    def of_file(path: Path) -> Stated | None:
        return stated(path, by_folder) if ends_with(path.name, (".bin",)) else None

    return [one and seen.setdefault(one, one) for one in threaded(of_file, paths)]


def _checked_ends(file: TokenFile, vocab_size: int) -> bytes:
    """Both ends of the file, as the fingerprint has them. Raises ConfigError if they are not its tokens."""
    tokens = file.open()
    _check_width(file, tokens)
    _check_vocabulary(file, tokens, vocab_size)
    return tokens[:IN_FINGERPRINT].tobytes() + tokens[-IN_FINGERPRINT:].tobytes()


def _held_out(paths: list[Path], where: Where) -> Set[Path]:
    """The val* files of a folder, and those of other splits where there is something else to train on."""
    if paths == [Path(where.dir)]:
        return frozenset()
    val = {path for path in paths if path.name.startswith("val")}
    named = {path for path in paths if path in val or is_other(path.name)}
    held = named if len(named) < len(paths) else val
    if held:
        log.info("tokens: %s", held_out_line(sorted(map(shown, held))))
    return held


def _windows(row: TokenRow, val: TokenRow, where: Where, heldout: float) -> tuple[Windows, Windows]:
    seq_len = where.seq_len
    whole = (len(row) - 1) // seq_len
    spared = 0 if len(val) else math.ceil(whole * heldout)
    if whole - spared < 1:
        raise ConfigError(
            f"{where} has {len(row)} tokens to train on: not one sample of --data.seq_len {seq_len} and "
            f"{spared} held out.",
            f"--data.seq_len {max(1, (len(row) - 1) // 4)}, or more files",
        )
    train = Windows(row, 0, whole - spared, seq_len)
    if not len(val):
        return train, Windows(row, whole - spared, spared, seq_len)
    held = Windows(val, 0, (len(val) - 1) // seq_len, seq_len)
    if not len(held):
        log.warning(
            "tokens: the val files of %s have %d tokens, not one sample of --data.seq_len %d: nothing is "
            "evaluated. HINT: remove them, and the last --data.args.heldout 0.01 is held out",
            where,
            len(val),
            seq_len,
        )
    return train, held


def _paths(where: Where) -> list[Path]:
    hint = "--data.dir FOLDER with *.bin or *.npy in it"
    if not where.dir:
        raise ConfigError("--data.name tokens needs a folder of token files in --data.dir.", hint)
    root = Path(where.dir)
    if root.is_file() and ends_with(root.name, SUFFIXES):
        return [root]
    if not root.is_dir():
        raise ConfigError(f"{where} is neither a folder nor a .bin or .npy file.", hint)
    paths = []
    with os.scandir(root) as entries:
        for one in entries:
            if ends_with(one.name, SUFFIXES) and not one.name.startswith("."):
                if one.is_symlink() and not Path(one.path).exists():
                    raise broken_link(Path(one.path))
                if not one.is_dir():
                    paths.append(Path(one.path))
    return sorted(paths)


def _raw(path: Path, said: Stated, given: Dtype, vocab_size: int) -> TokenFile:
    dtype = dtype_of(path, said, given, vocab_size)
    size = path.stat().st_size - said.offset
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size} bytes, not a multiple of {dtype.itemsize} bytes per token.",
            "copy it again" if size % 2 else "--data.args.dtype uint16, or copy it again",
        )
    count = size // dtype.itemsize
    if said.tokens not in (-1, count):
        raise ConfigError(
            f"{path} has {count} tokens, but {said.source} gives {said.tokens}.", "copy it again"
        )
    return TokenFile(path, dtype, said.offset, count, guessed=not said.source)


def _npy(path: Path) -> TokenFile:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not a complete .npy file: {error}.", "numpy.save it again") from None
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        raise ConfigError(
            f"{path} holds {mapped.dtype} {list(mapped.shape)}, not one row of whole numbers.",
            "numpy.save one row",
        )
    return TokenFile(path, mapped.dtype, mapped.offset, len(mapped))


def _check_width(file: TokenFile, tokens: np.ndarray) -> None:
    """Raises ConfigError if the width is guessed and the tokens look wider than they are read."""
    if file.guessed and (found := wider(tokens)):
        own = f"""echo '{{"dtype": "{file.dtype.name}"}}' > {file.path}.json"""
        raise ConfigError(
            f"{file.path} is read as {file.dtype.name} and looks like {found}: each token is followed by "
            "zeros or a small "
            "number.",
            f"--data.args.dtype {found}; or, if the tokens are {file.dtype.name}, {own}",
        )


def _check_vocabulary(file: TokenFile, tokens: np.ndarray, vocab_size: int) -> None:
    """Checks both ends; every batch is checked when it is read."""
    for start, part in ends(tokens):
        if int(part.max()) >= vocab_size or int(part.min()) < 0:
            place = int(np.flatnonzero((part >= vocab_size) | (part < 0))[0])
            raise ConfigError(*_beyond(file, start + place, int(part[place]), vocab_size))


def _beyond(file: TokenFile, place: int, token: int, vocab_size: int) -> tuple[str, str]:
    """Returns the message and the HINT."""
    said = f"{file.path}: the token at position {place} is {token}"
    other = fits_as(np.memmap(file.path, np.uint8, "r")[: 8 * LOOKED_AT], vocab_size) if file.guessed else ""
    if other and other != file.dtype.name:
        return (
            f"{said} as {file.dtype.name}, outside the vocabulary of {vocab_size}.",
            f"--data.args.dtype {other}",
        )
    if token < 0:
        return (
            f"{said}; tokens are whole numbers from 0.",
            f"write {file.path} again, with another number for masked tokens",
        )
    return (
        f"{said}, beyond --data.args.vocab_size {vocab_size}.",
        f"--data.args.vocab_size {token + 1} or more",
    )


class TokenRow:
    """Several files as one row of tokens, read across their boundaries."""

    def __init__(self, files: Sequence[TokenFile], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self._ends = ends_of(files)
        self._open: Callable[[int], TokenReader] = functools.lru_cache(OPEN_AT_ONCE)(
            lambda place: TokenReader(files[place])
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, start: int) -> tuple[TokenFile, int]:
        """Returns the file that holds a token of the row, and the token's position in it."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        return self.files[place], start - (int(self._ends[place - 1]) if place else 0)

    def read_into(self, out: np.ndarray, start: int) -> None:
        place = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(out):
            within = start + filled - (int(self._ends[place - 1]) if place else 0)
            count = min(len(out) - filled, int(self._ends[place]) - start - filled)
            out[filled : filled + count] = self._open(place).read(within, count)
            filled += count
            place += 1


class Windows:
    """`count` samples of a row, starting at its window `first`."""

    def __init__(self, row: TokenRow, first: int, count: int, seq_len: int) -> None:
        self.row, self.first, self.count, self.seq_len = row, first, count, seq_len

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        windows = np.empty((len(indices), self.seq_len + 1), np.int64)
        for out, index in zip(windows, indices, strict=True):
            self.row.read_into(out, (self.first + int(index)) * self.seq_len)
        # A later lookup beyond the embedding would return garbage on CPU, or fail a device-side assertion.
        if windows.max() >= self.row.vocab_size or windows.min() < 0:
            raise self._beyond(indices, windows)
        return shifted(windows)

    def _beyond(self, indices: np.ndarray, windows: np.ndarray) -> TrainingError:
        row, column = np.argwhere((windows >= self.row.vocab_size) | (windows < 0))[0]
        file, place = self.row.locate((self.first + int(indices[row])) * self.seq_len + int(column))
        return TrainingError(*_beyond(file, place, int(windows[row, column]), self.row.vocab_size))

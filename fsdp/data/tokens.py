"""tokens: a person's own token files, mapped and never read whole. DIR/*.bin (raw uint16 or uint32) or DIR/*.npy.

The files, in the order of their names, are one long row of tokens, cut into windows of seq_len. val* files are held out;
where there are none, the row's last part is. Not here: a tokenizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from fsdp.data.base import DataInfo, DataSet
from fsdp.data.registry import Where, check_range
from fsdp.data.text import shifted
from fsdp.errors import ConfigError, TrainingError

OPEN_AT_ONCE = 128  # each mapped file holds a descriptor, and 1024 is a common limit
LOOKED_AT = 1 << 16  # tokens at each end of a file that are compared with vocab_size before the run


@dataclass(frozen=True)
class TokenFile:
    path: Path
    dtype: np.dtype
    offset: int
    tokens: int

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


def build(
    where: Where, *, vocab_size: int = 0, dtype: Literal["uint16", "uint32"] = "uint16", heldout: float = 0.01
) -> DataSet:
    check_range("heldout", heldout, 0, 0.5)
    vocab_size = vocab_size or int(where.model_facts.get("vocab_size", 0))
    if vocab_size < 1:
        raise ConfigError("tokens do not say how many kinds there are.", "--data.args.vocab_size 50257")
    files = find_files(where.dir, np.dtype(dtype).newbyteorder("<"))
    _check_vocabulary(files, vocab_size)
    row = TokenRow([file for file in files if not file.path.name.startswith("val")], vocab_size)
    val = TokenRow([file for file in files if file.path.name.startswith("val")], vocab_size)
    train, held = _windows(row, val, where, heldout)
    info = DataInfo(
        kind="text",
        facts={"vocab_size": vocab_size, "seq_len": where.seq_len},
        tokens_per_sample=where.seq_len,
        masks_targets=False,
        default_steps=1000,
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def _windows(row: TokenRow, val: TokenRow, where: Where, heldout: float) -> tuple[Windows, Windows]:
    seq_len = where.seq_len
    whole = (len(row) - 1) // seq_len
    spared = 0 if len(val) else math.ceil(whole * heldout)
    if whole - spared < 1:
        raise ConfigError(
            f"--data.dir {where.dir} has {len(row)} tokens to train on: not one sample of --data.seq_len {seq_len} "
            f"and {spared} held out.",
            f"--data.seq_len {max(1, (len(row) - 1) // 4)}, or more files",
        )
    train = Windows(row, 0, whole - spared, seq_len)
    held = Windows(val, 0, (len(val) - 1) // seq_len, seq_len) if len(val) else Windows(row, whole - spared, spared, seq_len)
    return train, held


def find_files(folder: str, dtype: np.dtype) -> list[TokenFile]:
    if not folder:
        raise ConfigError(
            "--data.name tokens needs the folder of your token files.", "--data.dir FOLDER with *.bin or *.npy in it"
        )
    if not Path(folder).is_dir():
        raise ConfigError(f"--data.dir {folder} is not a folder.", "--data.dir FOLDER with *.bin or *.npy in it")
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".bin", ".npy"))
    files = [_raw(path, dtype) if path.suffix == ".bin" else _npy(path) for path in paths]
    if not any(file.tokens for file in files if not file.path.name.startswith("val")):
        raise ConfigError(f"--data.dir {folder} has no token file to train on.", f"put *.bin or *.npy files into {folder}")
    return [file for file in files if file.tokens]


def _raw(path: Path, dtype: np.dtype) -> TokenFile:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size} bytes, not whole tokens of {dtype.itemsize}.",
            "--data.args.dtype as it was written, or copy it again",
        )
    return TokenFile(path, dtype, 0, size // dtype.itemsize)


def _npy(path: Path) -> TokenFile:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not a whole .npy file: {error}.", "numpy.save it again") from None
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        raise ConfigError(
            f"{path} holds {mapped.dtype} {list(mapped.shape)}, not one row of whole numbers.", "numpy.save one row"
        )
    return TokenFile(path, mapped.dtype, mapped.offset, len(mapped))


def _check_vocabulary(files: list[TokenFile], vocab_size: int) -> None:
    """A look at both ends of each file; every batch is looked at when it is read."""
    for file in files:
        mapped = file.open()
        for part in (mapped[:LOOKED_AT], mapped[-LOOKED_AT:]):
            if int(part.max()) >= vocab_size or int(part.min()) < 0:
                raise _too_small(str(file.path), int(part.max()), int(part.min()), vocab_size)


def _too_small(place: str, high: int, low: int, vocab_size: int) -> ConfigError:
    if low < 0:
        return ConfigError(f"{place} has token {low}.", "tokens are whole numbers from 0")
    return ConfigError(
        f"{place} has token {high}, beyond --data.args.vocab_size {vocab_size}.",
        f"--data.args.vocab_size {high + 1} or more, or --data.args.dtype as it was written",
    )


class TokenRow:
    """Many files as one row: row(start, count), over their borders."""

    def __init__(self, files: list[TokenFile], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self._ends = np.cumsum([file.tokens for file in files], dtype=np.int64)
        self._open: Callable[[int], np.ndarray] = functools.lru_cache(OPEN_AT_ONCE)(lambda place: files[place].open())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read_into(self, out: np.ndarray, start: int) -> None:
        place = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(out):
            within = start + filled - int(self._ends[place] - self.files[place].tokens)
            part = self._open(place)[within : within + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            place += 1


class Windows:
    """`count` samples of a row from its window `first` on."""

    def __init__(self, row: TokenRow, first: int, count: int, seq_len: int) -> None:
        self.row, self.first, self.count, self.seq_len = row, first, count, seq_len

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        windows = np.empty((len(indices), self.seq_len + 1), np.int64)
        for out, index in zip(windows, indices, strict=True):
            self.row.read_into(out, (self.first + int(index)) * self.seq_len)
        # An index beyond the embedding is garbage on CPU and a device-side assertion on CUDA, far from here.
        if windows.max() >= self.row.vocab_size or windows.min() < 0:
            high = int(windows.max())
            raise TrainingError(
                f"samples {indices[:4].tolist()} … have token {high}, beyond --data.args.vocab_size {self.row.vocab_size}.",
                f"--data.args.vocab_size {high + 1} or more",
            )
        return shifted(windows)

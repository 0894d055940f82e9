"""text: the bytes of Python's own standard library sources, real text on every machine, 256 tokens.

The sources are taken in the order of their names up to a size; every tenth file is held out, up to a bound. The bytes differ
between versions of Python (and a distribution may leave files out), so facts["fingerprint"] says which they were: a run
that goes on under another Python sees other samples, and can know it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdp.data.base import DataInfo, DataSet
from fsdp.data.registry import Where, check_range
from fsdp.errors import ConfigError

# Tests are long lists of data; site-packages is whatever was installed.
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"})

HELD_OUT = 1 << 18  # bytes at most: an evaluation shall not take longer than the training


def build(where: Where, *, max_mb: float = 8.0) -> DataSet:
    check_range("max_mb", max_mb, 0.001, 1000)
    root = Path(where.dir or sysconfig.get_paths()["stdlib"])
    contents = list(_read(root, int(max_mb * 1e6)))
    train = b"".join(text for place, text in enumerate(contents) if place % 10 != 9)
    heldout = b"".join(text for place, text in enumerate(contents) if place % 10 == 9)[:HELD_OUT]
    for split, text in (("train on", train), ("hold out", heldout)):
        if len(text) <= where.seq_len:
            raise ConfigError(
                f"text under {root} has {len(text)} bytes to {split}, no sample of --data.seq_len {where.seq_len}.",
                "a folder with more .py files as --data.dir, or a shorter --data.seq_len",
            )
    fingerprint = hashlib.sha256(train + heldout).hexdigest()[:16]
    info = DataInfo(
        kind="text",
        facts={"vocab_size": 256, "seq_len": where.seq_len, "fingerprint": fingerprint},
        tokens_per_sample=where.seq_len,
        masks_targets=False,
        default_steps=300,
        preprocess={"tokenizer": "bytes"},
    )
    return DataSet(train=ByteSamples(train, where.seq_len), heldout=ByteSamples(heldout, where.seq_len), info=info)


def _read(root: Path, limit: int) -> Iterator[bytes]:
    for path in _sources(root):
        text = path.read_bytes()[:limit]
        limit -= len(text)
        yield text
        if not limit:
            return


def _sources(root: Path) -> Iterator[Path]:
    """Every .py file below, in an order of names that no file system decides."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


class ByteSamples:
    """Windows that lie side by side: the last target of one is the first input of the next."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self._bytes = np.frombuffer(text, np.uint8)
        self._offsets = np.arange(seq_len + 1)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.seq_len

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return shifted(self._bytes[indices[:, None] * self.seq_len + self._offsets])


def shifted(windows: np.ndarray) -> dict[str, Tensor]:
    """[n, seq_len + 1] tokens → inputs, and the token that follows each as targets."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

"""The files of one shard: its tokens, their index and sidecar, and what they hold."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.errors import ConfigError
from fsdp.rundir.atomic_write import write_atomically
from fsdp.tokenize.documents import Document, DocumentReader, masks
from fsdp.tokenize.shard_plan import Shard, TokenizePlan
from fsdp.tokenize.tokenizer import Tokenizer

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Tokenized:
    """What one shard, or all of them, hold."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    """Rows left out: no tokens, or none that is trained on."""

    def __add__(self, other: Tokenized) -> Tokenized:
        return Tokenized(
            self.documents + other.documents, self.tokens + other.tokens, self.empty + other.empty
        )


@dataclass(frozen=True)
class TokenizerFacts:
    """What the manifest has of the tokenizer. Writers return it: the process that starts them loads none."""

    vocab_size: int
    end: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> TokenizerFacts:
        return TokenizerFacts(tokenizer.vocab_size, tokenizer.end)


ShardResult = tuple[Tokenized, TokenizerFacts]


class ShardWriter:
    def __init__(self, plan: TokenizePlan, out: Path) -> None:
        self._plan, self._out = plan, out
        self._sources = [*plan.job.place.open(), *plan.job.place.open_held_out()]
        self._reader = DocumentReader(plan.job.options, plan.form)
        wide = self._reader.tokenizer.vocab_size > 1 << 16
        self._dtype = np.dtype(np.int32 if wide else np.uint16).newbyteorder("<")
        self._masked = masks(plan.form, plan.job.options)

    def write(self, shard: Shard) -> ShardResult:
        files = {
            split: SplitFiles(self._out / f"{split}-{shard.number:05d}", self._masked) for split in SPLITS
        }
        total = Tokenized()
        try:
            for n, document in enumerate(self._documents(shard), shard.row):
                if document is None:
                    total += Tokenized(empty=1)
                    continue
                every = self._plan.every
                held = shard.held or (every and n % every == every - 1)
                files["val" if held else "train"].add(document, self._dtype)
                total += Tokenized(documents=1, tokens=len(document.tokens))
            for one in files.values():
                one.finish(self._dtype, self._reader.tokenizer.vocab_size)
            write_atomically(self._out / f"{shard.number:05d}.done", json.dumps(asdict(total)) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{self._out} cannot be written ({error.strerror}).",
                f"df -h {self._out}; then the same command",
            ) from None
        finally:
            for one in files.values():
                one.close()
        return total, TokenizerFacts.of(self._reader.tokenizer)

    def _documents(self, shard: Shard) -> Iterator[Document | None]:
        """None for a row without a token to train on."""
        rows = self._sources[shard.source].read(shard.first, shard.last)
        for document in self._reader.read_all(rows):
            trained = document.trained
            empty = len(document.tokens) < 2 or (trained is not None and not trained[1:].any())
            yield None if empty else document


class SplitFiles:
    """The tokens of one shard and split, written aside and renamed."""

    def __init__(self, stem: Path, masked: bool) -> None:
        self._stem, self._masked = stem, masked
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        self._open: dict[str, Any] = {}

    def add(self, document: Document, dtype: np.dtype) -> None:
        raw = document.tokens.astype(dtype).tobytes()
        self._put(".bin", raw)
        if self._masked:
            assert document.trained is not None
            self._put(".loss", document.trained.tobytes())
            self._digest.update(document.trained.tobytes())
        self._digest.update(raw)
        self._lengths.append(len(document.tokens))

    def _put(self, suffix: str, raw: bytes) -> None:
        if suffix not in self._open:
            self._open[suffix] = self._aside(suffix).open("wb")
        self._open[suffix].write(raw)

    def _aside(self, suffix: str) -> Path:
        return self._stem.with_name(f".{self._stem.name}{suffix}.{os.getpid()}")

    def finish(self, dtype: np.dtype, vocab_size: int) -> None:
        """Leaves no file where there is no token."""
        if not self._lengths:
            return
        facts = {
            "dtype": dtype.name, "vocab_size": vocab_size, "tokens": sum(self._lengths),
            "documents": len(self._lengths), "sha256": self._digest.hexdigest(),
        }  # fmt: skip
        write_atomically(Path(f"{self._stem}.bin.json"), json.dumps(facts) + "\n")
        self._put(".idx", index_bytes(self._lengths, dtype))
        for suffix in list(self._open):
            file = self._open[suffix]
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._aside(suffix).replace(f"{self._stem}{suffix}")
            del self._open[suffix]  # last: close removes what a full disk has cut short

    def close(self) -> None:
        for suffix, file in self._open.items():
            with suppress(OSError):  # it writes what a full disk has refused before
                file.close()
            self._aside(suffix).unlink(missing_ok=True)
        self._open.clear()


INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {"uint16": 8, "int32": 4}


def index_bytes(lengths: list[int], dtype: np.dtype) -> bytes:
    """Megatron's index: a sequence a document."""
    sizes = np.array(lengths, "<i4")
    starts = (np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize
    head = INDEX_HEAD.pack(INDEX_MAGIC, 1, INDEX_DTYPES[dtype.name], len(sizes), len(sizes) + 1)
    return (
        head
        + sizes.tobytes()
        + starts.astype("<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )


def read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The documents' lengths in tokens, and their first bytes in the .bin file, mapped."""
    try:
        with path.open("rb") as file:
            count = INDEX_HEAD.unpack(file.read(INDEX_HEAD.size))[3]
        whole = path.stat().st_size >= INDEX_HEAD.size + 12 * count
    except (OSError, struct.error):
        whole = False
    if not whole:
        raise ConfigError(f"{path} is missing or cut short.", "copy it again, or tokenize again")
    lengths = np.memmap(path, "<i4", "r", INDEX_HEAD.size, (count,))
    return lengths, np.memmap(path, "<i8", "r", INDEX_HEAD.size + 4 * count, (count,))

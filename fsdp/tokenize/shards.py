"""Token files from rows, written by parallel processes that can be killed and started again.

OUT holds, for each shard of the source, in the order of the rows:

    train-00000.bin         tokens, little-endian; val-00000.bin those of held-out documents
    train-00000.bin.json    its dtype, vocabulary, count and digest: the sidecar of --data.name tokens
    train-00000.idx         where its documents begin, in the form of Megatron's index
    train-00000.loss        a byte a token, 1 where it is a target; only if some are not
    00000.done              the shard is finished
    tokenize.json           what they were made from; a start with another source or tokenizer is refused

Which rows a shard holds depends on the source alone, so the files are the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.rundir.atomic_write import write_atomically
from fsdp.tokenize.documents import Document, DocumentOptions, DocumentReader, Form, form_of, masks
from fsdp.tokenize.locate import SourceName
from fsdp.tokenize.sources import SourceRow, SourceRows
from fsdp.tokenize.tokenizer import Tokenizer, digest_of_tokenizer, load_tokenizer, modules_of

MANIFEST = "tokenize.json"
VERSION = 1
SHARD_BYTES = 1 << 26
"""Of the source; a shard holds the rows of about so many bytes."""
SPLITS = ("train", "val")


@dataclass(frozen=True)
class TokenizeJob:
    """What the tokens follow from. Read from flags; equal jobs give equal bytes."""

    source: str
    options: DocumentOptions = field(default_factory=DocumentOptions)
    heldout: float = 0.01
    shard_bytes: int = SHARD_BYTES
    config: str = ""
    split: str = ""
    """Both of a source hf:NAME."""

    @property
    def place(self) -> SourceName:
        return SourceName(self.source, self.config, self.split)

    def key(self) -> dict[str, Any]:
        """Of the files' names, sizes and times, the tokenizer's files, and the options."""
        options = {**asdict(self.options), "tokenizer": digest_of_tokenizer(self.options.tokenizer)}
        return {
            "version": VERSION, "files": self.place.identity(),
            "options": options, "heldout": self.heldout, "shard_bytes": self.shard_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Shard:
    number: int
    source: int
    first: int
    last: int
    row: int
    """Of its first row, counted over all sources."""


@dataclass(frozen=True)
class TokenizePlan:
    """The same in every process."""

    job: TokenizeJob
    form: Form
    every: int
    """Every such document is held out; 0: none."""
    shards: tuple[Shard, ...]


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
Progress = Callable[[int, int, Tokenized], None]
"""(finished shards, all shards, what those hold)"""


def tokenize(job: TokenizeJob, out: Path, workers: int, progress: Progress) -> Tokenized:
    """Writes the shards that OUT lacks. Raises ConfigError for a wrong row, source or OUT."""
    key = job.key()
    _claim(out, key)
    plan = plan_of(job, job.place.open())
    done = {shard.number: found for shard in plan.shards if (found := _finished(out, shard)) is not None}
    total = sum(done.values(), Tokenized())
    progress(len(done), len(plan.shards), total)
    missing = [shard for shard in plan.shards if shard.number not in done]
    facts: TokenizerFacts | None = None
    for count, (found, written_by) in enumerate(_made(plan, missing, out, workers), len(done) + 1):
        total, facts = total + found, written_by
        progress(count, len(plan.shards), total)
    if not total.tokens:
        raise ConfigError(
            f"{job.source} gives no token to train on in {total.empty} rows.",
            "rows with text, or with an assistant's message; or --data.args.loss all",
        )
    facts = facts or TokenizerFacts.of(load_tokenizer(job.options.tokenizer))
    _write_manifest(out, plan, key, total, facts)
    return total


def plan_of(job: TokenizeJob, sources: list[SourceRows]) -> TokenizePlan:
    shards: list[Shard] = []
    row = 0
    for place, rows in enumerate(sources):
        first = 0
        for last in rows.cuts(job.shard_bytes):
            shards.append(Shard(len(shards), place, first, last, row + first))
            first = last
        row += rows.count
    every = max(2, min(round(1 / job.heldout), row)) if job.heldout and row > 1 else 0
    return TokenizePlan(job, form_of(_first_row(job, sources), job.options), every, tuple(shards))


def _first_row(job: TokenizeJob, sources: list[SourceRows]) -> SourceRow:
    for rows in sources:
        for row in rows.read(0, rows.count):
            return row
    raise ConfigError(f"{job.source} has no rows.", f"ls -l {job.source}")


# ---------------------------------------------------------------- OUT


def _claim(out: Path, key: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest = out / MANIFEST
        if manifest.is_file():
            begun = json.loads(manifest.read_text(encoding="utf-8"))
            if begun.get("key") != json.loads(json.dumps(key)):
                raise ConfigError(
                    f"{out} holds tokens of another source, tokenizer or other flags.",
                    f"another folder, or rm -r {out}",
                )
        elif any(out.iterdir()):
            raise ConfigError(f"{out} is not empty, and {MANIFEST} is not in it.", "a new folder")
        else:
            write_atomically(manifest, json.dumps({"key": key}) + "\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out} cannot be used: {error}.", "another folder") from None


def _write_manifest(
    out: Path, plan: TokenizePlan, key: dict[str, Any], total: Tokenized, tokenizer: TokenizerFacts
) -> None:
    names = [path.name for split in SPLITS for path in sorted(out.glob(f"{split}-*.bin"))]
    sums = [json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sha256"] for name in names]
    options = plan.job.options
    facts = {
        "key": key, "form": plan.form, "masked": masks(plan.form, options), "files": names,
        "fingerprint": hashlib.sha256("".join(sums).encode()).hexdigest()[:16],
        "vocab_size": tokenizer.vocab_size, "end": tokenizer.end, "tokenizer": options.tokenizer or "bytes",
        **asdict(total),
    }  # fmt: skip
    write_atomically(out / MANIFEST, json.dumps(facts) + "\n")


def _finished(out: Path, shard: Shard) -> Tokenized | None:
    try:
        return Tokenized(**json.loads((out / f"{shard.number:05d}.done").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# ---------------------------------------------------------------- one shard


def _made(plan: TokenizePlan, shards: list[Shard], out: Path, workers: int) -> Iterator[ShardResult]:
    if workers < 2 or len(shards) < 2:
        writer = ShardWriter(plan, out) if shards else None
        for shard in shards:
            assert writer is not None
            yield writer.write(shard)
        return
    pool = ProcessPoolExecutor(
        min(workers, len(shards)),
        mp_context=_context(plan.job.options),
        initializer=_start_worker,
        initargs=(plan, out, dict(os.environ)),
    )
    try:
        for one in as_completed([pool.submit(_write_in_worker, shard) for shard in shards]):
            found = one.result()
            if isinstance(found, ErrorParts):
                raise ConfigError(found.message, found.hint)
            yield found
    except BrokenProcessPool:
        raise ShardrunError(
            "a worker process died, as when memory runs out.",
            "the same command again keeps the finished shards; --workers 1 needs least memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class ErrorParts:
    """An error's two parts, to travel: a ShardrunError's arguments are not those of its constructor."""

    message: str
    hint: str | None


_writer: ShardWriter | ErrorParts | None = None


def _context(options: DocumentOptions) -> BaseContext:
    """Workers are forked by a server without threads, which imports once what each of them needs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__, *modules_of(options.tokenizer)])
    return found


def _start_worker(plan: TokenizePlan, out: Path, environ: dict[str, str]) -> None:
    global _writer
    os.environ.update(environ)  # the server's may be that of an earlier call
    try:
        _writer = ShardWriter(plan, out)
    except ShardrunError as error:
        _writer = _parts(error)


def _write_in_worker(shard: Shard) -> ShardResult | ErrorParts:
    assert _writer is not None
    if isinstance(_writer, ErrorParts):
        return _writer
    try:
        return _writer.write(shard)
    except ShardrunError as error:
        return _parts(error)


def _parts(error: ShardrunError) -> ErrorParts:
    return ErrorParts(str(error).partition(" HINT: ")[0], error.hint)


class ShardWriter:
    def __init__(self, plan: TokenizePlan, out: Path) -> None:
        self._plan, self._out = plan, out
        self._sources = plan.job.place.open()
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
                files["val" if every and n % every == every - 1 else "train"].add(document, self._dtype)
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
            file = self._open.pop(suffix)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._aside(suffix).replace(f"{self._stem}{suffix}")

    def close(self) -> None:
        for suffix, file in self._open.items():
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
    with path.open("rb") as file:
        count = INDEX_HEAD.unpack(file.read(INDEX_HEAD.size))[3]
    lengths = np.memmap(path, "<i4", "r", INDEX_HEAD.size, (count,))
    return lengths, np.memmap(path, "<i8", "r", INDEX_HEAD.size + 4 * count, (count,))

"""Token files from rows, written by parallel processes that can be killed and started again.

OUT holds, for each shard of the source, in the order of the rows:

    train-00000.bin         tokens, little-endian; val-00000.bin those of held-out documents
    train-00000.bin.json    its dtype, vocabulary, count and digest: the sidecar of --data.name tokens
    train-00000.idx         where its documents begin, in the form of Megatron's index
    train-00000.loss        a byte a token, 1 where it is a target; only if some are not
    00000.done              the shard is finished
    tokenize.json           what they were made from; a start with another source or tokenizer is refused

Which rows a shard holds depends on the source alone, so the files are the same for any number of processes.
A run tokenizes in a process of its own: a rank stays without a tokenizer's threads, which do not survive that
the launcher forks it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fsdp
from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.rundir.paths import replace_with, write_atomically
from fsdp.tokenize.conversations import Document, DocumentOptions, DocumentReader, Form, form_of, masks
from fsdp.tokenize.rows import MANIFEST, RowRange, Source, SourceRows, is_remote
from fsdp.tokenize.tokenizer import digest_of_tokenizer, load_tokenizer

VERSION = 4
"""Of the tokens: 2 has the tools of conversations, 3 no nulls of Parquet's in them, 4 weights of messages."""
SHARD_BYTES = 1 << 26
"""Of the source; a shard holds the rows of about so many bytes, and is written from memory."""
SPLITS = ("train", "val")
INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {"uint16": 8, "int32": 4}
PROGRESS_S = 30.0
Totals = Counter[str]
"""Of one shard, or of all: documents, tokens, and empty, the rows left out without a token to train on."""


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

    def find(self) -> Source:
        return Source(self.source, self.config, self.split)

    def key(self) -> dict[str, Any]:
        """Of the files' names, sizes and times, the tokenizer's files, and the options; as JSON has it."""
        source = self.find()
        held = [str(Path(file).absolute()) for file in source.held_out()]
        key = {
            "version": VERSION,
            "files": source.identity(),
            "heldout": self.heldout,
            "options": {**asdict(self.options), "tokenizer": digest_of_tokenizer(self.options.tokenizer)},
            "shard_bytes": self.shard_bytes,
            **({"held_out": held} if held else {}),
        }
        known: dict[str, Any] = json.loads(json.dumps(key))
        return known


@dataclass(frozen=True)
class Shard:
    number: int
    source: int
    part: RowRange
    row: int
    """Of its first row, counted over all sources."""
    held: bool
    """Of a file that is held out."""


@dataclass(frozen=True)
class TokenizePlan:
    job: TokenizeJob
    form: Form
    every: int
    """Every such document of the others is held out; 0: none."""


def tokenize(job: TokenizeJob, out: Path, workers: int) -> Totals:
    """Writes the shards that OUT lacks. Raises ConfigError for a wrong row, source or OUT."""
    key = job.key()
    _begin(out, key)
    try:
        source = job.find()
        plan, shards = plan_of(job, source.open(), source.open(held=True))
        missing = [shard for shard in shards if _finished(out, shard) is None]
        began, printed = time.monotonic(), 0.0
        for count, _ in enumerate(_write_shards(plan, missing, out, workers), 1):
            if time.monotonic() - printed > PROGRESS_S or count == len(missing):
                printed = time.monotonic()
                done = len(shards) - len(missing) + count
                line = f"tokenized {done}/{len(shards)} shards in {printed - began:.0f} s"
                print(line, file=sys.stderr, flush=True)
        total = sum((_finished(out, shard) or Totals() for shard in shards), Totals())
        if not total["tokens"]:
            raise ConfigError(
                f"{job.source} gives no token to train on in {total['empty']} rows.",
                "rows with text, or with an assistant's message; or --data.args.loss all",
            )
        if job.key()["files"] != key["files"]:
            # Lines of a file that changed may be of either content, or be missing.
            hint = "start again when nothing writes to it any more"
            raise ConfigError(f"{job.source} changed while it was tokenized.", hint)
        _write_manifest(out, plan, key, total)
    except ConfigError:
        if [path.name for path in out.iterdir()] == [MANIFEST]:  # OUT is left to a corrected command
            (out / MANIFEST).unlink()
            out.rmdir()
        raise
    return total


def plan_of(
    job: TokenizeJob, sources: Sequence[SourceRows], held_out: Sequence[SourceRows] = ()
) -> tuple[TokenizePlan, list[Shard]]:
    shards: list[Shard] = []
    row = 0
    readers = [*sources, *held_out]
    for number, rows in enumerate(readers):
        for part in rows.parts(job.shard_bytes):
            shards.append(Shard(len(shards), number, part, row, number >= len(sources)))
            row += part.rows
    by_rows = job.heldout and row > 1 and not held_out
    every = max(2, min(round(1 / job.heldout), row)) if by_rows else 0
    first_row = next((row for shard in shards for row in readers[shard.source].read(shard.part)), None)
    if first_row is None:
        raise ConfigError(f"{job.source} has no rows.", f"ls -l {shlex.quote(job.source)}")
    return TokenizePlan(job, form_of(first_row, job.options), every), shards


# ---------------------------------------------------------------- OUT


def _begin(out: Path, key: dict[str, Any]) -> None:
    manifest = out / MANIFEST
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not any(out.iterdir()):
            write_atomically(manifest, json.dumps({"key": key}) + "\n")
        if json.loads(manifest.read_text(encoding="utf-8"))["key"] == key:
            return
        problem = "holds tokens of another source, tokenizer or other flags"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"cannot be used: {error}"
    raise ConfigError(f"{out} {problem}.", "another folder")


def _write_manifest(out: Path, plan: TokenizePlan, key: dict[str, Any], total: Totals) -> None:
    names = [path.name for split in SPLITS for path in sorted(out.glob(f"{split}-*.bin"))]
    sums = [json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sha256"] for name in names]
    options = plan.job.options
    tokenizer = load_tokenizer(options.tokenizer)
    facts = {
        "key": key,
        "form": plan.form,
        "masked": masks(plan.form, options),
        "files": names,
        "fingerprint": hashlib.sha256("".join(sums).encode()).hexdigest()[:16],
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": options.tokenizer or "bytes",
        **{name: total[name] for name in ("documents", "tokens", "empty")},
    }
    write_atomically(out / MANIFEST, json.dumps(facts) + "\n")


def _finished(out: Path, shard: Shard) -> Totals | None:
    try:
        return Totals(json.loads((out / f"{shard.number:05d}.done").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


# ---------------------------------------------------------------- shards


def _write_shards(plan: TokenizePlan, shards: list[Shard], out: Path, workers: int) -> Iterator[Totals]:
    """Yields as a shard is finished: in this process, or by `workers` of them."""
    if workers < 2 or len(shards) < 2:
        for shard in shards:
            yield _write_shard(plan, out, shard)
        return
    # Forked by a server without threads, which imports once what each of them needs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *(["transformers"] if plan.job.options.tokenizer else [])])
    pool = ProcessPoolExecutor(min(workers, len(shards)), context, _set_environment, (dict(os.environ),))
    try:
        for written in as_completed([pool.submit(_write_shard, plan, out, shard) for shard in shards]):
            yield written.result()
    except BrokenProcessPool:
        raise ShardrunError(
            "a worker process died, as when memory runs out.",
            "the same command again keeps the finished shards; --workers 1 needs least memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _set_environment(environ: dict[str, str]) -> None:
    os.environ.update(environ)  # the server's may be that of an earlier call


@functools.lru_cache(1)
def _opened(plan: TokenizePlan) -> tuple[list[SourceRows], DocumentReader]:
    """Once a process."""
    source = plan.job.find()
    return [*source.open(), *source.open(held=True)], DocumentReader(plan.job.options, plan.form)


def _write_shard(plan: TokenizePlan, out: Path, shard: Shard) -> Totals:
    sources, reader = _opened(plan)
    vocab_size = reader.tokenizer.vocab_size
    dtype = np.dtype(np.int32 if vocab_size > 1 << 16 else np.uint16).newbyteorder("<")
    files = {split: SplitFiles(out / f"{split}-{shard.number:05d}", dtype) for split in SPLITS}
    total = Totals(documents=0, tokens=0, empty=0)
    rows = sources[shard.source].read(shard.part)
    for row, document in enumerate(reader.read_all(rows), shard.row):
        trained = document.trained
        if len(document.tokens) < 2 or (trained is not None and not trained[1:].any()):
            total["empty"] += 1
            continue
        held = shard.held or (plan.every and row % plan.every == plan.every - 1)
        files["val" if held else "train"].add(document)
        total.update(documents=1, tokens=len(document.tokens))
    try:
        for split_files in files.values():
            split_files.write(vocab_size)
        write_atomically(out / f"{shard.number:05d}.done", json.dumps(total) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}).", f"df -h {out}; then the same command"
        ) from None
    return total


class SplitFiles:
    """The tokens of one shard and split."""

    def __init__(self, stem: Path, dtype: np.dtype) -> None:
        self._stem, self._dtype = stem, dtype
        self._lengths: list[int] = []
        self._tokens, self._trained = bytearray(), bytearray()
        self._digest = hashlib.sha256()

    def add(self, document: Document) -> None:
        tokens = document.tokens.astype(self._dtype).tobytes()
        trained = b"" if document.trained is None else document.trained.tobytes()
        self._digest.update(trained + tokens)
        self._tokens += tokens
        self._trained += trained
        self._lengths.append(len(document.tokens))

    def write(self, vocab_size: int) -> None:
        """Leaves no file where there is no token."""
        if not self._lengths:
            return
        facts = {
            "dtype": self._dtype.name,
            "vocab_size": vocab_size,
            "tokens": sum(self._lengths),
            "documents": len(self._lengths),
            "sha256": self._digest.hexdigest(),
        }
        contents = {
            ".bin.json": json.dumps(facts).encode() + b"\n",
            ".loss": self._trained,
            ".bin": self._tokens,
            ".idx": index_bytes(self._lengths, self._dtype),
        }
        for suffix, content in contents.items():
            if content:
                replace_with(Path(f"{self._stem}{suffix}"), [bytes(content)])


def index_bytes(lengths: list[int], dtype: np.dtype) -> bytes:
    """Megatron's index: a sequence a document."""
    sizes = np.array(lengths, "<i4")
    starts = ((np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize).astype("<i8")
    head = INDEX_HEAD.pack(INDEX_MAGIC, 1, INDEX_DTYPES[dtype.name], len(sizes), len(sizes) + 1)
    return head + sizes.tobytes() + starts.tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()


def read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The documents' lengths in tokens, and their first bytes in the .bin file, mapped."""
    try:
        with path.open("rb") as file:
            count = INDEX_HEAD.unpack(file.read(INDEX_HEAD.size))[3]
        lengths = np.memmap(path, "<i4", "r", INDEX_HEAD.size, (count,))
        return lengths, np.memmap(path, "<i8", "r", INDEX_HEAD.size + 4 * count, (count,))
    except (OSError, ValueError, struct.error):
        raise ConfigError(f"{path} is missing or cut short.", "copy it again, or tokenize again") from None


# ---------------------------------------------------------------- for a run


def cores() -> int:
    return len(os.sched_getaffinity(0))


def key_of(job: TokenizeJob) -> Any:
    """job.key(), found by a child where the source needs a client's threads."""
    return json.loads(run_child(job)) if is_remote(job.source) else job.key()


def run_child(job: TokenizeJob, *out: str) -> str:
    """Tokenizes into OUT with a process per core; without OUT the child's last line is the key."""
    root = str(Path(fsdp.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "fsdp.tokenize", "--job", *out],
        input=json.dumps(asdict(job)),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    last, source = ended.stdout.strip().rpartition("\n")[2], shlex.quote(job.source)
    if ended.returncode == ConfigError.exit_code and last.startswith("["):
        raise ConfigError(*json.loads(last))
    if ended.returncode:
        killed = ended.returncode == -signal.SIGKILL
        reason = "was killed, as when memory runs out" if killed else f"ended with {ended.returncode}"
        raise ShardrunError(
            f"tokenizing {source} {reason}.",
            f"python -m fsdp.tokenize {source} tokens/ --workers 1 needs least memory and shows the error",
        )
    return last


def run_job(out: Sequence[str], fields: dict[str, Any]) -> int:
    """The child's part: tokenizes into OUT; without one it prints the key."""
    job = TokenizeJob(**{**fields, "options": DocumentOptions(**fields["options"])})
    try:
        if out:
            tokenize(job, Path(out[0]), cores())
        else:
            print(json.dumps(job.key()))
    except ShardrunError as error:
        print(json.dumps([without_hint(error), error.hint]))
        return error.exit_code
    return 0

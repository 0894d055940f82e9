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

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shlex
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fsdp
from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.base.text import counted
from fsdp.rundir.history import replace_with, write_atomically
from fsdp.tokenize.conversations import (
    EXAMPLE,
    Document,
    DocumentOptions,
    DocumentReader,
    Form,
    digest_of_tokenizer,
    form_of,
    load_tokenizer,
    untrained_reason,
)
from fsdp.tokenize.rows import MANIFEST, RowRange, Source, SourceRow, SourceRows

VERSION = 5
"""Of the tokens: 2 has the tools of conversations, 3 no nulls of Parquet's in them, 4 weights of messages, 5
contents in parts."""
SHARD_BYTES = 1 << 26
"""Of the source; a shard holds the rows of about so many bytes, and is written from memory."""
SPLITS = ("train", "val")
INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {"uint16": 8, "int32": 4}
Totals = Counter[str]
"""Of one shard, or of all: documents, tokens, and the rows left out: empty, without a token to train on, and
bad, which cannot be read.
"""
LEFT_OUT = {"empty": "row", "bad": "bad row"}
LISTED = 10
"""Rows left out whose place and reason are kept, of each kind."""


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
    bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be read end the job, or are left out. The tokens of the others are the same."""

    def find(self) -> Source:
        return Source(self.source, self.config, self.split)

    def key(self) -> dict[str, Any]:
        """Of the files' names, sizes and times, the tokenizer's files, and the options; as JSON has it."""
        source = self.find()
        key: dict[str, Any] = {
            "version": VERSION,
            "files": source.identity(),
            "heldout": self.heldout,
            "options": {**asdict(self.options), "tokenizer": digest_of_tokenizer(self.options.tokenizer)},
            "shard_bytes": self.shard_bytes,
        }
        if held := source.held_out():
            key["held_out"] = [str(Path(file).absolute()) for file in held]
        return key


@dataclass(frozen=True)
class Shard:
    job: TokenizeJob
    form: Form
    number: int
    source: int
    part: RowRange
    row: int
    """Of its first row, counted over all sources."""
    every: int
    """Every such document is held out: all of a source that is, or none (0) beside one."""


def tokenize(job: TokenizeJob, out: Path, workers: int) -> Totals:
    """Writes the shards that OUT lacks. Raises ConfigError for a wrong row, source or OUT."""
    key = json.loads(json.dumps(job.key()))
    _begin(out, key)
    shards = shards_of(job)
    missing = [shard for shard in shards if not _done(out, shard).is_file()]
    for count, _ in enumerate(_write_shards(missing, out, workers), 1):
        if 20 * count // len(missing) > 20 * (count - 1) // len(missing):  # every twentieth of them
            done = len(shards) - len(missing) + count
            print(f"tokenized {done}/{len(shards)} shards", file=sys.stderr, flush=True)
    ended = [json.loads(_done(out, shard).read_text()) for shard in shards]
    listed = [facts.pop("left_out", {}) for facts in ended]
    total = sum(map(Totals, ended), Totals())
    left_out: dict[str, dict[str, Any]] = {
        kind: {"count": total[kind], "rows": [row for rows in listed for row in rows.get(kind, ())][:LISTED]}
        for kind in LEFT_OUT
    }
    if not total["tokens"]:
        example = next((facts["rows"][0] for facts in reversed(left_out.values()) if facts["rows"]), "")
        reason = f"{job.source} gives no token to train on in {counted(total['empty'] + total['bad'], 'row')}"
        hint = "rows with text, or with an assistant's message; or --data.args.loss all"
        if not total["empty"]:
            hint = f"mend the rows, or --data.args.chat_template FILE; {EXAMPLE}"
        raise ConfigError(f"{reason}{example and f': {example}'}.", hint)
    check_bad_rows(job, left_out)
    if json.loads(json.dumps(job.find().identity())) != key["files"]:
        # Lines of a file that changed may be of either content, or be missing.
        hint = "start again when nothing writes to it any more"
        raise ConfigError(f"{job.source} changed while it was tokenized.", hint)
    names = [path.name for split in SPLITS for path in sorted(out.glob(f"{split}-*.bin"))]
    sums = [json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sha256"] for name in names]
    tokenizer, form = load_tokenizer(job.options.tokenizer), shards[0].form
    facts = {
        "key": key,
        "form": form,
        "masked": form != "text" and job.options.loss != "all",
        "files": names,
        "fingerprint": hashlib.sha256("".join(sums).encode()).hexdigest()[:16],
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": job.options.tokenizer or "bytes",
        "left_out": left_out,
    }
    write_atomically(out / MANIFEST, json.dumps(facts) + "\n")
    return total


def shards_of(job: TokenizeJob) -> list[Shard]:
    trained, held = job.find().open(), job.find().open(held=True)
    sources = [*trained, *held]
    parts = [(n, part) for n, source in enumerate(sources) for part in source.parts(job.shard_bytes)]
    firsts = np.cumsum([0, *(part.rows for _, part in parts)]).tolist()
    form = _form(job, (row for n, part in parts for row in sources[n].read(part)))
    rows = firsts[-1]
    by_rows = job.heldout and rows > 1 and not held
    every = max(2, min(round(1 / job.heldout), rows)) if by_rows else 0
    return [
        Shard(job, form, number, n, part, firsts[number], 1 if n >= len(trained) else every)
        for number, (n, part) in enumerate(parts)
    ]


def _form(job: TokenizeJob, rows: Iterator[SourceRow]) -> Form:
    """That of the first row that has one."""
    fault = ConfigError(f"{job.source} has no rows.", f"ls -l {shlex.quote(job.source)}")
    for count, row in enumerate(rows):
        try:
            return form_of(row, job.options)
        except ConfigError as error:
            if job.bad_rows == "stop":
                raise (skippable(error) if error is row.content else error) from None
            fault = fault if count else error
    raise fault


def skippable(error: ConfigError) -> ConfigError:
    return ConfigError(
        without_hint(error), f"{error.hint}; or --data.args.bad_rows skip leaves such rows out"
    )


def check_bad_rows(job: TokenizeJob, left_out: Mapping[str, Any]) -> None:
    """ConfigError where rows were left out by another start, and this one stops at them."""
    bad = left_out.get("bad", {"count": 0})
    if bad["count"] and job.bad_rows == "stop":
        raise skippable(ConfigError(f"{bad['rows'][0]} ({counted(bad['count'], 'bad row')}).", "mend it"))


def left_out_lines(left_out: Mapping[str, Any]) -> list[str]:
    """What is said of the rows left out, with the first of them."""
    lines = []
    for kind, noun in LEFT_OUT.items():
        facts = left_out.get(kind, {"count": 0, "rows": ()})
        count, rows = facts["count"], facts["rows"]
        if count:
            why = ", without a token to train on" if kind == "empty" else ""
            lines += [f"{counted(count, noun)} left out{why}:", *(f"  {row}" for row in rows)]
            lines += [f"  and {count - len(rows):,} more"] if count > len(rows) else []
    return lines


def _begin(out: Path, key: dict[str, Any]) -> None:
    manifest = out / MANIFEST
    try:
        out.mkdir(parents=True, exist_ok=True)
        if {path.name for path in out.iterdir()} <= {MANIFEST}:  # or begun by a command with a wrong flag
            write_atomically(manifest, json.dumps({"key": key}) + "\n")
        if json.loads(manifest.read_text(encoding="utf-8"))["key"] == key:
            return
        problem = "holds tokens of another source, tokenizer or other flags"
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"cannot be used: {error}"
    raise ConfigError(f"{out} {problem}.", "another folder")


def _done(out: Path, shard: Shard) -> Path:
    """Written last, with the shard's totals."""
    return out / f"{shard.number:05d}.done"


# ---------------------------------------------------------------- shards


def _write_shards(shards: list[Shard], out: Path, workers: int) -> Iterator[None]:
    """Yields as shards are finished: in this process, or by `workers` of them."""
    write = functools.partial(_write_shard, out)
    if workers < 2 or len(shards) < 2:
        yield from map(write, shards)
        return
    # Forked by a server without threads, which imports once what each of them needs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *(["transformers"] if shards[0].job.options.tokenizer else [])])
    try:
        with ProcessPoolExecutor(min(workers, len(shards)), context) as pool:
            yield from pool.map(write, shards)
    except BrokenProcessPool:
        raise ShardrunError(
            "a worker process died, as when memory runs out.",
            "the same command again keeps the finished shards; --workers 1 needs least memory",
        ) from None


@functools.lru_cache(1)
def _opened(job: TokenizeJob, form: Form) -> tuple[list[SourceRows], DocumentReader]:
    """Once a process."""
    source = job.find()
    return [*source.open(), *source.open(held=True)], DocumentReader(job.options, form)


def _write_shard(out: Path, shard: Shard) -> None:
    sources, reader = _opened(shard.job, shard.form)
    vocab_size, every = reader.tokenizer.vocab_size, shard.every
    dtype = np.dtype(np.int32 if vocab_size > 1 << 16 else np.uint16).newbyteorder("<")
    documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
    total, left_out = Totals(documents=0, tokens=0, empty=0, bad=0), {kind: list[str]() for kind in LEFT_OUT}
    for number, (row, document) in enumerate(
        reader.read_all(sources[shard.source].read(shard.part)), shard.row
    ):
        if isinstance(document, ConfigError):
            if shard.job.bad_rows == "stop":
                raise skippable(document)
            kind, reason = "bad", without_hint(document).rstrip(".")
        else:
            kind, reason = "empty", untrained_reason(row, document)
        if reason:
            total[kind] += 1
            line = reason if reason.startswith(row.place) else f"{row.place}: {reason}"
            left_out[kind] += [line] if len(left_out[kind]) < LISTED else []
            continue
        assert isinstance(document, Document)
        split = "val" if every and number % every == every - 1 else "train"
        documents[split].append(Document(document.tokens.astype(dtype), document.trained))
        total.update(documents=1, tokens=len(document.tokens))
    try:
        for split in SPLITS:
            _write_files(out / f"{split}-{shard.number:05d}", documents[split], dtype, vocab_size)
        write_atomically(_done(out, shard), json.dumps({**total, "left_out": left_out}) + "\n")
    except OSError as error:
        reason = f"{out} cannot be written ({error.strerror})."
        raise ConfigError(reason, f"df -h {out}; then the same command") from None


def _write_files(stem: Path, documents: list[Document], dtype: np.dtype, vocab_size: int) -> None:
    """The documents of one shard and split."""
    lengths, digest = [len(document.tokens) for document in documents], hashlib.sha256()
    losses = [b"" if document.trained is None else document.trained.tobytes() for document in documents]
    tokens = [document.tokens.tobytes() for document in documents]
    for content in itertools.chain.from_iterable(zip(losses, tokens, strict=True)):
        digest.update(content)
    facts = {
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "tokens": sum(lengths),
        "documents": len(lengths),
        "sha256": digest.hexdigest(),
    }
    contents = {
        ".bin.json": [json.dumps(facts).encode() + b"\n"],
        ".loss": losses if any(losses) else [],
        ".bin": tokens,
        ".idx": [index_bytes(lengths, dtype)],
    }
    for suffix, pieces in contents.items():
        if documents and pieces:
            replace_with(Path(f"{stem}{suffix}"), pieces)


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


def run_child(job: TokenizeJob, *out: str) -> Any:
    """Tokenizes into OUT with a process per core; without OUT the child returns the key of the job."""
    root, source = str(Path(fsdp.__file__).parents[1]), shlex.quote(job.source)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "fsdp.tokenize", "--job", *out],
        input=pickle.dumps(job),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    if ended.returncode:
        raise ShardrunError(
            f"tokenizing {source} ended with {ended.returncode}; -9: it was killed, as when memory runs out.",
            f"python -m fsdp.tokenize {source} tokens/ --workers 1 needs least memory and shows the error",
        )
    answer = pickle.loads(ended.stdout)
    if isinstance(answer, ShardrunError):
        raise answer
    return answer


def run_job(out: Sequence[str]) -> int:
    """The child's part, from stdin to stdout."""
    job: TokenizeJob = pickle.load(sys.stdin.buffer)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer: Any = tokenize(job, Path(out[0]), cores()) if out else job.key()
        except ShardrunError as error:
            answer = error
    pickle.dump(answer, sys.stdout.buffer)
    return 0

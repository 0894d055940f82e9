"""documents: rows of files, here or in a store, or of a data set of Hugging Face, tokenized on first use. Or
a folder of fsdp.tokenize.

Text is one row of tokens, each document ended by the tokenizer's end token, split into windows of seq_len. A
conversation, or a prompt and its completion, is a sample of its own: cut at seq_len, padded, and masked
(-100) where it is not trained on. Either may be packed, several a sample (packing.py). Not here: how a file
becomes tokens (fsdp/tokenize).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.data.packing import GROUP, VERSION, PackedSamples, cached_plan
from fsdp.data.tokens import OPEN_AT_ONCE, TokenFile, TokenRow, format_of, raw_file, split_windows
from fsdp.data.types import MASKED, DataSet, Samples, Where, check_range, shifted, text_info
from fsdp.models.packed import PACKED
from fsdp.tokenize.conversations import DocumentOptions, Loss, template_text
from fsdp.tokenize.rows import MANIFEST, digest, held_out_line, is_remote, made_once
from fsdp.tokenize.shards import SPLITS, TokenizeJob, read_index, run_child
from fsdp.tokenize.tokenizer import BYTES, digest_of_tokenizer

log = logging.getLogger(__name__)
HELD_OUT = 0.01
RowForm = Literal["auto", "stream", "document", "packed"]


def build(
    where: Where,
    *,
    text: str = "",
    loss: Loss = "assistant",
    chat_template: str = "",
    rows: RowForm = "auto",
    heldout: float = HELD_OUT,
    config: str = "",
    split: str = "",
) -> DataSet:
    check_range("heldout", heldout, 0, 0.5)
    if not where.dir:
        raise ConfigError(
            "--data.name documents needs files in --data.dir.", "--data.dir FILE, FOLDER or 'PATTERN'"
        )
    folder = Path(where.dir)
    tokenized = (folder / MANIFEST).is_file()
    if not tokenized:
        options = DocumentOptions(where.tokenizer, text, loss, template_text(chat_template))
        folder = _tokenized(TokenizeJob(where.dir, options, heldout, config=config, split=split))
    store = TokenStore(folder)
    held_out = store.key.get("held_out", ())
    if held_out:
        log.info("documents: %s", held_out_line(held_out))
    if rows == "auto":
        rows = "document" if store.form != "text" else "stream"
    parts = store.rows("train"), store.rows("val")
    joins = rows == "stream" and not held_out and len(parts[1]) <= where.seq_len
    """Too few documents are held out for a window: some of all windows are."""
    if tokenized:
        unused = joins or heldout in (HELD_OUT, store.key.get("heldout"))
        flags = {
            "args.text": text,
            "args.loss": "" if loss == "assistant" else loss,
            "args.config": config,
            "args.split": split,
            "args.chat_template": chat_template,
            "tokenizer": where.tokenizer,
            "args.heldout": "" if unused else heldout,
        }
        _check_no_effect(where, store, flags)
    facts, version = dict[str, Any](), str(rows)
    samples: Sequence[Samples]
    if rows == "stream":
        if joins:
            parts = TokenRow([*parts[0].files, *parts[1].files], store.vocab_size), TokenRow([], 2)
        samples = split_windows(*parts, where, heldout, store.trained)
    else:
        alone = [DocumentSamples(store, split, where.seq_len) for split in SPLITS]
        _check_lengths(where, *alone, counted=store.masked or rows == "document")
        samples = alone
        if rows == "packed":
            facts, version = {PACKED: True}, f"packed {VERSION}"
            samples = [store.packed(split, where.seq_len) for split in SPLITS]
    train, held = samples
    tokenizer = where.tokenizer or store.tokenizer
    if tokenizer != BYTES:
        facts["tokenizer"] = tokenizer
    fingerprint = hashlib.sha256(f"{store.fingerprint} {version} {heldout}".encode()).hexdigest()[:16]
    info = text_info(
        where,
        store.vocab_size,
        fingerprint,
        facts,
        masks_targets=store.masked or rows != "stream",
        default_steps=1000 if rows == "stream" else 0,
        default_epochs=0 if rows == "stream" else 1,
        preprocess={"tokenizer": tokenizer, "end": store.end},
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def _tokenized(job: TokenizeJob) -> Path:
    """The folder in the cache. The first rank of a node makes it, the others wait."""

    def make(aside: Path) -> None:
        log.info("documents: tokenizing %s into %s, once", job.source, aside.parent)
        run_child(job, str(aside))

    # A client's threads stay in the child.
    key = run_child(job) if is_remote(job.source) else job.key()
    return made_once("tokens", key, make)


def _check_no_effect(where: Where, store: TokenStore, flags: dict[str, Any]) -> None:
    """For a folder that is tokenized: its manifest has what made it."""
    for flag, value in flags.items():
        known = store.key.get("options", {}).get("tokenizer")
        if value and not (flag == "tokenizer" and digest_of_tokenizer(value) == known):
            raise ConfigError(
                f"--data.{flag} {value} has no effect: {where.dir} holds tokens already.",
                f"leave it out, or python -m fsdp.tokenize SOURCE OUT --{flag.rpartition('.')[2]} {value}",
            )


class TokenStore:
    """A folder of fsdp.tokenize."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if not isinstance(facts, dict):
                raise ValueError(f"it holds a {type(facts).__name__}")
            if "files" not in facts:
                raise ConfigError(
                    f"{folder} is not finished.", f"python -m fsdp.tokenize SOURCE {folder}, as it began"
                )
            self.files = [folder / Path(name).name for name in facts["files"]]
            self.form, self.masked, self.tokenizer = facts["form"], facts["masked"], facts["tokenizer"]
            self.vocab_size, self.end = int(facts["vocab_size"]), int(facts["end"])
            self.fingerprint: str = facts["fingerprint"]
            self.key: dict[str, Any] = dict(facts.get("key", {}))
            """What the command that made it was asked for."""
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{folder / MANIFEST} cannot be read: {error}.", "tokenize again") from None

    def rows(self, split: str) -> TokenRow:
        files = []
        for path in (path for path in self.files if path.name.startswith(f"{split}-")):
            documents = len(read_index(path.with_suffix(".idx"))[0])
            file = raw_file(path, format_of(path), "auto", self.vocab_size)
            files.append(dataclasses.replace(file, documents=documents))
        return TokenRow(files, self.vocab_size)

    def trained(self, row: TokenRow) -> TokenRow | None:
        """1 for each token that is a target, of .loss files; None if all are."""
        return TokenRow([_loss_file(file) for file in row.files], 2) if self.masked else None

    def packed(self, split: str, seq_len: int) -> PackedSamples:
        row = self.rows(split)
        counts = [file.documents for file in row.files]

        def lengths() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            log.info("documents, %s: packing %s documents once", split, f"{sum(counts):,}")
            before = 0
            for file in row.files:
                sizes, starts = read_index(file.path.with_suffix(".idx"))
                for first in range(0, len(sizes), GROUP):
                    group = slice(first, first + GROUP)
                    yield starts[group] // file.dtype.itemsize + before, sizes[group]
                before += file.tokens

        key = {"tokens": self.fingerprint, "documents": digest(np.cumsum(counts).tolist()), "split": split}
        plan = cached_plan(key, lengths, seq_len, "split" if self.form == "text" else "cut")
        if len(plan.ends):
            log.info("documents, %s: %s", split, plan.describe(seq_len))
        return PackedSamples(plan, row, self.trained(row), self.end, seq_len)


def _loss_file(file: TokenFile) -> TokenFile:
    path = file.path.with_suffix(".loss")
    if not path.is_file() or path.stat().st_size != file.tokens:
        raise ConfigError(f"{path} does not have a byte for each of {file.tokens} tokens.", "copy it again")
    return TokenFile(path, np.dtype(np.uint8), 0, file.tokens)


def _check_lengths(where: Where, train: DocumentSamples, held: DocumentSamples, *, counted: bool) -> None:
    if not len(train):
        raise ConfigError(f"{where} has no document to train on.", "--data.args.heldout 0, or more rows")
    if not counted:
        return
    parts, documents = [train.cut(), held.cut()], len(train) + len(held)
    cut, untrained = (sum(part[n] for part in parts) for n in (0, 1))
    if cut:
        log.info(
            "documents: %s of %s are cut at --data.seq_len %d", f"{cut:,}", f"{documents:,}", where.seq_len
        )
    if untrained:
        problem = f"have no token to train on within --data.seq_len {where.seq_len}"
        hint = f"--data.seq_len {max(part[2] for part in parts) - 1} holds the longest"
        if untrained == documents:
            raise ConfigError(f"{where}: all {documents:,} documents {problem}.", hint)
        log.warning("documents: %s of %s %s. HINT: %s", f"{untrained:,}", f"{documents:,}", problem, hint)


class DocumentSamples:
    """A document a sample, from its first token; what is behind its end is padding and masked."""

    def __init__(self, store: TokenStore, split: str, seq_len: int) -> None:
        self._row, self._end, self._seq_len = store.rows(split), store.end, seq_len
        self._loss, self._files = store.trained(self._row), self._row.files
        self._ends = np.cumsum([file.documents for file in self._files], dtype=np.int64)
        self._index: Callable[[int], tuple[np.ndarray, np.ndarray]] = functools.lru_cache(OPEN_AT_ONCE)(
            lambda number: read_index(self._files[number].path.with_suffix(".idx"))
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cut(self) -> tuple[int, int, int]:
        """Documents that are longer than a sample, those of them without a target in it, and the tokens of
        the longest. A file at a time.
        """
        cut, untrained, longest = 0, 0, 0
        for number, file in enumerate(self._files):
            lengths, starts = read_index(file.path.with_suffix(".idx"))
            longer = np.flatnonzero(lengths > self._seq_len + 1)
            cut, longest = cut + len(longer), max(longest, int(lengths.max()))
            if self._loss is not None and len(longer):
                first = starts[longer] // file.dtype.itemsize + 1
                trained = self._loss.files[number].open()
                targets = np.add.reduceat(trained, np.ravel((first, first + self._seq_len), "F"), dtype=int)
                untrained += int((targets[::2] == 0).sum())
        return cut, untrained, longest

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        tokens = np.full((len(indices), self._seq_len + 1), self._end, np.int64)
        trained = np.zeros((len(indices), self._seq_len + 1), np.bool_)
        firsts = [self._read(int(index), *row) for index, *row in zip(indices, tokens, trained, strict=True)]
        self._row.check(tokens, lambda line: firsts[line])
        batch = shifted(tokens)
        return {**batch, "targets": batch["targets"].masked_fill(~torch.from_numpy(trained[:, 1:]), MASKED)}

    def _read(self, index: int, tokens: np.ndarray, trained: np.ndarray) -> int:
        """Returns the place of the document's first token in the row of all."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, (lengths, starts) = self._files[number], self._index(number)
        n = index - int(self._ends[number] - len(lengths))
        first = int(starts[n]) // file.dtype.itemsize + int(self._row.ends[number]) - file.tokens
        count = min(int(lengths[n]), len(tokens))
        self._row.read_into(tokens[:count], first)
        trained[:count] = True
        if self._loss is not None:
            self._loss.read_into(trained[:count], first)
        return first

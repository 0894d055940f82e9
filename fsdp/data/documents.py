"""documents: rows of .jsonl, .json, .parquet or .txt files, here or in a store, or of a data set of
Hugging Face; tokenized on first use. Or a folder of fsdp.tokenize.

Text is one row of tokens, each document ended by the tokenizer's end token, split into windows of seq_len. A
conversation, or a prompt and its completion, is a sample of its own: cut at seq_len, padded, and masked
(-100) where it is not trained on. Either may be packed, several a sample (packing.py). Not here: how a file
becomes tokens (fsdp/tokenize).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError, TrainingError
from fsdp.data.arguments import Where, check_range
from fsdp.data.next_token import shifted
from fsdp.data.packing import GROUP, VERSION, Long, PackedSamples, cached_plan
from fsdp.data.token_file import TokenFile, document_ends, ends_of
from fsdp.data.tokens import OPEN_AT_ONCE, TokenRow, Windows
from fsdp.data.types import DataInfo, DataSet, Samples
from fsdp.models.checks import PACKED
from fsdp.tokenize.cache import digest, made_once
from fsdp.tokenize.child import key_of, tokenize_in_child
from fsdp.tokenize.documents import DocumentOptions, Loss, template_text
from fsdp.tokenize.locate import notes_on
from fsdp.tokenize.shard_files import read_index
from fsdp.tokenize.shard_plan import TokenizeJob
from fsdp.tokenize.source_names import MANIFEST
from fsdp.tokenize.split_names import held_out_line
from fsdp.tokenize.tokenizer import BYTES, digest_of_tokenizer

log = logging.getLogger(__name__)
MASKED = -100
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
    if (folder / MANIFEST).is_file():
        _check_nothing_to_tokenize(where, TokenStore.open(folder), text, loss, chat_template, config, split)
    else:
        options = DocumentOptions(where.tokenizer, text, loss, template_text(chat_template))
        folder = _tokenized(TokenizeJob(where.dir, options, heldout, config=config, split=split))
    store = TokenStore.open(folder)
    if store.held_out:
        log.info("documents: %s", held_out_line(store.held_out))
    if rows == "auto":
        rows = "document" if store.form != "text" else "stream"
    asked = folder == Path(where.dir) and heldout not in (HELD_OUT, store.key.get("heldout"))
    if asked and not (rows == "stream" and store.joins(where)):
        raise _without_effect(where, "--data.args.heldout", f"{heldout:g}")
    facts: dict[str, Any] = {"vocab_size": store.vocab_size, "seq_len": where.seq_len}
    version: str = rows
    if rows == "packed":
        train, held = store.packed(where)
        facts, version = {**facts, PACKED: True}, f"packed {VERSION}"
    else:
        train, held = store.documents(where) if rows == "document" else store.windows(where, heldout)
    tokenizer = where.tokenizer or store.tokenizer
    if tokenizer != BYTES:
        facts["tokenizer"] = tokenizer
    own = hashlib.sha256(f"{store.fingerprint} {version} {heldout}".encode()).hexdigest()[:16]
    info = DataInfo(
        kind="text",
        facts={**facts, "fingerprint": own},
        tokens_per_sample=where.seq_len,
        masks_targets=store.masked or rows != "stream",
        default_steps=1000 if rows == "stream" else 0,
        default_epochs=0 if rows == "stream" else 1,
        preprocess={"tokenizer": tokenizer, "end": store.end},
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def _check_nothing_to_tokenize(
    where: Where, store: TokenStore, text: str, loss: str, chat_template: str, config: str, split: str
) -> None:
    given = {
        "--data.args.text": text,
        "--data.args.loss": loss if loss != "assistant" else "",
        "--data.args.chat_template": chat_template,
        "--data.args.config": config,
        "--data.args.split": split,
        "--data.tokenizer": where.tokenizer,
    }
    for flag, value in given.items():
        same = (
            flag == "--data.tokenizer"
            and value
            and digest_of_tokenizer(value) == store.key.get("options", {}).get("tokenizer")
        )
        if value and not same:
            raise _without_effect(where, flag, value)


def _without_effect(where: Where, flag: str, value: str) -> ConfigError:
    what = "tokens of another tokenizer" if flag == "--data.tokenizer" else "tokens already"
    return ConfigError(
        f"{flag} {value} has no effect: {where.dir} holds {what}.",
        f"leave it out, or python -m fsdp.tokenize SOURCE OUT --{flag.rpartition('.')[2]} {value}",
    )


def _tokenized(job: TokenizeJob) -> Path:
    """The folder in the cache. The first rank of a node makes it, the others wait."""

    def make(aside: Path) -> None:
        log.info("documents: tokenizing %s into %s, once", job.source, aside.parent)
        for line in notes_on(job.source):
            log.warning("documents: %s", line)
        tokenize_in_child(job, aside)

    return made_once("tokens", key_of(job), make)


@dataclass(frozen=True)
class TokenStore:
    """A folder of fsdp.tokenize."""

    folder: Path
    form: str
    masked: bool
    files: tuple[str, ...]
    vocab_size: int
    end: int
    tokenizer: str
    fingerprint: str
    key: dict[str, Any]
    """What the command that made it was asked for."""

    @staticmethod
    def open(folder: Path) -> TokenStore:
        names = ("form", "masked", "files", "vocab_size", "end", "tokenizer", "fingerprint")
        try:
            facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            known = {name: facts[name] for name in names}
            key = facts.get("key", {})
        except KeyError:
            raise ConfigError(
                f"{folder} is not finished.",
                f"python -m fsdp.tokenize SOURCE {folder}, the command that began it",
            ) from None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{folder / MANIFEST} cannot be read: {error}.", "tokenize again") from None
        files = tuple(str(name) for name in known.pop("files"))
        if wrong := next((name for name in files if name != Path(name).name), None):
            raise ConfigError(f"{folder / MANIFEST} names a file elsewhere, {wrong}.", "tokenize again")
        return TokenStore(folder=folder, files=files, **known, key=key if isinstance(key, dict) else {})

    @property
    def held_out(self) -> list[str]:
        """The files that are held out by their names."""
        return [str(file) for file in self.key.get("held_out", ())]

    # ------------------------------------------------------------ one row of tokens

    def joins(self, where: Where) -> bool:
        """Whether too few documents are held out for a window: `windows` then holds out some of all."""
        return not self.held_out and len(TokenRow(self._of("val"), self.vocab_size)) <= where.seq_len

    def windows(self, where: Where, heldout: float) -> tuple[Samples, Samples]:
        train, val = self._of("train"), self._of("val")
        if self.joins(where):
            train, val = [*train, *val], []
        rows = [self._windows(part, where.seq_len) for part in (train, val)]
        (row, count), (_, held) = rows
        spared = 0 if val else int(np.ceil(count * heldout))
        if count - spared < 1:
            raise ConfigError(
                f"{where} has {len(row.row)} tokens to train on: not one sample of --data.seq_len "
                f"{where.seq_len} and {spared} held out.",
                f"--data.seq_len {max(1, (len(row.row) - 1) // 4)}, or more text",
            )
        if val and not held:
            log.warning(
                "documents: %d tokens are held out, not one sample of --data.seq_len %d: nothing is "
                "evaluated. HINT: --data.seq_len %d",
                len(rows[1][0].row),
                where.seq_len,
                max(1, len(rows[1][0].row) - 1),
            )
        return row.part(0, count - spared), rows[1][0].part(0, held) if val else row.part(
            count - spared, spared
        )

    def _windows(self, files: Sequence[TokenFile], seq_len: int) -> tuple[MaskedRow, int]:
        row = TokenRow(files, self.vocab_size)
        loss = TokenRow(self._losses(files), 2) if self.masked else None
        return MaskedRow(row, loss, seq_len), max(0, (len(row) - 1) // seq_len)

    # ------------------------------------------------------------ a sample a document

    def documents(self, where: Where) -> tuple[Samples, Samples]:
        parts = self._parts(where.seq_len)
        if not len(parts[0]):
            raise ConfigError(f"{where} has no document to train on.", "--data.args.heldout 0, or more rows")
        cut = self._cut(parts, where.seq_len)
        if cut.documents:
            log.info(
                "documents: %s of %s are cut at --data.seq_len %d",
                f"{cut.documents:,}",
                f"{len(parts[0]) + len(parts[1]):,}",
                where.seq_len,
            )
        _check_targets(where, cut, sum(map(len, parts)))
        return parts[0], parts[1]

    def _parts(self, seq_len: int) -> list[DocumentSamples]:
        return [
            DocumentSamples(files, self._losses(files), self.vocab_size, self.end, seq_len)
            for files in (self._of("train"), self._of("val"))
        ]

    # ------------------------------------------------------------ several documents a sample

    def packed(self, where: Where) -> tuple[Samples, Samples]:
        train, held = (self._packed(split, where.seq_len) for split in ("train", "val"))
        if not len(train):
            raise ConfigError(f"{where} has no document to train on.", "--data.args.heldout 0, or more rows")
        if self.masked:
            parts = self._parts(where.seq_len)
            _check_targets(where, self._cut(parts, where.seq_len), sum(map(len, parts)))
        return train, held

    def _packed(self, split: str, seq_len: int) -> PackedSamples:
        files = self._of(split)
        ends = document_ends(files)
        key = {"tokens": self.fingerprint, "documents": digest(ends.tolist())}

        def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            log.info(
                "documents, %s: packing %s documents once, %s at a time in memory",
                split,
                f"{int(ends[-1]) if len(ends) else 0:,}",
                f"{GROUP:,}",
            )
            before = 0
            for file in files:
                lengths, starts = read_index(file.path.with_suffix(".idx"))
                for at in range(0, len(lengths), GROUP):
                    here = slice(at, at + GROUP)
                    yield starts[here] // file.dtype.itemsize + before, lengths[here]
                before += file.tokens

        long: Long = "split" if self.form == "text" else "cut"
        plan = cached_plan({**key, "split": split}, documents, seq_len, long)
        if len(plan.ends):
            log.info("documents, %s: %s", split, plan.facts.describe(seq_len, long))
        loss = TokenRow(self._losses(files), 2) if self.masked else None
        return PackedSamples(plan, TokenRow(files, self.vocab_size), loss, self.end, seq_len)

    def _cut(self, parts: list[DocumentSamples], seq_len: int) -> CutDocuments:
        """What `DocumentSamples.cut` counts, once a machine: it reads every length."""

        def make(aside: Path) -> None:
            cut, untrained, longest = zip(*(part.cut() for part in parts), strict=True)
            aside.write_text(json.dumps([sum(cut), sum(untrained), max(longest)]))

        return CutDocuments(*json.loads(made_once("cut", [2, self.fingerprint, seq_len], make).read_text()))

    # ------------------------------------------------------------ files

    def _of(self, split: str) -> list[TokenFile]:
        return [self._file(self.folder / name) for name in self.files if name.startswith(f"{split}-")]

    def _losses(self, files: Sequence[TokenFile]) -> Sequence[TokenFile]:
        """The .loss files of a split; none if every token is trained on."""
        return [self._loss(file) for file in files] if self.masked else []

    def _file(self, path: Path) -> TokenFile:
        try:
            said: dict[str, Any] = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
            dtype, tokens = np.dtype(said["dtype"]).newbyteorder("<"), int(said["tokens"])
            size = path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} or its sidecar cannot be read: {error}.", "tokenize again") from None
        if size != tokens * dtype.itemsize:
            raise ConfigError(
                f"{path} has {size} bytes, but {path.name}.json gives {tokens} tokens of {dtype.name}.",
                "copy it again",
            )
        documents = said.get("documents")
        if not isinstance(documents, int):
            documents = len(read_index(path.with_suffix(".idx"))[0])
        return TokenFile(path, dtype, 0, tokens, documents=documents)

    def _loss(self, file: TokenFile) -> TokenFile:
        path = file.path.with_suffix(".loss")
        if not path.is_file() or path.stat().st_size != file.tokens:
            raise ConfigError(
                f"{path} does not have a byte for each of {file.tokens} tokens.", "copy it again"
            )
        return TokenFile(path, np.dtype(np.uint8), 0, file.tokens)


class CutDocuments(NamedTuple):
    """Documents that are longer than a sample, those of them without a target in it, and the tokens of the
    longest.
    """

    documents: int
    untrained: int
    longest: int


def _check_targets(where: Where, cut: CutDocuments, documents: int) -> None:
    if not cut.untrained:
        return
    what = f"have no token to train on within --data.seq_len {where.seq_len}"
    hint = f"--data.seq_len {cut.longest - 1} holds the longest"
    if cut.untrained == documents:
        raise ConfigError(f"{where}: all {documents:,} documents {what}.", hint)
    log.warning("documents: %s of %s %s. HINT: %s", f"{cut.untrained:,}", f"{documents:,}", what, hint)


class MaskedRow:
    """A row of tokens, and which of them are targets."""

    def __init__(self, row: TokenRow, loss: TokenRow | None, seq_len: int) -> None:
        self.row, self.loss, self.seq_len = row, loss, seq_len

    def part(self, first: int, count: int) -> Samples:
        windows = Windows(self.row, first, count, self.seq_len)
        if self.loss is None:
            return windows
        return MaskedWindows(windows, Windows(self.loss, first, count, self.seq_len))


class MaskedWindows:
    def __init__(self, tokens: Windows, loss: Windows) -> None:
        self.tokens, self.loss = tokens, loss

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        batch = self.tokens.batch(indices)
        trained = self.loss.batch(indices)["targets"] == 1
        return {**batch, "targets": batch["targets"].masked_fill(~trained, MASKED)}


class DocumentSamples:
    """A document a sample, from its first token; what is behind its end is padding and masked."""

    def __init__(
        self, files: Sequence[TokenFile], loss: Sequence[TokenFile], vocab_size: int, end: int, seq_len: int
    ) -> None:
        self.files, self.loss = files, loss
        self.vocab_size, self.end, self.seq_len = vocab_size, end, seq_len
        self._index: Callable[[int], tuple[np.ndarray, np.ndarray]] = functools.lru_cache(OPEN_AT_ONCE)(
            lambda place: read_index(files[place].path.with_suffix(".idx"))
        )
        self._ends, self._token_ends = document_ends(files), ends_of(files)
        self._tokens, self._trained = TokenRow(files, vocab_size), TokenRow(loss, 2)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cut(self) -> CutDocuments:
        """A part of a file at a time."""
        cut, untrained, longest = 0, 0, 0
        for place, file in enumerate(self.files):
            lengths, starts = read_index(file.path.with_suffix(".idx"))
            loss = self.loss[place].open() if self.loss else None
            for at in range(0, len(lengths), GROUP):
                part = lengths[at : at + GROUP]
                longer = np.flatnonzero(part > self.seq_len + 1)
                cut, longest = cut + len(longer), max(longest, int(part.max()))
                if loss is not None and len(longer):
                    first = starts[at : at + GROUP][longer] // file.dtype.itemsize + 1
                    targets = np.add.reduceat(loss, np.ravel((first, first + self.seq_len), "F"), dtype=int)
                    untrained += int((targets[::2] == 0).sum())
        return CutDocuments(cut, untrained, longest)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        tokens = np.full((len(indices), self.seq_len + 1), self.end, np.int64)
        trained = np.zeros((len(indices), self.seq_len + 1), np.bool_)
        for row, index in enumerate(indices):
            self._read(int(index), tokens[row], trained[row])
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            raise TrainingError(
                f"{self.files[0].path.parent} has a token outside its vocabulary of {self.vocab_size}.",
                "tokenize again",
            )
        batch = shifted(tokens)
        return {**batch, "targets": batch["targets"].masked_fill(~torch.from_numpy(trained[:, 1:]), MASKED)}

    def _read(self, index: int, tokens: np.ndarray, trained: np.ndarray) -> None:
        place = int(np.searchsorted(self._ends, index, side="right"))
        file, (lengths, starts) = self.files[place], self._index(place)
        n = index - int(self._ends[place] - len(lengths))
        first = int(starts[n]) // file.dtype.itemsize
        first += int(self._token_ends[place]) - file.tokens
        count = min(int(lengths[n]), len(tokens))
        self._tokens.read_into(tokens[:count], first)
        trained[:count] = True
        if self.loss:
            self._trained.read_into(trained[:count], first)

"""documents: rows of files, or of a data set of Hugging Face, tokenized on first use. Or a folder of
fsdp.tokenize.

Text is one row of tokens, each document ended by the tokenizer's end token, split into windows of seq_len. A
conversation, or a prompt and its completion, is a sample of its own: cut at seq_len, padded, and masked
(-100) where it is not trained on.

Either may be packed into rows of seq_len: best-fit decreasing, in groups of 2²⁰ pieces. A document of n
tokens takes n - 1 places, its inputs. The targets are the tokens after them: none crosses into another
document, and none is lost. A text longer than a row is split: each piece begins where the last one ended,
with positions from 0. Conversations and pairs are cut at a row's length: a later piece would lack its
question. Groups keep the documents of a row near each other on the disk. The rows follow from the lengths and
seq_len alone, and each rank computes them: 10⁶ made-up documents (log-normal lengths: median 300, sigma 1.2)
take 1.1 s; in rows of 2,048 0.0007 % is padding (in the order of the documents 18.6 %, in a row a document
74.8 %).

Not here: how a file becomes tokens (fsdp/tokenize), attention within a document (fsdp/models/attention.py).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdp.base.errors import ConfigError
from fsdp.base.text import counted
from fsdp.data.tokens import TokenFile, TokenRow, format_of, raw_file, split_windows
from fsdp.data.types import MASKED, DataSet, Samples, Where, check_range, text_info
from fsdp.models.registry import PACKED, POSITIONS
from fsdp.tokenize.conversations import BYTES, DocumentOptions, Loss, digest_of_tokenizer, template_text
from fsdp.tokenize.rows import MANIFEST, PREFIX, held_out_line, made_once
from fsdp.tokenize.shards import (
    SPLITS,
    TokenizeJob,
    check_bad_rows,
    left_out_lines,
    read_index,
    run_child,
)

log = logging.getLogger(__name__)
HELD_OUT = 0.01
VERSION = 1
"""Of the packing, in the fingerprint."""
GROUP = 1 << 20
FLAGS = ("tokenizer", "text", "loss", "chat_template", "config", "split", "bad_rows")
"""Those that make tokens."""
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
    bad_rows: Literal["stop", "skip"] = "stop",
) -> DataSet:
    """
    text: column of a row's text; empty: messages, prompt and completion, or text
    loss: what of a conversation is trained on: assistant, last (its last turn) or all
    chat_template: file with a chat template, in place of the tokenizer's
    rows: stream (windows of all text), document (one a row), packed (several a row); auto: by the form
    heldout: part of the documents that is held out
    config: configuration of hf:NAME
    split: split of hf:NAME; empty: train
    bad_rows: rows that cannot be read: stop, or skip (they are counted, and the first listed)
    """
    check_range("heldout", heldout, 0, 0.5)
    if not where.dir:
        reason = "--data.name documents needs files in --data.dir."
        raise ConfigError(reason, "--data.dir FILE, FOLDER or 'PATTERN'")
    options = DocumentOptions(where.tokenizer, text, loss, template_text(chat_template))
    job = TokenizeJob(where.dir, options, heldout, config=config, split=split, bad_rows=bad_rows)
    store = open_store(job)
    tokenized = store.folder == Path(where.dir)
    if left_out := left_out_lines(store.left_out):
        log.info("documents: %s", "\n".join(left_out))
    held_out = store.key.get("held_out", ())
    if held_out:
        log.info("documents: %s", held_out_line(held_out))
    if rows == "auto":
        rows = "document" if store.form != "text" else "stream"
    train_row, val_row = store.rows.values()
    joins = rows == "stream" and not held_out and len(val_row) <= where.seq_len
    """Too few documents are held out for a window: some of all windows are."""
    if tokenized:
        store.check_unused(job, heldout=not joins)
    if joins:
        train_row, val_row = TokenRow([*train_row.files, *val_row.files], store.vocab_size), TokenRow([], 2)
    facts, version = dict[str, Any](), str(rows)
    train: Samples
    held: Samples
    if rows == "stream":
        train, held = split_windows(train_row, val_row, where, heldout, store.trained)
    else:
        if not train_row.files:
            raise ConfigError(f"{where} has no document to train on.", "--data.args.heldout 0, or more rows")
        if store.masked or rows == "document":
            _check_lengths(where, store)
        if rows == "packed":
            facts, version = {PACKED: True}, f"packed {VERSION}"
        train, held = (DocumentRows(store, split, where.seq_len, rows == "packed") for split in SPLITS)
    tokenizer = where.tokenizer or store.tokenizer
    preprocess = {"tokenizer": tokenizer, "end": store.end}
    if store.form == "messages":  # of a mixture the first conversations' is exported
        preprocess["chat_template"] = store.key.get("options", {}).get("chat_template", "")
    if store.form != "text":
        preprocess["form"] = store.form
        if store.masked and rows != "stream":
            preprocess["questions"] = True
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
        preprocess=preprocess,
    )
    return DataSet(train=train, heldout=held if len(held) else None, info=info)


def open_store(job: TokenizeJob) -> TokenStore:
    """That of a folder of fsdp.tokenize, or of rows, tokenized on first use."""
    tokenized = (Path(job.source) / MANIFEST).is_file()
    store = TokenStore(Path(job.source) if tokenized else _tokenized(job))
    if not tokenized:
        check_bad_rows(job, store.left_out)
    return store


def _tokenized(job: TokenizeJob) -> Path:
    """The folder in the cache. The first rank of a node makes it, the others wait."""

    def make(aside: Path) -> None:
        log.info("documents: tokenizing %s into %s, once", job.source, aside.parent)
        run_child(job, str(aside))

    # The threads of the package datasets stay in the child.
    return made_once("tokens", run_child(job) if job.source.startswith(PREFIX) else job.key(), make)


class TokenStore:
    """A folder of fsdp.tokenize."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            self.key: dict[str, Any] = dict(facts["key"])
            """What the command that made it was asked for."""
            files = [folder / Path(name).name for name in facts["files"]]
            self.form, self.masked, self.tokenizer = facts["form"], facts["masked"], facts["tokenizer"]
            self.vocab_size, self.end = int(facts["vocab_size"]), int(facts["end"])
            self.fingerprint: str = facts["fingerprint"]
            self.left_out: dict[str, Any] = dict(facts.get("left_out", {}))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{folder / MANIFEST} cannot be read, or is not finished: {error!r}.",
                f"python -m fsdp.tokenize SOURCE {folder}, as it began; or tokenize again",
            ) from None
        self.rows = {split: self._row(p for p in files if p.name.startswith(f"{split}-")) for split in SPLITS}

    @property
    def files(self) -> list[TokenFile]:
        return [file for row in self.rows.values() for file in row.files]

    def _row(self, paths: Iterable[Path]) -> TokenRow:
        files = [raw_file(path, format_of(path), "auto", self.vocab_size) for path in paths]
        return TokenRow(files, self.vocab_size)

    def trained(self, row: TokenRow) -> TokenRow | None:
        """1 for each token that is a target, of .loss files; None if all are."""
        return TokenRow([loss_file(file) for file in row.files], 2) if self.masked else None

    def check_unused(self, job: TokenizeJob, *, heldout: bool) -> None:
        """ConfigError for a flag that would have made other tokens; `heldout` where it has no other use."""
        plain = TokenizeJob("")
        defaults, flags = ({**vars(jobs), **asdict(jobs.options)} for jobs in (plain, job))
        made = {**self.key.get("options", {}), "heldout": self.key.get("heldout")}
        if flags["tokenizer"]:
            flags["tokenizer"] = digest_of_tokenizer(flags["tokenizer"])
        for name in (*FLAGS, *["heldout"] * heldout):
            if flags[name] not in (defaults[name], made.get(name)):
                raise ConfigError(
                    f"--data.{name if name == 'tokenizer' else f'args.{name}'} has no effect: {self.folder} "
                    "holds tokens already.",
                    f"leave it out, or python -m fsdp.tokenize SOURCE OUT --{name.replace('_', '-')} VALUE",
                )


def loss_file(file: TokenFile) -> TokenFile:
    path = file.path.with_suffix(".loss")
    if not path.is_file() or path.stat().st_size != file.tokens:
        raise ConfigError(f"{path} does not have a byte for each of {file.tokens} tokens.", "copy it again")
    return TokenFile(path, np.dtype(np.uint8), 0, file.tokens)


def documents_in(file: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens and the lengths of the documents of a file."""
    lengths, starts = read_index(file.path.with_suffix(".idx"))
    return starts // file.dtype.itemsize, lengths.astype(np.int64)


class Lengths(NamedTuple):
    tokens: np.ndarray
    """Of each document."""
    untrained: int
    """Documents that are cut at a number of tokens, without a target within them."""

    def cut(self, seq_len: int) -> int:
        return int((self.tokens > seq_len + 1).sum())


def lengths_of(store: TokenStore, seq_len: int) -> Lengths:
    tokens, untrained = [np.empty(0, np.int64)], 0
    for file in store.files:
        starts, lengths = documents_in(file)
        longer = np.flatnonzero(lengths > seq_len + 1)
        tokens.append(lengths)
        if store.masked and len(longer):
            ends = np.ravel((starts[longer] + 1, starts[longer] + 1 + seq_len), "F")
            targets = np.add.reduceat(loss_file(file).open(), ends, dtype=int)
            untrained += int((targets[::2] == 0).sum())
    return Lengths(np.concatenate(tokens), untrained)


def _check_lengths(where: Where, store: TokenStore) -> None:
    """Counts the documents that are longer than a sample, and those of them without a target in it."""
    lengths = lengths_of(store, where.seq_len)
    documents, untrained = len(lengths.tokens), lengths.untrained
    if cut := lengths.cut(where.seq_len):
        log.info("documents: %d of %d are cut at --data.seq_len %d", cut, documents, where.seq_len)
    if untrained:
        problem = f"have no token to train on within --data.seq_len {where.seq_len}"
        hint = f"--data.seq_len {int(lengths.tokens.max()) - 1} holds the longest"
        if untrained == documents:
            raise ConfigError(f"{where}: all {documents:,} documents {problem}.", hint)
        log.info("documents: %s of %s %s. HINT: %s", f"{untrained:,}", f"{documents:,}", problem, hint)


class DocumentRows:
    """Rows of a document; or packed, of several, with positions that start again at 0 in each. The padding
    behind them is masked.
    """

    def __init__(self, store: TokenStore, split: str, seq_len: int, packed: bool) -> None:
        self._tokens = store.rows[split]
        self._loss, self._end, self._seq_len = store.trained(self._tokens), store.end, seq_len
        self._packed, splits = packed, packed and store.form == "text"
        parts = (pieces_of(*part, seq_len, splits) for part in self._parts())
        self._pieces, self._ends = in_rows(parts, seq_len if packed else 0)
        filled = np.append(0, np.cumsum(self._pieces.width))[self._ends]
        self._filled = np.diff(filled, prepend=0) / seq_len
        """Each row's part that is no padding."""
        if len(self):
            rows = counted(len(self), "packed row" if packed else "row")
            padding = self.padding_share(slice(None))
            log.info("documents, %s: %s of %d: %.2f%% padding", split, rows, seq_len, 100 * padding)

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, file in enumerate(self._tokens.files):
            (starts, lengths), before = documents_in(file), int(self._tokens.ends[number]) - file.tokens
            for first in range(0, len(lengths), GROUP):
                yield starts[first : first + GROUP] + before, lengths[first : first + GROUP]

    def __len__(self) -> int:
        return len(self._ends)

    def padding_share(self, indices: np.ndarray | slice) -> float:
        """The part of these rows that is padding."""
        return 1.0 - float(self._filled[indices].mean())

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        shape = (len(indices), self._seq_len)
        inputs, targets = np.full(shape, self._end, np.int64), np.full(shape, MASKED, np.int64)
        positions = np.empty(shape, np.int64)
        for n, index in enumerate(indices):
            self._read(int(index), inputs[n], targets[n], positions[n])
        arrays = {"inputs": inputs, "targets": targets, **({POSITIONS: positions} if self._packed else {})}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, index: int, inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray) -> None:
        filled = 0
        row = slice(int(self._ends[index - 1]) if index else 0, int(self._ends[index]))
        firsts, widths = self._pieces.first[row].tolist(), self._pieces.width[row].tolist()
        for first, width in zip(firsts, widths, strict=True):
            tokens = np.empty(width + 1, np.int64)
            self._tokens.read_into(tokens, first)
            self._tokens.check(tokens[None], lambda _, first=first: first)  # type: ignore[misc]
            piece = slice(filled, filled + width)
            inputs[piece], targets[piece], positions[piece] = tokens[:-1], tokens[1:], np.arange(width)
            if not self._packed:  # its last token too, whose target is masked
                inputs[width : width + 1] = tokens[-1]
            if self._loss is not None:
                trained = np.empty(width, np.uint8)
                self._loss.read_into(trained, first + 1)
                targets[piece][trained == 0] = MASKED
            filled += width
        positions[filled:] = np.arange(self._seq_len - filled)


# ---------------------------------------------------------------- packed rows


class Pieces(NamedTuple):
    """Documents or parts of them: their first token in the row of all tokens, and the places they take."""

    first: np.ndarray
    width: np.ndarray


def pieces_of(starts: np.ndarray, lengths: np.ndarray, seq_len: int, splits: bool) -> Pieces:
    """`starts` and `lengths` of documents in tokens, each of two or more; longer ones are split, or cut."""
    places = lengths - 1
    if not splits:
        return Pieces(starts, np.minimum(places, seq_len))
    parts = -(-places // seq_len)
    document = np.repeat(np.arange(len(places)), parts)
    before = (np.arange(len(document)) - (np.cumsum(parts) - parts)[document]) * seq_len
    return Pieces(starts[document] + before, np.minimum(places[document] - before, seq_len))


def in_rows(parts: Iterable[Pieces], room: int) -> tuple[Pieces, np.ndarray]:
    """The pieces in the order of rows with `room` places, and the number of pieces up to each row's end; with
    room 0 each piece is a row.
    """
    groups, ends, count = [Pieces(np.empty(0, np.int64), np.empty(0, np.int64))], [np.empty(0, np.int64)], 0
    for group in _grouped(parts):
        row_of = best_fit(group.width, room) if room else np.arange(len(group.first))
        by_row = np.argsort(row_of, kind="stable")
        groups.append(Pieces(group.first[by_row], group.width[by_row]))
        ends.append(count + np.cumsum(np.bincount(row_of)))
        count += len(by_row)
    return _joined(groups), np.concatenate(ends)


def _grouped(parts: Iterable[Pieces]) -> Iterator[Pieces]:
    """Parts are joined up to a group, so that small files leave no row half empty each."""
    waiting: list[Pieces] = []
    for part in itertools.chain(parts, [None]):
        waiting += [part] if part is not None else []
        if waiting and (part is None or sum(len(pieces.first) for pieces in waiting) >= GROUP):
            yield _joined(waiting)
            waiting = []


def _joined(parts: Iterable[Pieces]) -> Pieces:
    return Pieces(*map(np.concatenate, zip(*parts, strict=True)))


def best_fit(widths: np.ndarray, room: int) -> np.ndarray:
    """The row of each piece, by best-fit decreasing: the longest piece first, into the fullest row with room.

    Pieces of one width, and rows with the same room left, are handled together.
    """
    # numpy sorts 16 bits by their digits, five times as fast as wider numbers.
    order = np.argsort(widths.astype(np.uint16) if room < 1 << 16 else widths, kind="stable")[::-1]
    counts = np.bincount(widths, minlength=room + 1)
    row_of = np.empty(len(widths), np.int64)
    rooms: list[int] = []  # the room left in open rows, ascending
    rows: dict[int, list[np.ndarray]] = {}

    def leave(ids: np.ndarray, left: int) -> None:
        if left and len(ids):
            if left not in rows:
                bisect.insort(rooms, left)
            rows.setdefault(left, []).append(ids)

    placed = made = 0
    for width in np.flatnonzero(counts)[::-1].tolist():
        missing = int(counts[width])
        while missing:
            nearest = bisect.bisect_left(rooms, width)
            if nearest == len(rooms):
                free = room
                ids = np.arange(made, made + -(-missing // (free // width)))
                made += len(ids)
            else:
                free = rooms.pop(nearest)
                ids = np.concatenate(rows.pop(free))
            each = free // width
            used = min(len(ids), -(-missing // each))
            count = min(missing, used * each)
            last = count - (used - 1) * each
            row_of[order[placed : placed + count]] = np.repeat(ids[:used], each)[:count]
            leave(ids[: used - 1], free - each * width)
            leave(ids[used - 1 : used], free - last * width)
            leave(ids[used:], free)
            placed, missing = placed + count, missing - count
    return row_of

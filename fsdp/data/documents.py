"""documents: rows of files, here or in a store, or of a data set of Hugging Face, tokenized on first use. Or
a folder of fsdp.tokenize.

Text is one row of tokens, each document ended by the tokenizer's end token, split into windows of seq_len. A
conversation, or a prompt and its completion, is a sample of its own: cut at seq_len, padded, and masked
(-100) where it is not trained on.

Either may be packed into rows of seq_len: best-fit decreasing, in groups of 2²⁰ pieces. A document of n
tokens takes n - 1 places, its inputs. The targets are the tokens after them: none crosses into another
document, and none is lost. A text longer than a row is split: each piece begins where the last one ended,
with positions from 0. Conversations and pairs are cut at a row's length: a later piece would lack its
question. Groups bound the memory at any number of documents, and keep the documents of a row near each other
on the disk. A plan follows from the lengths and seq_len alone, and is cached beside the tokens: 10⁶ made-up
documents (log-normal lengths: median 300, sigma 1.2) take 1.1 s; in rows of 2,048 0.0007 % is padding (in the
order of the documents 18.6 %, in a row a document 74.8 %).

Not here: how a file becomes tokens (fsdp/tokenize), attention within a document (fsdp/models/packed.py).
"""

from __future__ import annotations

import bisect
import functools
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
from fsdp.data.tokens import OPEN_AT_ONCE, TokenFile, TokenRow, format_of, raw_file, split_windows
from fsdp.data.types import MASKED, DataSet, Samples, Where, check_range, text_info
from fsdp.models.registry import PACKED, POSITIONS
from fsdp.tokenize.conversations import DocumentOptions, Loss, template_text
from fsdp.tokenize.rows import MANIFEST, digest, held_out_line, is_remote, made_once
from fsdp.tokenize.shards import SPLITS, TokenizeJob, read_index, run_child
from fsdp.tokenize.tokenizer import BYTES, digest_of_tokenizer

log = logging.getLogger(__name__)
HELD_OUT = 0.01
VERSION = 1
"""Of a packing plan."""
GROUP = 1 << 20
RowForm = Literal["auto", "stream", "document", "packed"]
Long = Literal["split", "cut"]
"""What happens to a document that is longer than a row."""
Lengths = Iterable[tuple[np.ndarray, np.ndarray]]
"""(starts, lengths) of documents in tokens, at most GROUP documents at a time."""


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
    options = DocumentOptions(where.tokenizer, text, loss, template_text(chat_template))
    job = TokenizeJob(where.dir, options, heldout, config=config, split=split)
    tokenized = (Path(where.dir) / MANIFEST).is_file()
    store = TokenStore(Path(where.dir) if tokenized else _tokenized(job))
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
        _check_lengths(where, store, counted=store.masked or rows == "document")
        if rows == "packed":
            facts, version = {PACKED: True}, f"packed {VERSION}"
        train, held = (DocumentRows(store, split, where.seq_len, rows == "packed") for split in SPLITS)
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
    return made_once("tokens", run_child(job) if is_remote(job.source) else job.key(), make)


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
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{folder / MANIFEST} cannot be read, or is not finished: {error!r}.",
                f"python -m fsdp.tokenize SOURCE {folder}, as it began; or tokenize again",
            ) from None
        self.rows = {split: self._row(p for p in files if p.name.startswith(f"{split}-")) for split in SPLITS}

    def _row(self, paths: Iterable[Path]) -> TokenRow:
        files = [raw_file(path, format_of(path), "auto", self.vocab_size) for path in paths]
        return TokenRow(files, self.vocab_size)

    def trained(self, row: TokenRow) -> TokenRow | None:
        """1 for each token that is a target, of .loss files; None if all are."""
        return TokenRow([_loss_file(file) for file in row.files], 2) if self.masked else None

    def check_unused(self, job: TokenizeJob, *, heldout: bool) -> None:
        """ConfigError for a flag that would have made other tokens; `heldout` where it has no other use."""
        plain, made = TokenizeJob(""), {**self.key.get("options", {}), "heldout": self.key.get("heldout")}
        for name, value in {**asdict(job.options), **asdict(job)}.items():
            known = digest_of_tokenizer(value) if name == "tokenizer" and value else value
            default = getattr(plain, name, getattr(plain.options, name, None))
            if name in ("source", "options") or known in (default, made.get(name)):
                continue
            if heldout or name != "heldout":
                flag = "tokenizer" if name == "tokenizer" else f"args.{name}"
                value = "FILE" if name == "chat_template" else value
                raise ConfigError(
                    f"--data.{flag} {value} has no effect: {self.folder} holds tokens already.",
                    f"leave it out, or python -m fsdp.tokenize SOURCE OUT --{name.replace('_', '-')} {value}",
                )


def _loss_file(file: TokenFile) -> TokenFile:
    path = file.path.with_suffix(".loss")
    if not path.is_file() or path.stat().st_size != file.tokens:
        raise ConfigError(f"{path} does not have a byte for each of {file.tokens} tokens.", "copy it again")
    return TokenFile(path, np.dtype(np.uint8), 0, file.tokens)


def _index(file: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    """The documents' lengths in tokens, and their first bytes."""
    return read_index(file.path.with_suffix(".idx"))


def _check_lengths(where: Where, store: TokenStore, *, counted: bool) -> None:
    """Counts the documents that are longer than a sample, and those of them without a target in it."""
    if not store.rows["train"].files:
        raise ConfigError(f"{where} has no document to train on.", "--data.args.heldout 0, or more rows")
    if not counted:
        return
    documents = cut = untrained = longest = 0
    for file in (file for row in store.rows.values() for file in row.files):
        lengths, starts = _index(file)
        longer = np.flatnonzero(lengths > where.seq_len + 1)
        documents, cut = documents + len(lengths), cut + len(longer)
        longest = max(longest, int(lengths.max()))
        if store.masked and len(longer):
            first = starts[longer] // file.dtype.itemsize + 1
            ends = np.ravel((first, first + where.seq_len), "F")
            targets = np.add.reduceat(_loss_file(file).open(), ends, dtype=int)
            untrained += int((targets[::2] == 0).sum())
    if cut:
        log.info("documents: %d of %d are cut at --data.seq_len %d", cut, documents, where.seq_len)
    if untrained:
        problem = f"have no token to train on within --data.seq_len {where.seq_len}"
        hint = f"--data.seq_len {longest - 1} holds the longest"
        if untrained == documents:
            raise ConfigError(f"{where}: all {documents:,} documents {problem}.", hint)
        log.warning("documents: %s of %s %s. HINT: %s", f"{untrained:,}", f"{documents:,}", problem, hint)


class DocumentRows:
    """Rows of a document; or packed, of several, with positions that start again at 0 in each. The padding
    behind them is masked.
    """

    def __init__(self, store: TokenStore, split: str, seq_len: int, packed: bool) -> None:
        self._tokens = store.rows[split]
        self._loss, self._end, self._seq_len = store.trained(self._tokens), store.end, seq_len
        self._files = files = self._tokens.files
        self._ends = np.cumsum([len(_index(file)[0]) for file in files], dtype=np.int64)
        self._index = functools.lru_cache(OPEN_AT_ONCE)(lambda number: _index(files[number]))
        self._plan: PackingPlan | None = None
        if packed:
            documents = digest(self._ends.tolist())
            key = {"tokens": store.fingerprint, "documents": documents, "split": split, "seq_len": seq_len}
            long: Long = "split" if store.form == "text" else "cut"
            known = {**key, "version": VERSION, "group": GROUP, "long": long}
            self._plan = PackingPlan(
                made_once("packing", known, lambda aside: write_plan(aside, self._lengths(), seq_len, long))
            )
            log.info("documents, %s: %s", split, self._plan.describe(seq_len))

    def _lengths(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, file in enumerate(self._files):
            (lengths, starts), before = self._index(number), int(self._tokens.ends[number]) - file.tokens
            for first in range(0, len(lengths), GROUP):
                group = slice(first, first + GROUP)
                yield starts[group] // file.dtype.itemsize + before, lengths[group]

    def __len__(self) -> int:
        ends = self._ends if self._plan is None else self._plan.ends
        return len(ends) if self._plan is not None else int(ends[-1]) if len(ends) else 0

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        shape = (len(indices), self._seq_len)
        inputs, targets = np.full(shape, self._end, np.int64), np.full(shape, MASKED, np.int64)
        positions = np.empty(shape, np.int64)
        for n, index in enumerate(indices):
            self._read(int(index), inputs[n], targets[n], positions[n])
        arrays = {"inputs": inputs, "targets": targets}
        if self._plan is not None:
            arrays[POSITIONS] = positions
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, index: int, inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray) -> None:
        filled = 0
        for first, width in [self._document(index)] if self._plan is None else self._plan.row(index):
            tokens = np.empty(width + 1, np.int64)
            self._tokens.read_into(tokens, first)
            self._tokens.check(tokens[None], lambda _, first=first: first)  # type: ignore[misc]
            piece = slice(filled, filled + width)
            inputs[piece], targets[piece], positions[piece] = tokens[:-1], tokens[1:], np.arange(width)
            if self._plan is None:  # its last token too, whose target is masked
                inputs[width : width + 1] = tokens[-1]
            if self._loss is not None:
                trained = np.empty(width, np.uint8)
                self._loss.read_into(trained, first + 1)
                targets[piece][trained == 0] = MASKED
            filled += width
        positions[filled:] = np.arange(self._seq_len - filled)

    def _document(self, index: int) -> tuple[int, int]:
        """Its first token in the row of all, and the places that it takes."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, (lengths, starts) = self._files[number], self._index(number)
        n = index - int(self._ends[number] - len(lengths))
        first = int(starts[n]) // file.dtype.itemsize + int(self._tokens.ends[number]) - file.tokens
        return first, min(int(lengths[n]) - 1, self._seq_len)


# ---------------------------------------------------------------- the plan of packed rows


class Pieces(NamedTuple):
    """Documents or parts of them: their first token in the row of all tokens, and the places they take."""

    first: np.ndarray
    width: np.ndarray


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
            place = bisect.bisect_left(rooms, width)
            if place == len(rooms):
                free = room
                ids = np.arange(made, made + -(-missing // (free // width)))
                made += len(ids)
            else:
                free = rooms.pop(place)
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


def pieces_of(starts: np.ndarray, lengths: np.ndarray, seq_len: int, long: Long) -> Pieces:
    """`starts` and `lengths` of documents in tokens; one without a target has no piece."""
    whole = lengths.astype(np.int64) - 1
    starts, whole = starts[whole > 0], whole[whole > 0]
    if long == "cut":
        return Pieces(starts, np.minimum(whole, seq_len))
    parts = -(-whole // seq_len)
    document = np.repeat(np.arange(len(whole)), parts)
    before = (np.arange(len(document)) - (np.cumsum(parts) - parts)[document]) * seq_len
    return Pieces(starts[document] + before, np.minimum(whole[document] - before, seq_len))


class PackingPlan:
    """The pieces of every row, mapped: row r has those from ends[r - 1] to ends[r]."""

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, int] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.pieces = Pieces(_mapped(folder / "first", "<i8"), _mapped(folder / "width", "<i4"))
        self.ends = _mapped(folder / "ends", "<i8")

    def row(self, index: int) -> Iterator[tuple[int, int]]:
        """(first token, places) of each piece."""
        begin, end = (int(self.ends[index - 1]) if index else 0), int(self.ends[index])
        firsts, widths = self.pieces.first[begin:end], self.pieces.width[begin:end]
        return zip(firsts.tolist(), widths.tolist(), strict=True)

    def describe(self, seq_len: int) -> str:
        documents, rows, filled = (self.facts[name] for name in ("documents", "rows", "filled"))
        padding = 100 * (1 - filled / max(1, rows * seq_len))
        return f"{documents:,} documents packed into {rows:,} rows of {seq_len}: {padding:.2f} % padding"


def write_plan(folder: Path, documents: Lengths, seq_len: int, long: Long) -> None:
    folder.mkdir(exist_ok=True)
    facts = dict.fromkeys(("documents", "pieces", "rows", "filled"), 0)

    def pieces() -> Iterator[Pieces]:
        for starts, lengths in documents:
            facts["documents"] += int((lengths > 1).sum())
            yield pieces_of(np.asarray(starts), np.asarray(lengths), seq_len, long)

    with (
        (folder / "first").open("wb") as firsts,
        (folder / "width").open("wb") as widths,
        (folder / "ends").open("wb") as ends,
    ):
        # Files are joined up to a group, so that small ones leave no row half empty each.
        for group in grouped(pieces(), GROUP):
            row_of = best_fit(group.width, seq_len)
            by_row = np.argsort(row_of, kind="stable")
            firsts.write(group.first[by_row].astype("<i8").tobytes())
            widths.write(group.width[by_row].astype("<i4").tobytes())
            in_rows = np.bincount(row_of)
            ends.write((facts["pieces"] + np.cumsum(in_rows)).astype("<i8").tobytes())
            facts["rows"] += len(in_rows)
            facts["pieces"] += len(group.first)
            facts["filled"] += int(group.width.sum())
    (folder / "facts.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def grouped(parts: Iterable[Pieces], at_least: int) -> Iterator[Pieces]:
    """Consecutive parts joined to so many pieces or more; the last group may be smaller."""
    waiting: list[Pieces] = []
    for part in itertools.chain(parts, [None]):
        if part is not None:
            waiting.append(part)
        if waiting and (part is None or sum(len(pieces.first) for pieces in waiting) >= at_least):
            yield Pieces(*map(np.concatenate, zip(*waiting, strict=True)))
            waiting = []


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """A file of little-endian numbers, mapped; it may be empty."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

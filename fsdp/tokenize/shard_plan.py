"""What tokens follow from, and which rows of the source each shard holds. The same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.tokenize.documents import DocumentOptions, Form, form_of
from fsdp.tokenize.locate import SourceName
from fsdp.tokenize.rows import SourceRow, SourceRows
from fsdp.tokenize.source_names import is_remote
from fsdp.tokenize.tokenizer import digest_of_tokenizer

VERSION = 4
"""Of the tokens: 2 has the tools of conversations, 3 no nulls of Parquet's in them, 4 weights of messages."""
SHARD_BYTES = 1 << 26
"""Of the source; a shard holds the rows of about so many bytes."""


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
        held = [one if is_remote(one) else str(Path(one).absolute()) for one in self.place.held_out()]
        return {
            "version": VERSION, "files": self.place.identity(),
            "options": options, "heldout": self.heldout, "shard_bytes": self.shard_bytes,
            **({"held_out": held} if held else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Shard:
    number: int
    source: int
    first: int
    last: int
    row: int
    """Of its first row, counted over all sources."""
    held: bool
    """Of a file that is held out."""


@dataclass(frozen=True)
class TokenizePlan:
    """The same in every process."""

    job: TokenizeJob
    form: Form
    every: int
    """Every such document of the others is held out; 0: none."""
    shards: tuple[Shard, ...]


def plan_of(job: TokenizeJob, sources: list[SourceRows], held_out: Sequence[SourceRows] = ()) -> TokenizePlan:
    shards: list[Shard] = []
    row = 0
    for place, rows in enumerate([*sources, *held_out]):
        first = 0
        for last in rows.cuts(job.shard_bytes):
            shards.append(Shard(len(shards), place, first, last, row + first, place >= len(sources)))
            first = last
        row += rows.count
    by_rows = job.heldout and row > 1 and not held_out
    every = max(2, min(round(1 / job.heldout), row)) if by_rows else 0
    return TokenizePlan(job, form_of(_first_row(job, sources), job.options), every, tuple(shards))


def _first_row(job: TokenizeJob, sources: list[SourceRows]) -> SourceRow:
    for rows in sources:
        for row in rows.read(0, rows.count):
            return row
    raise ConfigError(f"{job.source} has no rows.", f"ls -l {job.source}")

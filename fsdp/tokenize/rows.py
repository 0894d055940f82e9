"""A row of a source, and the rows of a file by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class SourceRow:
    place: str
    """The file and the line, as messages name it."""
    values: Mapping[str, Any]
    """By column."""


class SourceRows(Protocol):
    """A file's rows."""

    count: int

    def read(self, first: int, last: int) -> Iterator[SourceRow]: ...

    def cuts(self, size: int) -> list[int]:
        """Rows at which the file may be cut into parts of about `size` bytes; the last is `count`."""
        ...

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


def without_nulls(value: Any) -> Any:
    """A value of a column of Arrow, whose objects all have the keys of each other: a null is a key that the
    row was written without, such as another tool's argument, and a chat template would write it.
    """
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return value

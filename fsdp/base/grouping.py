"""Items of an iterator in lists of about one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def grouped(items: Iterable[Item], size: Callable[[Item], int], at_least: int) -> Iterator[list[Item]]:
    """Lists of consecutive items whose sizes add up to `at_least` or more; the last one may be smaller."""
    waiting: list[Item] = []
    total = 0
    for item in items:
        waiting.append(item)
        total += size(item)
        if total >= at_least:
            yield waiting
            waiting, total = [], 0
    if waiting:
        yield waiting

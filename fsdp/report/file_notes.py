"""Notes about files that could not be read, one line per file, and checks of the numbers in files.

A run directory may come from anyone, and a kill can truncate any line: no file's content makes the report
raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp.base.text import counted

LARGEST = 1e15
"""Steps, seconds, bytes and counts are below it."""
UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)
"""Raised when a value is not of the form that the recorder writes."""


class Notes:
    """Lines for the head of the page, in the order they were added."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lost: Counter[str] = Counter()

    def add(self, text: str) -> None:
        self._texts.append(text)

    def lost(self, name: str) -> None:
        """One line of this file was left out."""
        self._lost[name] += 1

    @contextmanager
    def left_out(self, name: str) -> Iterator[None]:
        """Around the reading of one line of this file: a line that raises is left out."""
        try:
            yield
        except UNREADABLE:
            self.lost(name)

    @property
    def lines(self) -> tuple[str, ...]:
        lines = (
            f"left out: {counted(count, 'line')} of {name} that could not be read"
            for name, count in self._lost.items()
        )
        return (*self._texts, *lines)


def number(value: Any, most: float = LARGEST) -> float:
    """A finite number; ValueError for anything else, booleans included."""
    if type(value) not in (int, float) or not abs(value) < most:
        raise ValueError(f"{value!a:.40} is not a number below {most:g}")
    return float(value)


def integer(value: Any) -> int:
    return int(number(value))

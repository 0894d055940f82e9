"""What could not be read of a run's files, said once a file on the page; and the numbers that a file may
hold.

A run directory may be anybody's, and a kill may have cut off any line: no reader of the report raises over
what a file holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LARGEST = 1e15
"""Steps, seconds, bytes and counts lie below it."""
ODD = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a value of another form than the recorder writes raises where it is read."""


class Notes:
    """Lines for the head of the page, in the order in which they came."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._lost: Counter[str] = Counter()

    def say(self, text: str) -> None:
        self._said.append(text)

    def lost(self, name: str) -> None:
        """One line of this file was left out."""
        self._lost[name] += 1

    @contextmanager
    def left_out(self, name: str) -> Iterator[None]:
        """A line of this file: what raises within is of another form, and is left out."""
        try:
            yield
        except ODD:
            self.lost(name)

    @property
    def lines(self) -> tuple[str, ...]:
        counted = (
            f"left out: {count} line{'s' * (count > 1)} of {name} that could not be read"
            for name, count in self._lost.items()
        )
        return (*self._said, *counted)


def number(value: Any, most: float = LARGEST) -> float:
    """A finite number, or ValueError. true is none."""
    if type(value) not in (int, float) or not abs(value) < most:
        raise ValueError(f"{value!a:.40} is not a number below {most:g}")
    return float(value)


def whole(value: Any) -> int:
    return int(number(value))

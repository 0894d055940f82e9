"""metrics.jsonl as series of numbers, and their thinning for charts.

Thinning keeps the lowest, highest and mean value of each bucket, so a spike of one step stays visible.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.text import counted
from fsdp.rundir.line_files import read_lines

BUCKETS = 360
LARGEST = 1e100
"""Larger values are treated as not finite: sums of smaller ones stay finite."""
LARGEST_COUNT = 1e15
"""Steps, seconds, bytes and counts are below it."""
UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)
"""Raised when a value is not of the form that the recorder writes."""
GROUPED = ("step", "steps")
"""Older runs recorded means of several steps, with their number in `steps`."""


class Notes:
    """Lines for the head of the page. A kill can truncate any file: none makes the report raise."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.unread: Counter[str] = Counter()

    @contextmanager
    def reading_line(self, name: str) -> Iterator[None]:
        """Around the reading of one line of this file: a line that raises is counted and left out."""
        try:
            yield
        except UNREADABLE:
            self.unread[name] += 1

    def records(self, file: Path, *needed: str) -> Iterator[dict[str, Any]]:
        """The lines of a line file that have these fields."""
        try:
            for record in read_lines(file):
                if record is not None and all(name in record for name in needed):
                    yield record
                else:
                    self.unread[file.name] += 1
        except OSError as error:
            self.texts.append(f"{file.name} could not be read ({error.strerror})")

    @property
    def lines(self) -> tuple[str, ...]:
        lost = (
            f"left out: {counted(n, 'line')} of {name} that could not be read"
            for name, n in self.unread.items()
        )
        return (*self.texts, *lost)


def number(value: Any) -> float:
    """A finite number; ValueError for anything else, booleans included."""
    if type(value) not in (int, float) or not abs(value) < LARGEST_COUNT:
        raise ValueError(f"{value!a:.40} is not a number below {LARGEST_COUNT:g}")
    return float(value)


@dataclass(frozen=True)
class Series:
    """One number over the steps, in the order of steps; a step made twice keeps its last value."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def shown(self) -> np.ndarray:
        """Mask of the values that a chart can show."""
        return np.abs(self.values) <= LARGEST  # type: ignore[no-any-return]

    @property
    def finite(self) -> Series:
        return Series(self.steps[self.shown], self.values[self.shown])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def median(self) -> float:
        finite = self.finite.values
        return float(np.median(finite)) if len(finite) else math.nan

    def scaled(self, factor: float) -> Series:
        return Series(self.steps, self.values * factor)


@dataclass(frozen=True)
class Band:
    """A thinned series: for each point a step, and the lowest, highest and mean value of its bucket."""

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    thinned: bool


def in_order(steps: Any, values: Any) -> Series:
    """Sorted by step, the newest value of each: a resumed run makes some steps again."""
    steps, values = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    newest = np.append(np.diff(steps) > 0, True) if len(steps) else np.zeros(0, bool)
    return Series(steps[newest], values[newest])


def read_numbers(path: Path, notes: Notes) -> dict[str, Series]:
    """Every number of every record that has a step."""
    points: dict[str, tuple[array[float], array[float]]] = {}
    for record in notes.records(path, "step"):
        with notes.reading_line(path.name):
            step = number(record["step"])
            for name, value in record.items():
                if type(value) in (float, int) and name not in GROUPED:
                    steps, values = points.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    # an integer can be larger than any double
                    values.append(value if type(value) is float or abs(value) < LARGEST else math.inf)
    return {name: in_order(*pair) for name, pair in points.items()}


def thin(series: Series, buckets: int = BUCKETS) -> Band:
    finite = series.finite
    if len(finite) <= 2 * buckets:
        return Band(finite.steps, finite.values, finite.values, finite.values, thinned=False)
    starts = np.linspace(0, len(finite), buckets, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(finite)))
    return Band(
        finite.steps[starts + sizes // 2],
        np.minimum.reduceat(finite.values, starts),
        np.maximum.reduceat(finite.values, starts),
        np.add.reduceat(finite.values, starts) / sizes,
        thinned=True,
    )

"""metrics.jsonl as series of numbers, and their thinning for charts.

A million lines take seconds: lines are parsed in blocks, numbers are kept in arrays of at most MOST_POINTS
points. Thinning keeps the lowest, highest and mean value of each bucket, so a spike of one step stays
visible. Not here: drawing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.report.file_notes import LARGEST as MOST
from fsdp.report.file_notes import Notes
from fsdp.report.own_files import noted_lines

BUCKETS = 360
MOST_POINTS = 1 << 17
"""Points of a series that are kept while a file is read."""
MOST_ODD = 1000
"""Values that are not finite, of those that are merged."""
LARGEST = 1e100
"""Larger values are treated as not finite: sums of smaller ones stay finite."""


@dataclass(frozen=True)
class Series:
    """One number over the steps, in the order of steps; a step made twice keeps its last value.

    A value may stand for several steps, as their mean (fsdp/record/grouped.py, Points): `counts` are those
    steps, `low` and `high` their extremes. None: each value is of one step.
    """

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def lowest(self) -> np.ndarray:
        return self.values if self.low is None else self.low

    @property
    def highest(self) -> np.ndarray:
        return self.values if self.high is None else self.high

    @property
    def weights(self) -> np.ndarray:
        """Steps of each value."""
        return np.ones(len(self)) if self.counts is None else self.counts

    @property
    def shown(self) -> np.ndarray:
        """Mask of the values that a chart can show."""
        return np.abs(self.values) <= LARGEST  # type: ignore[no-any-return]

    @property
    def finite(self) -> Series:
        good = self.shown
        return self if good.all() else self.at(good)

    def at(self, which: np.ndarray | slice) -> Series:
        """The values at these indices, or of this mask."""
        parts = (self.low, self.high, self.counts)
        return Series(
            self.steps[which], self.values[which], *(None if one is None else one[which] for one in parts)
        )

    def scaled(self, factor: float) -> Series:
        low, high = (None if one is None else one * factor for one in (self.low, self.high))
        return Series(self.steps, self.values * factor, low, high, self.counts)

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def median(self) -> float:
        finite = self.finite
        if not len(finite):
            return float("nan")
        if finite.counts is None:
            return float(np.median(finite.values))
        order = np.argsort(finite.values)
        below = np.cumsum(finite.counts[order])
        return float(finite.values[order][np.searchsorted(below, below[-1] / 2)])


@dataclass(frozen=True)
class Band:
    """A thinned series: for each point a step, and the lowest, highest and mean value of its bucket."""

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    each: float
    """Values per point; 1 if nothing was thinned."""


def read_numbers(path: Path, notes: Notes) -> dict[str, Series]:
    """Every number of every record that has a step; lines that cannot be read are counted and left out."""
    found: dict[str, Points] = {}
    for record in noted_lines(path, notes):
        step: Any = record.get("step") if record is not None else None
        if record is None or type(step) not in (int, float) or not abs(step) < MOST:
            notes.lost(path.name)
            continue
        count = record.get("steps", 1)
        count = count if type(count) is int and 0 < count < MOST else 1
        lows, highs = (_extremes(record, name) for name in ("low", "high")) if count > 1 else ({}, {})
        for name, value in record.items():
            if type(value) in (float, int) and name not in ("step", "steps"):
                if name not in found:
                    found[name] = Points()
                # an integer can be larger than any double
                number = value if type(value) is float or abs(value) < LARGEST else math.inf
                if count == 1:
                    found[name].add(step, number)
                else:
                    found[name].add_group(step, number, lows.get(name), highs.get(name), count)
    return {name: points.series() for name, points in found.items()}


def _extremes(record: Mapping[str, Any], name: str) -> Mapping[str, float]:
    of = record.get(name)
    known = of.items() if isinstance(of, dict) else ()
    return {key: float(one) for key, one in known if type(one) in (int, float) and abs(one) < LARGEST}


class Points:
    """The points of one series while a file is read: at most MOST_POINTS, then neighbours are merged."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")
        self._groups: dict[int, tuple[float, float, float]] = {}
        """Index → low, high and steps of a value that stands for several, since the last merge."""
        self._merged: Series | None = None

    def add(self, step: float, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) >= MOST_POINTS // 2:
            self._merge()

    def add_group(self, step: float, value: float, low: float | None, high: float | None, count: int) -> None:
        low, high = value if low is None else low, value if high is None else high
        self._groups[len(self._steps)] = (min(low, value), max(high, value), count)
        self.add(step, value)

    def series(self) -> Series:
        at, of = np.array(self._steps), np.array(self._values)
        if self._groups:
            low, high, counts = of.copy(), of.copy(), np.ones(len(of))
            where = np.fromiter(self._groups, np.int64)
            low[where], high[where], counts[where] = np.array(list(self._groups.values())).T
            recent = Series(at, of, low, high, counts)
        else:
            recent = Series(at, of)
        if self._merged is not None:
            recent = _joined(self._merged, recent)
        return in_order(recent)

    def _merge(self) -> None:
        """Neighbours become one point, all of about as many steps; values that are not finite stay."""
        whole = self.series()
        good, odd = whole.finite, whole.at(~whole.shown).at(slice(MOST_ODD))
        self._merged = in_order(_joined(_merged(good, MOST_POINTS // 4) if len(good) else good, odd))
        self._steps, self._values, self._groups = array("d"), array("d"), {}


def _joined(first: Series, second: Series) -> Series:
    def both(of: Callable[[Series], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(first), of(second)])

    steps, values = both(lambda one: one.steps), both(lambda one: one.values)
    if first.counts is None and second.counts is None:
        return Series(steps, values)
    low, high = both(lambda one: one.lowest), both(lambda one: one.highest)
    return Series(steps, values, low, high, both(lambda one: one.weights))


def _merged(series: Series, points: int) -> Series:
    """At most so many points, each at the step of its last value."""
    starts = _equal_starts(series, points)
    return _bucketed(series, starts, np.append(starts[1:], len(series)) - 1)


def _equal_starts(series: Series, buckets: int) -> np.ndarray:
    """The first point of each bucket; buckets have equal numbers of steps as far as points are not cut."""
    before = np.cumsum(series.weights) - series.weights
    nth = np.floor(before * (buckets / series.weights.sum()))
    return np.flatnonzero(np.diff(nth, prepend=-1.0))


def _bucketed(series: Series, starts: np.ndarray, shown: np.ndarray) -> Series:
    """One point for each bucket of points, at the step of the point in `shown`."""
    counts = np.add.reduceat(series.weights, starts)
    return Series(
        series.steps[shown],
        np.add.reduceat(series.values * series.weights, starts) / counts,
        np.minimum.reduceat(series.lowest, starts),
        np.maximum.reduceat(series.highest, starts),
        counts,
    )


def in_order(series: Series) -> Series:
    """Sorted by step, the newest value of each: a resumed run makes some steps again."""
    if len(series) > 1 and not (np.diff(series.steps) > 0).all():
        series = series.at(np.argsort(series.steps, kind="stable"))
        series = series.at(np.append(np.diff(series.steps) > 0, True))
    return series


def thin(series: Series, buckets: int = BUCKETS) -> Band:
    """At most `buckets` points, each with the extremes of its bucket."""
    finite = series.finite
    total = float(finite.weights.sum())
    if len(finite) <= 2 * buckets:
        each = total / len(finite) if finite.counts is not None and len(finite) else 1.0
        return Band(finite.steps, finite.lowest, finite.highest, finite.values, each)
    if finite.counts is None:
        starts = np.linspace(0, len(finite), buckets, endpoint=False).astype(np.int64)
    else:
        starts = _equal_starts(finite, buckets)
    sizes = np.diff(np.append(starts, len(finite)))
    found = _bucketed(finite, starts, starts + sizes // 2)
    return Band(found.steps, found.lowest, found.highest, found.values, total / len(starts))

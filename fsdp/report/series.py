"""metrics.jsonl as series of numbers, and their thinning for charts.

A million lines take seconds: lines are parsed in blocks, numbers are kept in arrays. Thinning keeps the
lowest, highest and mean value of each bucket, so a spike of one step stays visible. Not here: drawing.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.report.file_notes import LARGEST as MOST
from fsdp.report.file_notes import Notes
from fsdp.rundir.line_files import read_lines

BUCKETS = 360
LARGEST = 1e100
"""Larger values are treated as not finite: sums of smaller ones stay finite."""


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
        good = self.shown
        return self if good.all() else Series(self.steps[good], self.values[good])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def median(self) -> float:
        return float(np.median(self.finite.values)) if len(self.finite) else float("nan")


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
    steps: dict[str, array[float]] = {}
    values: dict[str, array[float]] = {}
    for record in read_lines(path):
        step: Any = record.get("step") if record is not None else None
        if record is None or type(step) not in (int, float) or not abs(step) < MOST:
            notes.lost(path.name)
            continue
        for name, value in record.items():
            if type(value) in (float, int) and name != "step":
                if name not in steps:
                    steps[name], values[name] = array("d"), array("d")
                steps[name].append(step)
                # an integer can be larger than any double
                values[name].append(value if type(value) is float or abs(value) < LARGEST else math.inf)
    return {name: _series(steps[name], values[name]) for name in steps}


def _series(steps: array[float], values: array[float]) -> Series:
    return in_order(np.frombuffer(steps), np.frombuffer(values))


def in_order(at: np.ndarray, of: np.ndarray) -> Series:
    """Sorted by step, the newest value of each: a resumed run makes some steps again."""
    if len(at) > 1 and not (np.diff(at) > 0).all():
        order = np.argsort(at, kind="stable")
        at, of = at[order], of[order]
        newest = np.append(np.diff(at) > 0, True)
        at, of = at[newest], of[newest]
    return Series(at, of)


def thin(series: Series, buckets: int = BUCKETS) -> Band:
    """At most `buckets` points, each with the extremes of its bucket."""
    finite = series.finite
    steps, values = finite.steps, finite.values
    if len(steps) <= 2 * buckets:
        return Band(steps, values, values, values, 1.0)
    starts = np.linspace(0, len(steps), buckets, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(steps)))
    return Band(
        steps[starts + sizes // 2],
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        np.add.reduceat(values, starts) / sizes,
        len(steps) / buckets,
    )

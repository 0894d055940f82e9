"""Two runs: the settings and the figures in which they differ.

A difference is called better or worse only where the 95% intervals of the two medians do not overlap. The
intervals are order statistics of the medians of up to 30 parts of a run: neighbouring steps are alike, and
count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, sqrt

import numpy as np

from fsdp.base.units import seconds
from fsdp.config import shown_value
from fsdp.report.html import span
from fsdp.report.run_data import RunData
from fsdp.report.watch_records import WAITING

PARTS, LEAST_PARTS = 30, 6
"""With fewer parts a median has no 95% interval."""
NOT_COMPARED = ("run.dir", "checkpoint.dir")
"""Any two runs differ in these."""


def loss_text(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


@dataclass(frozen=True)
class Figure:
    """One number of a whole run. `better` is -1 where less is better, 1 where more is, 0 where neither."""

    label: str
    value: Callable[[RunData], float | None]
    text: Callable[[float], str]
    better: int = 0
    median_of: str = ""
    """The series whose median it is: it has a 95% interval."""


def _last(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.series[name].last if name in run.series else None


def _lowest(name: str) -> Callable[[RunData], float | None]:
    return lambda run: min(run.series[name].finite.values, default=None) if name in run.series else None


def _median(label: str, name: str, text: Callable[[float], str], better: int = 0) -> Figure:
    return Figure(
        label, lambda run: run.series[name].median if name in run.series else None, text, better, name
    )


def _phase(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.watched.mean(name)


FIGURES = (
    Figure("last step", lambda run: float(run.last_step), lambda value: f"{value:,.0f}"),
    Figure("last loss", _last("loss"), loss_text),
    Figure("lowest loss", _lowest("loss"), loss_text),
    Figure("last held-out loss", _last("eval_loss"), loss_text),
    Figure("lowest held-out loss", _lowest("eval_loss"), loss_text),
    Figure("last held-out accuracy", _last("eval_accuracy"), lambda value: f"{value:.2%}"),
    _median("median step", "step_time_s", seconds, -1),
    _median("median wait for data", "data_wait_s", seconds),
    _median("median per second", "per_s", lambda value: f"{value:,.0f}", 1),
    Figure("forward per step", _phase("forward"), seconds),
    Figure("backward per step", _phase("backward"), seconds),
    Figure("exposed communication per step", _phase(WAITING), seconds),
    _median("memory of rank 0", "max_mem_gib", lambda value: f"{value:.2f} GiB"),
    Figure("starts", lambda run: float(len(run.starts)), lambda value: f"{value:.0f}"),
)


def figures(runs: Sequence[RunData]) -> list[list[object]]:
    """Rows of label, value of each run, difference of the second from the first."""
    rows = [(figure, [figure.value(run) for run in runs]) for figure in FIGURES]
    return [_row(figure, runs, values) for figure, values in rows if values != [None, None]]


def _row(figure: Figure, runs: Sequence[RunData], values: Sequence[float | None]) -> list[object]:
    intervals = [interval(run, figure.median_of) if figure.median_of else None for run in runs]
    texts = []
    for value, spread in zip(values, intervals, strict=True):
        text = "" if value is None else "not a number" if value != value else figure.text(value)
        texts.append(f"{text} ({figure.text(spread[0])} to {figure.text(spread[1])})" if spread else text)
    return [figure.label, *texts, _difference(figure, values, intervals)]


def _difference(
    figure: Figure, values: Sequence[float | None], intervals: Sequence[tuple[float, float] | None]
) -> str:
    first, second = values
    if first is None or second is None or not (isfinite(first) and isfinite(second)):
        return ""
    if first == second:
        return "the same"
    text = f"{(second - first) / abs(first):+.1%}" if first else f"{second - first:+.4g}"
    one, two = intervals
    if not figure.better or one is None or two is None or (one[0] <= two[1] and two[0] <= one[1]):
        return text
    kind = "better" if figure.better * (second - first) > 0 else "worse"
    return span(f"{text} {kind}", kind)


def interval(run: RunData, name: str) -> tuple[float, float] | None:
    """The 95% interval of a series' median."""
    values = run.series[name].finite.values if name in run.series else np.array([])
    if len(values) < LEAST_PARTS:
        return None
    parts = np.sort([np.median(part) for part in np.array_split(values, min(PARTS, len(values)))])
    reach = 0.98 * sqrt(len(parts))
    low, high = max(0, floor(len(parts) / 2 - reach)), min(len(parts) - 1, ceil(len(parts) / 2 + reach))
    return float(parts[low]), float(parts[high])


def settings(runs: Sequence[RunData]) -> list[list[str]]:
    """Fields in which the runs differ, with the value of each."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_COMPARED)
    rows = [[name, *(str(shown_value(run.config.get(name, ""))) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]

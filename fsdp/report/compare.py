"""Two runs: the settings and the results in which they differ, with the spread of what varies by step.

A difference is called better or worse only where the 95% intervals of the two medians do not overlap, or
where the figure is a count of bytes. The intervals are order statistics of the medians of up to 30 parts of a
run: neighbouring steps are alike, and count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, sqrt
from typing import Any

import numpy as np

from fsdp.base.html import span
from fsdp.base.units import byte_size, seconds
from fsdp.config import shown_value
from fsdp.report.run_data import RunData
from fsdp.report.timing import LABELS
from fsdp.report.watch_records import WAITING

MANY = 10
NOISE = 0.02
"""A smaller relative difference is called neither better nor worse."""
PARTS, LEAST_PARTS = 30, 6
"""With fewer parts a median has no 95% interval."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """One number of a whole run. `better` is -1 where less is better, 1 where more is, 0 where neither."""

    name: str
    of: Callable[[RunData], float | None]
    text: Callable[[float], str]
    better: int = 0
    spread: Callable[[RunData], Interval | None] | None = None
    """Its 95% interval. A figure with `better` and without a spread is exact."""


def last(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.series[name].last if name in run.series else None


def best(name: str, sign: int) -> Callable[[RunData], float | None]:
    """The lowest or highest value of a step, also of the steps that a record has the mean of."""

    def of(run: RunData) -> float | None:
        series = run.series.get(name)
        if series is None or not len(finite := series.finite):
            return None
        return float(finite.highest.max() if sign > 0 else finite.lowest.min())

    return of


def median(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.series[name].median if name in run.series else None


def interval(name: str) -> Callable[[RunData], Interval | None]:
    """The 95% interval of a series' median."""

    def of(run: RunData) -> Interval | None:
        values = run.series[name].finite.values if name in run.series else np.array([])
        if len(values) < LEAST_PARTS:
            return None
        parts = np.sort([np.median(part) for part in np.array_split(values, min(PARTS, len(values)))])
        count = len(parts)
        low = max(0, floor(count / 2 - 0.98 * sqrt(count)))
        high = min(count - 1, ceil(count / 2 + 0.98 * sqrt(count)))
        return float(parts[low]), float(parts[high])

    return of


def tensors_peak(run: RunData) -> float | None:
    """The highest rank's peak of all tensors, if the run was profiled."""
    return max((float(account["peak"]["bytes"]) for account in run.accounts.values()), default=None)


def phase(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.watched.timing.mean(name)


def loss_text(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


FIGURES = (
    Figure("last step", lambda run: float(run.last_step), lambda v: f"{v:,.0f}"),
    Figure("last loss", last("loss"), loss_text),
    Figure("lowest loss", best("loss", -1), loss_text),
    Figure("last held-out loss", last("eval_loss"), loss_text),
    Figure("lowest held-out loss", best("eval_loss", -1), loss_text),
    Figure("last held-out accuracy", last("eval_accuracy"), lambda v: f"{v:.2%}"),
    Figure("median step", median("step_time_s"), seconds, -1, interval("step_time_s")),
    Figure("median wait for data", median("data_wait_s"), seconds, 0, interval("data_wait_s")),
    *(
        Figure(f"{LABELS.get(name, name)} per step", phase(name), seconds)
        for name in ("forward", "backward", WAITING, "optimizer")
    ),
    Figure("median per second", median("per_s"), lambda v: f"{v:,.0f}", 1, interval("per_s")),
    Figure("peak of tensors, a rank", tensors_peak, byte_size, -1),
    Figure("peak memory of rank 0", best("max_mem_gib", 1), lambda v: f"{v:.2f} GiB"),
    Figure("starts", lambda run: float(len(run.starts)), lambda v: f"{v:.0f}"),
)


@dataclass(frozen=True)
class Difference:
    """A figure of two runs: its texts, and by how much the second differs from the first."""

    name: str
    texts: tuple[str, str]
    text: str = ""
    kind: str = ""
    """`better`, `worse`, or empty: not significant, or neither."""
    ratio: float | None = None
    """The second over the first; None where that has no meaning."""
    interval: Interval | None = None
    """From the least to the greatest ratio that the two intervals allow: it holds 1 where they overlap."""

    short: str = ""
    """The text without its interval."""

    def cell(self) -> str:
        return span(self.text, self.kind) if self.text else ""


def differences(one: RunData, two: RunData) -> list[Difference]:
    found = []
    for figure in FIGURES:
        a, b = figure.of(one), figure.of(two)
        if a is not None or b is not None:
            spreads = [figure.spread(run) if figure.spread is not None else None for run in (one, two)]
            texts = _text(figure, a, spreads[0]), _text(figure, b, spreads[1])
            found.append(_difference(figure, texts, a, b, spreads))
    return found


def figures(found: Sequence[Difference]) -> list[list[object]]:
    """Rows of name, value of each run, difference of the second from the first."""
    return [[one.name, *one.texts, one.cell()] for one in found]


def _text(figure: Figure, value: float | None, spread: Interval | None) -> str:
    if value is None or value != value:
        return "" if value is None else "not a number"
    return figure.text(value) + (f" ({figure.text(spread[0])} to {figure.text(spread[1])})" if spread else "")


def _significant(figure: Figure, a: float, b: float, spreads: Sequence[Interval | None]) -> bool:
    if figure.spread is None:
        return abs(b - a) > NOISE * abs(a)
    one, two = spreads
    return one is not None and two is not None and (one[1] < two[0] or two[1] < one[0])


def _difference(
    figure: Figure,
    texts: tuple[str, str],
    a: float | None,
    b: float | None,
    spreads: Sequence[Interval | None],
) -> Difference:
    if a is None or b is None:
        return Difference(figure.name, texts)
    if a == b or not (isfinite(a) and isfinite(b)):
        return Difference(figure.name, texts, "the same" if a == b else "not comparable")
    ratio = b / a if a > 0 and b > 0 and isfinite(b / a) else None
    interval = _ratios(spreads) if ratio else None
    short = f"{(b - a) / abs(a):+.1%}" if a else f"{b - a:+.4g}"
    spread = f" ({interval[0] - 1:+.1%} to {interval[1] - 1:+.1%})" if interval else ""
    if ratio and ratio >= MANY:
        short = f"{ratio:.3g} times"
        spread = f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else ""
    good = figure.better * (b - a) if _significant(figure, a, b, spreads) else 0
    kind = "better" if good > 0 else "worse" if good < 0 else ""
    return Difference(figure.name, texts, f"{short}{spread} {kind}".rstrip(), kind, ratio, interval, short)


def _ratios(spreads: Sequence[Interval | None]) -> Interval | None:
    one, two = spreads
    if one is None or two is None or min(*one, *two) <= 0:
        return None
    low, high = two[0] / one[1], two[1] / one[0]
    return (low, high) if low > 0 and isfinite(high) else None


NOT_COMPARED = ("run.dir", "checkpoint.dir")
"""Any two runs differ in these."""


def settings(runs: Sequence[RunData]) -> list[list[Any]]:
    """Fields in which the runs differ, with the value of each."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [
        [name, *(shown_value(run.config.get(name, "")) for run in runs)]
        for name in names
        if name not in NOT_COMPARED
    ]
    return [row for row in rows if len({str(value) for value in row[1:]}) > 1]

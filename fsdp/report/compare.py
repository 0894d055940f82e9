"""Two runs: the settings and the results in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp.base.html import span
from fsdp.base.units import seconds
from fsdp.report.run_data import RunData
from fsdp.report.timing import LABELS
from fsdp.report.watch_records import WAITING

MANY = 10
NOISE = 0.02
"""A smaller relative difference is called neither better nor worse."""


@dataclass(frozen=True)
class Figure:
    """One number of a whole run. `better` is -1 where less is better, 1 where more is, 0 where neither."""

    name: str
    of: Callable[[RunData], float | None]
    text: Callable[[float], str]
    better: int = 0


def last(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.series[name].last if name in run.series else None


def best(name: str, sign: int) -> Callable[[RunData], float | None]:
    def of(run: RunData) -> float | None:
        values = run.series[name].finite.values if name in run.series else ()
        return None if not len(values) else float(max(values) if sign > 0 else min(values))

    return of


def median(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.series[name].median if name in run.series else None


def phase(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.watched.timing.mean(name)


FIGURES = (
    Figure("last step", lambda run: float(run.last_step), lambda v: f"{v:,.0f}"),
    Figure("last loss", last("loss"), lambda v: f"{v:.4f}", -1),
    Figure("lowest loss", best("loss", -1), lambda v: f"{v:.4f}", -1),
    Figure("last held-out loss", last("eval_loss"), lambda v: f"{v:.4f}", -1),
    Figure("lowest held-out loss", best("eval_loss", -1), lambda v: f"{v:.4f}", -1),
    Figure("last held-out accuracy", last("eval_accuracy"), lambda v: f"{v:.2%}", 1),
    Figure("median step", median("step_time_s"), seconds, -1),
    Figure("median wait for data", median("data_wait_s"), seconds),
    *(
        Figure(f"{LABELS.get(name, name)} per step", phase(name), seconds)
        for name in ("forward", "backward", WAITING, "optimizer")
    ),
    Figure("median per second", median("per_s"), lambda v: f"{v:,.0f}", 1),
    Figure("peak memory", best("max_mem_gib", 1), lambda v: f"{v:.2f} GiB", -1),
    Figure("starts", lambda run: float(len(run.starts)), lambda v: f"{v:.0f}"),
)


def figures(one: RunData, two: RunData) -> list[list[object]]:
    """Rows of name, value of each run, difference of the second from the first."""
    rows: list[list[object]] = []
    for figure in FIGURES:
        a, b = figure.of(one), figure.of(two)
        if a is not None or b is not None:
            rows.append([figure.name, _text(figure, a), _text(figure, b), _difference(figure, a, b)])
    return rows


def _text(figure: Figure, value: float | None) -> str:
    return "" if value is None else figure.text(value) if value == value else "not a number"


def _difference(figure: Figure, a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ""
    if a == b or not (a == a and b == b):
        return "the same" if a == b else "not comparable"
    text = f"{(b - a) / abs(a):+.1%}" if a else f"{b - a:+.4g}"
    if a > 0 and b / a >= MANY:
        text = f"{b / a:.3g} times"
    good = figure.better * (b - a) if abs(b - a) > NOISE * abs(a) else 0
    kind = "better" if good > 0 else "worse" if good < 0 else ""
    return span(f"{text} {kind}".rstrip(), kind)


NOT_COMPARED = ("run.dir", "checkpoint.dir")
"""Any two runs differ in these."""


def settings(runs: Sequence[RunData]) -> list[list[Any]]:
    """Fields in which the runs differ, with the value of each."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [
        [name, *(shown(run.config.get(name, "")) for run in runs)]
        for name in names
        if name not in NOT_COMPARED
    ]
    return [row for row in rows if len({str(value) for value in row[1:]}) > 1]


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value == "" else str(value)

"""Predictions of python -m fsdp.plan beside the run's measurements, which fsdp/run/planned.py records."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from fsdp.base.html import table
from fsdp.base.units import seconds
from fsdp.report.run_data import RunData

ABOUT = "The plan's predictions and the measured values. A positive difference: the run took more."
PREDICTIONS: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    # label, the configuration's field, the record's field, the series whose median replaces a missing record
    ("peak memory of rank 0", "plan.predicted_peak_gib", "peak_gib", "", lambda value: f"{value:.3g} GiB"),
    ("median step", "plan.predicted_step_s", "step_s", "step_time_s", seconds),
)


def planned(run: RunData) -> Markup:
    """Empty if the run was not planned. A run in progress has no peak to compare yet."""
    rows = []
    for label, field, record, series, text in PREDICTIONS:
        expected = run.config.get(field) or 0.0
        if not expected > 0:
            continue
        found = run.planned.get(record)
        if found is None and series in run.series:
            found = run.series[series].median
        measured = ["", ""] if found is None else [text(found), f"{found / expected - 1:+.1%}"]
        rows.append([label, text(expected), *measured])
    heads = ("", "planned", "measured", "difference")
    return table(heads, rows, numeric=heads[1:]) if rows else Markup("")

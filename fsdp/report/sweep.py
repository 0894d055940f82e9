"""Many runs as one table: what was set differently, results, and each run's loss as a small curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from fsdp.base.html import div, header, joined, render, section, span, table
from fsdp.base.palette import ROW, colour
from fsdp.base.units import byte_size, seconds
from fsdp.report import compare
from fsdp.report.curves import chart
from fsdp.report.run_data import RunData
from fsdp.report.series import Series, thin

POINTS = 80
TABLE = (
    "Ordered by the lowest held-out loss, or by the last loss where nothing was evaluated. The small curves "
    "of one column have one scale. Steps and rates are medians."
)
FIRST = f"The first {ROW} of the table."
HEADS = (
    "run", "different settings", "steps", "last loss", "lowest held-out loss", "step", "per second",
    "peak of tensors", "peak of rank 0",
)  # fmt: skip


def sections(runs: Sequence[RunData], states: Sequence[Markup]) -> Markup:
    order = sorted(range(len(runs)), key=lambda nth: (_result(runs[nth]), nth))
    ordered = [runs[nth] for nth in order]
    shown = [states[nth] for nth in order]
    return joined(
        [
            header(f"{len(runs)} runs", lines=[", ".join(run.name for run in runs)]),
            section("Runs", _table(ordered, shown), TABLE),
            section("Curves", _curves(ordered[:ROW]), FIRST if len(runs) > ROW else ""),
            section("Same settings", _shared(runs)),
        ]
    )


def _result(run: RunData) -> float:
    """What runs are ordered by; a run without it is last."""
    found = compare.best("eval_loss", -1)(run)
    found = compare.last("loss")(run) if found is None else found
    return float("inf") if found is None or found != found else found


def _table(runs: Sequence[RunData], states: Sequence[Markup]) -> Markup:
    differing = compare.settings(runs)
    frames = {name: _frame([run.series[name] for run in runs if name in run.series]) for name in SPARKED}
    rows = []
    for nth, (run, state) in enumerate(zip(runs, states, strict=True)):
        mark = joined([span("", f"mark {colour(nth)}") if nth < ROW else "", run.name])
        named = joined([span(f"{row[0]} {row[nth + 1]}", "setting") for row in differing])
        settings = div(named, "") if named else ""
        sparks = {name: _spark(run, name, frames[name], colour(nth)) for name in SPARKED}
        last, lowest = compare.last("loss")(run), compare.best("eval_loss", -1)(run)
        losses = [
            joined([sparks["loss"], _shown(last, compare.loss_text)]),
            joined([sparks["eval_loss"], _shown(lowest, compare.loss_text)]),
        ]
        name = div(joined([div(mark, ""), state]), "")
        rows.append([name, settings, f"{run.last_step:,}", *losses, *_speed_and_memory(run)])
    kept = [at for at in range(len(HEADS)) if any(row[at] for row in rows) or not at]
    heads = [HEADS[at] for at in kept]
    numeric = [head for head in heads if head not in HEADS[:2]]
    return div(table(heads, [[row[at] for at in kept] for row in rows], numeric=numeric), "sweep")


def _speed_and_memory(run: RunData) -> list[str]:
    step, rate = compare.median("step_time_s")(run), compare.median("per_s")(run)
    tensors, process = compare.tensors_peak(run), compare.best("max_mem_gib", 1)(run)
    return [
        _shown(step, seconds),
        _shown(rate, "{:,.0f}".format),
        _shown(tensors, byte_size),
        _shown(process, "{:.2f} GiB".format),
    ]


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


# ---------------------------------------------------------------- small curves

SPARKED = ("loss", "eval_loss")


@dataclass(frozen=True)
class _Frame:
    """The range of steps and values that all small curves of a column share."""

    last: float
    low: float
    high: float


def _frame(series: Sequence[Series]) -> _Frame | None:
    bands = [thin(one, POINTS) for one in series if len(one.finite)]
    if not bands:
        return None
    means = np.concatenate([band.mean for band in bands])
    low, high = float(means.min()), float(np.quantile(means, 0.98))
    return _Frame(max(float(band.steps[-1]) for band in bands) or 1.0, low, max(high, low + 1e-12))


def _spark(run: RunData, name: str, frame: _Frame | None, colour: str) -> Markup:
    series = run.series.get(name)
    if frame is None or series is None or len(series.finite) < 2:
        return Markup("")
    band = thin(series, POINTS)
    x = band.steps / frame.last * 1000
    y = np.clip((frame.high - band.mean) / (frame.high - frame.low) * 1000, 0, 1000)
    points = " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return render("report/templates/spark.html", points=points, colour=colour, title=f"{name} of {run.name}")


def _curves(runs: Sequence[RunData]) -> Markup:
    titles = {"loss": "Loss", "eval_loss": "Held-out loss", "eval_accuracy": "Held-out accuracy"}
    charts = [
        chart(
            title, {run.name: run.series[name] for run in runs if name in run.series}, smooth=name == "loss"
        )
        for name, title in titles.items()
    ]
    return div(joined(charts), "curves") if any(charts) else Markup("")


def _shared(runs: Sequence[RunData]) -> Markup:
    """Settings other than the default that all runs have."""
    differing = {row[0] for row in compare.settings(runs)}
    rows = [
        [name, compare.shown_value(value)]
        for name, value in runs[0].changed.items()
        if name not in differing and name not in compare.NOT_COMPARED
    ]
    return table(("setting", "value"), rows) if rows else Markup("")

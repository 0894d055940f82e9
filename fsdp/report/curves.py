"""Line charts as inline SVG. The SVG stretches; its labels are HTML and do not, so a phone can show them.

Each chart carries its numbers as JSON for the readout under the pointer; without scripts the chart is
complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from fsdp.base.html import render
from fsdp.base.palette import colour
from fsdp.report.series import Band, Series, thin

SPIKE = 3.0
"""Values this many frame heights above the 99th percentile are left out; a note names the highest."""
SMOOTH_FROM = 80


@dataclass(frozen=True)
class Marks:
    """Steps marked in every chart of a run: those from which it was resumed."""

    restarts: Sequence[int] = field(default=())


@dataclass(frozen=True)
class Frame:
    """The visible range of steps and values."""

    first: float
    last: float
    low: float
    high: float

    def x(self, steps: np.ndarray) -> np.ndarray:
        return (steps - self.first) / ((self.last - self.first) or 1.0) * 1000

    def y(self, values: np.ndarray) -> np.ndarray:
        return np.clip((self.high - values) / (self.high - self.low) * 1000, 0, 1000)


@dataclass(frozen=True)
class Curve:
    """One series as points of SVG; empty strings for what it does not have."""

    name: str
    colour: str
    line: str = ""
    raw: str = ""
    """The values behind a smoothed line."""
    band: str = ""
    """Between the lowest and the highest of each point's steps."""
    dot: str = ""


def chart(
    title: str,
    lines: Mapping[str, Series],
    unit: str = "",
    *,
    marks: Marks | None = None,
    smooth: bool = False,
) -> Markup:
    """One chart; empty without a value. Of values none of which is finite, their number."""
    drawn = {name: thin(series) for name, series in lines.items() if len(series.finite)}
    several = len(lines) > 1
    if not drawn:
        notes = [note for name, one in lines.items() for note in _not_finite(name, one, several)]
        undrawn: dict[str, object] = {"title": title, "unit": unit, "notes": notes, "curves": []}
        return render("report/templates/chart.html", **undrawn) if notes else Markup("")
    frame = _frame(list(drawn.values()))
    return render(
        "report/templates/chart.html",
        title=title,
        unit=unit,
        curves=[_curve(name, band, frame, nth, smooth) for nth, (name, band) in enumerate(drawn.items())],
        grid=[f"{y:.1f}" for y in frame.y(np.array(ticks(frame.low, frame.high))).tolist()],
        restarts=_restarts(frame, marks.restarts if marks else ()),
        ys=_y_labels(frame),
        xs=_x_labels(frame),
        notes=[note for name, one in lines.items() for note in _notes(name, one, frame, several)],
        data=_data(drawn, frame),
    )


def _frame(bands: list[Band]) -> Frame:
    low, high = min(float(b.low.min()) for b in bands), max(float(b.high.max()) for b in bands)
    highs = np.concatenate([b.high for b in bands])
    if len(highs) >= 50:
        usual = float(np.quantile(highs, 0.99))
        if high - usual > SPIKE * (usual - low) > 0:
            high = usual + 0.15 * (usual - low)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom = low - pad
    if 0 <= low < 0.6 * high:
        bottom = 0.0  # close enough to start the axis at zero: heights can then be compared
    first, last = min(float(b.steps[0]) for b in bands), max(float(b.steps[-1]) for b in bands)
    if first == last:
        first, last = first - 1, last + 1
    return Frame(first, last, bottom, high + pad)


# ---------------------------------------------------------------- curves


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _curve(name: str, band: Band, frame: Frame, nth: int, smooth: bool) -> Curve:
    x, mean = frame.x(band.steps), frame.y(band.mean)
    if len(x) == 1:
        # a line of length 0 with round caps is a dot that stretching does not deform
        return Curve(name, colour(nth), dot=f"M{x[0]:.1f},{mean[0]:.1f}h0")
    outline, raw = "", ""
    if band.each > 1:
        outline = _points(np.append(x, x[::-1]), np.append(frame.y(band.high), frame.y(band.low)[::-1]))
        mean = frame.y(running_median(band.mean, 4)) if smooth else mean
    elif smooth and len(x) >= SMOOTH_FROM:
        raw = _points(x, mean)
        mean = frame.y(running_median(band.mean, max(3, len(x) // 40)))
    return Curve(name, colour(nth), line=_points(x, mean), raw=raw, band=outline)


def running_median(values: np.ndarray, around: int) -> np.ndarray:
    """The median of up to `around` values on each side, fewer at the ends: it ignores a single spike."""
    last = len(values) - 1
    reaches = [min(around, at, last - at) for at in range(len(values))]
    return np.array([np.median(values[at - reach : at + reach + 1]) for at, reach in enumerate(reaches)])


def _restarts(frame: Frame, steps: Sequence[int]) -> list[str]:
    return [f"{x:.1f}" for x in frame.x(np.array(steps, dtype=float)).tolist() if 0 < x < 1000]


def _notes(name: str, series: Series, frame: Frame, several: bool) -> list[dict[str, str]]:
    """What the frame leaves out: spikes above it, and values that are not finite."""
    notes = []
    finite = series.finite
    above = finite.highest > frame.high
    if above.any():
        top = int(finite.highest.argmax())
        highest = f"{label(float(finite.highest[top]))} at step {finite.steps[top]:,.0f}"
        spikes = f"▲ {int(above.sum()):,} above the frame, the highest {highest}"
        notes.append({"before": f"{_who(name, several)}{spikes}", "bad": "", "after": ""})
    return notes + _not_finite(name, series, several)


def _not_finite(name: str, series: Series, several: bool) -> list[dict[str, str]]:
    lost = len(series) - len(series.finite)
    if not lost:
        return []
    first = f", the first at step {series.steps[~series.shown][0]:,.0f}"
    return [{"before": _who(name, several), "bad": f"{lost:,} not finite", "after": first}]


def _who(name: str, several: bool) -> str:
    return f"{name}: " if several else ""


# ---------------------------------------------------------------- axes


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from low to high."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), 0.0)
    if not step:  # 10**power underflowed
        return []
    start = math.ceil(low / step - 1e-9)
    return [n * step for n in range(start, start + 12) if n * step <= high + step * 1e-9]


def label(value: float) -> str:
    """Three or four digits."""
    size = abs(value)
    if value == 0:
        return "0"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    if size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _y_labels(frame: Frame) -> list[tuple[str, str]]:
    """(place in percent, text)"""
    return [
        (f"{float(frame.y(np.array(value))) / 10:.1f}", label(value))
        for value in ticks(frame.low, frame.high)
    ]


def _x_labels(frame: Frame) -> list[tuple[str, str]]:
    """Whole steps alone."""
    values = [value for value in ticks(frame.first, frame.last, 6) if value == int(value)]
    return [(f"{float(frame.x(np.array(value))) / 10:.1f}", label(value)) for value in values]


def _data(drawn: Mapping[str, Band], frame: Frame) -> dict[str, object]:
    """The numbers of the readout."""
    lines = []
    for name, band in drawn.items():
        one: dict[str, object] = {"name": name, "x": _short(band.steps), "y": _short(band.mean)}
        if band.each > 1:
            one |= {"low": _short(band.low), "high": _short(band.high)}
        lines.append(one)
    return {"first": frame.first, "last": frame.last, "lines": lines}


def _short(values: np.ndarray) -> list[float]:
    return [int(v) if v == int(v) else float(f"{v:.5g}") for v in values.tolist()]

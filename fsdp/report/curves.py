"""Line charts: the curves as inline SVG that stretches, the words beside them as HTML that does not, so a
phone can read them.

Each chart carries its numbers as JSON for the readout under the pointer; without scripts it is a chart all
the same.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fsdp.report.series import Band, Series, thin

COLOURS = 9
SPIKE = 3.0
"""The frame leaves out what is this many times its height above it, and says so."""
SMOOTH_FROM = 80


@dataclass(frozen=True)
class Marks:
    """Steps that every chart of a run shows: where it was started again."""

    restarts: Sequence[int] = field(default=())


@dataclass(frozen=True)
class Frame:
    """What part of the plane is seen."""

    first: float
    last: float
    low: float
    high: float

    def x(self, steps: np.ndarray) -> np.ndarray:
        return (steps - self.first) / ((self.last - self.first) or 1.0) * 1000

    def y(self, values: np.ndarray) -> np.ndarray:
        return np.clip((self.high - values) / (self.high - self.low) * 1000, 0, 1000)


def chart(
    title: str,
    lines: Mapping[str, Series],
    unit: str = "",
    *,
    marks: Marks | None = None,
    smooth: bool = False,
) -> str:
    """One chart; an empty string where there is nothing to draw."""
    drawn = {name: thin(series) for name, series in lines.items() if len(series.finite)}
    if not drawn:
        return ""
    frame = _frame(list(drawn.values()))
    parts = [_grid(frame), *(_restart(frame, step) for step in (marks.restarts if marks else ()))]
    parts += [_curve(band, frame, nth, smooth) for nth, band in enumerate(drawn.values())]
    notes = [note for name, series in lines.items() for note in _notes(name, series, frame, len(lines) > 1)]
    label = html.escape(title)
    said = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    return (
        f'<figure class="chart" tabindex="0"><figcaption><b>{label}</b>{said}{_legend(list(drawn))}</figcaption>'
        f'<div class="plot"><div class="ys">{_y_labels(frame)}</div>'
        f'<div class="area"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'{"".join(parts)}</svg><i class="cursor"></i></div><div class="xs">{_x_labels(frame)}</div></div>'
        f'<p class="readout">{" · ".join(notes)}</p>'
        f'<script type="application/json">{_data(drawn, frame)}</script></figure>'
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
        bottom = 0.0  # near enough to zero to begin there: lengths can then be compared
    first, last = min(float(b.steps[0]) for b in bands), max(float(b.steps[-1]) for b in bands)
    if first == last:
        first, last = first - 1, last + 1
    return Frame(first, last, bottom, high + pad)


# ---------------------------------------------------------------- curves


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _curve(band: Band, frame: Frame, nth: int, smooth: bool) -> str:
    x, colour = frame.x(band.steps), f"c{nth % COLOURS}"
    mean = frame.y(band.mean)
    if len(x) == 1:
        # a line of no length with round ends is a dot that stretching does not deform
        return f'<path d="M{x[0]:.1f},{mean[0]:.1f}h0" class="dot {colour}"/>'
    text = ""
    if band.each > 1:
        outline = _points(np.append(x, x[::-1]), np.append(frame.y(band.high), frame.y(band.low)[::-1]))
        text = f'<polygon points="{outline}" class="band {colour}"/>'
        mean = frame.y(running_median(band.mean, 4)) if smooth else mean
    elif smooth and len(x) >= SMOOTH_FROM:
        text = f'<polyline points="{_points(x, mean)}" class="raw {colour}"/>'
        mean = frame.y(running_median(band.mean, max(3, len(x) // 40)))
    return f'{text}<polyline points="{_points(x, mean)}" class="line {colour}"/>'


def running_median(values: np.ndarray, around: int) -> np.ndarray:
    """The median of up to `around` values on each side: it follows the course and no single spike. Fewer at
    the ends.
    """
    last = len(values) - 1
    reaches = [min(around, at, last - at) for at in range(len(values))]
    return np.array([np.median(values[at - reach : at + reach + 1]) for at, reach in enumerate(reaches)])


def _restart(frame: Frame, step: int) -> str:
    x = float(frame.x(np.array([step]))[0])
    inside = 0 < x < 1000
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="1000" class="restart"/>' if inside else ""


def _grid(frame: Frame) -> str:
    ys = frame.y(np.array(ticks(frame.low, frame.high)))
    return "".join(f'<line x1="0" x2="1000" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>' for y in ys.tolist())


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(
        f'<span><i class="c{nth % COLOURS}"></i>{html.escape(name)}</span>' for nth, name in enumerate(names)
    )
    return f'<span class="legend">{items}</span>'


def _notes(name: str, series: Series, frame: Frame, several: bool) -> list[str]:
    """What the frame does not show: spikes above it, and values that are no numbers."""
    who = f"{html.escape(name)}: " if several else ""
    notes = []
    finite = series.finite
    above = finite.values > frame.high
    if above.any():
        top = int(finite.values.argmax())
        count = int(above.sum())
        notes.append(
            f"{who}▲ {count:,} above the frame, the highest {label(float(finite.values[top]))} at step {finite.steps[top]:,.0f}"
        )
    lost = len(series) - len(finite)
    if lost:
        first = series.steps[~series.shown][0]
        notes.append(f'{who}<strong class="bad">{lost:,} not finite</strong>, the first at step {first:,.0f}')
    return notes


# ---------------------------------------------------------------- axes


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between the two, about `count` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), 0.0)
    if not step:  # smaller than a double's power of ten can be
        return []
    start = math.ceil(low / step - 1e-9)
    return [n * step for n in range(start, start + 12) if n * step <= high + step * 1e-9]


def label(value: float) -> str:
    """Short, and right to three or four digits."""
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


def _y_labels(frame: Frame) -> str:
    return "".join(
        f'<span style="top:{float(frame.y(np.array(value))) / 10:.1f}%">{label(value)}</span>'
        for value in ticks(frame.low, frame.high)
    )


def _x_labels(frame: Frame) -> str:
    values = [value for value in ticks(frame.first, frame.last, 6) if value == int(value)]
    return "".join(
        f'<span style="left:{float(frame.x(np.array(value))) / 10:.1f}%">{label(value)}</span>'
        for value in values
    )


def _data(drawn: Mapping[str, Band], frame: Frame) -> str:
    """What the readout needs; `<` is escaped, or a name could end the script."""
    lines = []
    for name, band in drawn.items():
        one: dict[str, object] = {"name": name, "x": _short(band.steps), "y": _short(band.mean)}
        if band.each > 1:
            one |= {"low": _short(band.low), "high": _short(band.high)}
        lines.append(one)
    return json.dumps(
        {"first": frame.first, "last": frame.last, "lines": lines}, separators=(",", ":")
    ).replace("<", "\\u003c")


def _short(values: np.ndarray) -> list[float]:
    return [int(v) if v == int(v) else float(f"{v:.5g}") for v in values.tolist()]

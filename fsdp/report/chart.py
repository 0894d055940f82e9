"""Pages from Jinja templates, which lie in templates/; line charts as inline SVG, and stacked bars.

Values are escaped; Markup is not. A page is one file that works offline: style and script are inside, its
Content-Security-Policy forbids any request. Colours are class names of page.css, for light and for dark. The
SVG stretches; its labels are HTML and do not, so a phone can show them. Each chart carries its numbers as
JSON for the readout under the pointer; without scripts the chart is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from fsdp.report.run_data import Series

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = 9


@cache
def _environment() -> Environment:
    import jinja2  # a dependency of torch; imported when the first page is made

    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(template: str, **values: Any) -> Markup:
    return Markup(_environment().get_template(template).render(values))


def part(name: str, *values: object, **options: object) -> Markup:
    """A macro of parts.html."""
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html").module, name)
    return macro(*values, **options)


def section(title: str, body: str, about: str = "") -> Markup:
    """Empty if the body is."""
    return part("section", title, body, about) if body else Markup("")


def document(title: str, body: str) -> str:
    style, script = (Markup((TEMPLATES / name).read_text("utf-8")) for name in ("page.css", "page.js"))
    return f"{render('document.html', title=title, body=body, style=style, script=script)}\n"


def colour(nth: int) -> str:
    return f"c{nth % COLOURS}"


def bars(rows: Mapping[str, Mapping[str, float]], unit: Callable[[float], str]) -> Markup:
    """`rows`: name of a bar → kind → amount, all on one scale."""
    kinds = dict.fromkeys(kind for amounts in rows.values() for kind in amounts if amounts[kind])
    colours = {kind: colour(nth) for nth, kind in enumerate(kinds)}
    longest = max((sum(amounts.values()) for amounts in rows.values()), default=0.0) or 1.0
    drawn = [
        (
            name,
            [(colours[k], f"{v / longest * 100:.2f}", f"{k} {unit(v)}") for k, v in amounts.items() if v],
            unit(sum(amounts.values())),
        )
        for name, amounts in rows.items()
    ]
    return render("bars.html", key=[(colours[kind], kind) for kind in kinds], rows=drawn)


# ---------------------------------------------------------------- line charts

BUCKETS = 360


@dataclass(frozen=True)
class Band:
    """A thinned series: for each point a step, and the lowest, highest and mean value of its bucket. A spike
    of one step stays visible.
    """

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    thinned: bool


def thin(series: Series) -> Band:
    finite = series.finite
    if len(finite.steps) <= 2 * BUCKETS:
        return Band(finite.steps, finite.values, finite.values, finite.values, thinned=False)
    starts = np.linspace(0, len(finite.steps), BUCKETS, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(finite.steps)))
    low, high, total = (f.reduceat(finite.values, starts) for f in (np.minimum, np.maximum, np.add))
    return Band(finite.steps[starts + sizes // 2], low, high, total / sizes, thinned=True)


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


def chart(title: str, lines: Mapping[str, Series], unit: str, restarts: Sequence[int]) -> Markup:
    """One chart, with a dashed line at each restart; empty without a value."""
    bands = {name: thin(series) for name, series in lines.items() if len(series.finite.steps)}
    notes = [note for name, series in lines.items() for note in _not_finite(name, series, len(lines) > 1)]
    values: dict[str, object] = {"title": title, "unit": unit, "curves": [], "notes": notes}
    if not bands:
        return render("chart.html", **values) if notes else Markup("")
    frame = _frame(list(bands.values()))
    marks = frame.x(np.array(restarts, dtype=float)).tolist()
    return render(
        "chart.html",
        **values | {"curves": [_curve(name, bands[name], frame, n) for n, name in enumerate(bands)]},
        grid=[f"{y:.1f}" for y in frame.y(np.array(ticks(frame.low, frame.high))).tolist()],
        restarts=[f"{x:.1f}" for x in marks if 0 < x < 1000],
        ys=[(f"{frame.y(np.array(v)) / 10:.1f}", label(v)) for v in ticks(frame.low, frame.high)],
        xs=[
            (f"{frame.x(np.array(step)) / 10:.1f}", label(step))
            for step in ticks(frame.first, frame.last, 6)
            if step == int(step)
        ],
        data={"first": frame.first, "last": frame.last, "lines": list(map(_numbers, bands, bands.values()))},
    )


def _frame(bands: list[Band]) -> Frame:
    low, high = min(float(b.low.min()) for b in bands), max(float(b.high.max()) for b in bands)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom = low - pad
    if 0 <= low < 0.6 * high or low == high == 0:
        bottom = 0.0  # close enough to start the axis at zero: heights can then be compared
    first, last = min(float(b.steps[0]) for b in bands), max(float(b.steps[-1]) for b in bands)
    if first == last:
        first, last = first - 1, last + 1
    return Frame(first, last, bottom, high + pad)


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _curve(name: str, band: Band, frame: Frame, nth: int) -> dict[str, str]:
    """Points of SVG: the line, and the band between lowest and highest."""
    x, mean = frame.x(band.steps), frame.y(band.mean)
    curve = {"name": name, "colour": colour(nth), "line": _points(x, mean), "band": "", "dot": ""}
    if len(x) == 1:
        # a line of length 0 with round caps is a dot that stretching does not deform
        return curve | {"line": "", "dot": f"M{x[0]:.1f},{mean[0]:.1f}h0"}
    if band.thinned:
        low, high = frame.y(band.low), frame.y(band.high)
        curve["band"] = _points(np.append(x, x[::-1]), np.append(high, low[::-1]))
    return curve


def _not_finite(name: str, series: Series, several: bool) -> list[tuple[str, str, str]]:
    """(text, text in red, text)"""
    odd = series.steps[~series.shown]
    before = f"{name}: " if several else ""
    return [(before, f"{len(odd):,} not finite", f", the first at step {odd[0]:,.0f}")] if len(odd) else []


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


def _numbers(name: str, band: Band) -> dict[str, object]:
    """The numbers of the readout."""
    extremes = {"low": band.low, "high": band.high} if band.thinned else {}
    arrays = {"x": band.steps, "y": band.mean, **extremes}
    return {"name": name} | {
        key: [int(v) if v == int(v) else float(f"{v:.5g}") for v in values.tolist()]
        for key, values in arrays.items()
    }

"""Two runs side by side: differences as a picture, memory and time as bars on one scale, results, settings.

compare.py computes the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from fsdp.base.bars import bars
from fsdp.base.html import joined, render, section, table
from fsdp.base.units import seconds
from fsdp.report import compare
from fsdp.report.compare import Difference
from fsdp.report.profile_section import memory_of_runs
from fsdp.report.run_data import RunData
from fsdp.report.timing import LABELS, OF_A_STEP
from fsdp.report.watch_records import SHOWN

FIGURES = (
    "In brackets 95% intervals: of a median over steps, and of the difference. Better and worse: the "
    "intervals of the two runs do not overlap. Last and lowest losses are single numbers without an interval."
)
PICTURE = (
    "The second run against the first; the line is the 95% interval, where the steps give one. A significant "
    "difference is coloured; one without an interval is grey, except for counts of bytes, which are exact."
)
HIGHEST = "Peak of the profiled steps, by kind, on the rank where it is highest; one scale."
TIME = "Mean time of a step over all ranks; one scale."
LEAST_SCALE, MOST_SCALE = math.log(1.1), math.log(1e4)
ROOM = 1.4
"""The scale reaches so far beyond the greatest difference; what is longer ends at the scale's end."""
NOT_DRAWN = ("last step", "starts")


def sections(runs: Sequence[RunData]) -> Markup:
    heads = ["", *(run.name for run in runs), "difference"]
    found = compare.differences(*runs)
    numbers = table(heads, compare.figures(found), numeric=heads[1:])
    fields = table(
        ["setting", *heads[1:-1]], compare.settings(runs), nothing="Both have the same configuration."
    )
    return joined(
        [
            section("Differences", _picture(found), PICTURE),
            section("Memory of both", memory_of_runs({run.name: run.accounts for run in runs}), HIGHEST),
            section("Time of both", _time(runs), TIME),
            section("Results", numbers, FIGURES),
            section("Different settings", fields),
        ]
    )


def _picture(found: Sequence[Difference]) -> Markup:
    """Each ratio on a logarithmic scale around 1; empty if there is none."""
    drawn = [one for one in found if one.ratio and one.name not in NOT_DRAWN]
    if not drawn:
        return Markup("")
    greatest = max(abs(math.log(one.ratio or 1.0)) for one in drawn)
    scale = min(MOST_SCALE, max(LEAST_SCALE, greatest) * ROOM)
    return render(
        "report/templates/differences.html",
        rows=[_row(one, scale) for one in drawn],
        less=f"{math.exp(-scale) - 1:+.0%}",
        more=f"{math.exp(scale) - 1:+.0%}"
        if scale < math.log(compare.MANY)
        else f"{math.exp(scale):.3g} times",
    )


def _row(one: Difference, scale: float) -> dict[str, str]:
    def place(ratio: float) -> float:
        return min(100.0, max(0.0, 50 + 50 * math.log(ratio) / scale))

    low, high = (place(value) for value in one.interval) if one.interval else (0.0, 0.0)
    return {
        "name": one.name,
        "kind": one.kind,
        "text": f"{one.short} {one.kind}".rstrip(),
        "at": f"{place(one.ratio or 1.0):.2f}",
        "left": f"{low:.2f}",
        "width": f"{max(high - low, 0.3):.2f}" if one.interval else "",
    }


def _time(runs: Sequence[RunData]) -> Markup:
    """Empty unless the watch recorded times in both."""
    timings = {run.name: run.watched.timing for run in runs}
    if not all(timing.ranks for timing in timings.values()):
        return Markup("")
    phases = [name for name in SHOWN if name in OF_A_STEP]
    rows = {name: {phase: timing.mean(phase) or 0.0 for phase in phases} for name, timing in timings.items()}
    return bars(rows, phases, seconds, LABELS)

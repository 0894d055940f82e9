"""Step time by rank: bars, a table, and the course over the steps."""

from __future__ import annotations

from markupsafe import Markup

from fsdp.base.bars import bars, shown_ranks
from fsdp.base.html import div, joined, table
from fsdp.base.units import seconds
from fsdp.report.curves import Marks, chart
from fsdp.report.series import Series
from fsdp.report.watch_records import SHOWN, STEP_PHASES, WAITING, Timing

LABELS = {
    WAITING: "exposed communication", "data": "waiting for data", "reduce": "norm and loss",
    "record": "records", "evaluate": "evaluation", "save": "saves",
}  # fmt: skip
OF_A_STEP = (*STEP_PHASES, WAITING)
"""Always shown, so that a colour means the same in every run."""
WORTH_SHOWING = 0.001
"""Phases between steps (saves, evaluations) below this share of the time are left out."""
ABOUT = (
    "Mean step time on each rank. Exposed communication is time spent waiting in collectives, for the "
    "network or for a slower rank. The rank with much less of it than the others is the one they wait for."
)


def time_by_rank(timing: Timing, marks: Marks) -> Markup:
    """Empty if the watch recorded no times."""
    if not timing.ranks:
        return Markup("")
    phases = [name for name in SHOWN if name in OF_A_STEP or _share(timing, name) >= WORTH_SHOWING]
    least_waiting = sorted(timing.ranks, key=lambda rank: timing.ranks[rank][WAITING])
    ranks = shown_ranks(list(timing.ranks), least_waiting)
    shown = {f"rank {rank}": {name: timing.ranks[rank][name] for name in phases} for rank in ranks}
    heads = ["rank", "step", *(LABELS.get(name, name) for name in phases)]
    rows = [
        [rank, seconds(sum(timing.ranks[rank].values())), *(_text(timing.ranks[rank][p]) for p in phases)]
        for rank in ranks
    ]
    numbers = table(heads, rows, numeric=heads[1:])
    return joined([bars(shown, phases, seconds, LABELS), numbers, _course(timing, marks)])


def _text(value: float) -> str:
    return seconds(value) if value > 0 else "0"


def _share(timing: Timing, name: str) -> float:
    total = sum(sum(one.values()) for one in timing.ranks.values())
    return sum(one[name] for one in timing.ranks.values()) / total if total else 0.0


def _course(timing: Timing, marks: Marks) -> Markup:
    """Mean of all ranks, without the phases between steps; empty for a single point."""
    if max(len(series) for series in timing.course.values()) < 2:
        return Markup("")
    shown = {name: timing.course[name] for name in SHOWN if name in OF_A_STEP}
    lines = {LABELS.get(name, name): Series(one.steps, one.values * 1e3) for name, one in shown.items()}
    return div(chart("Over the steps, mean of the ranks", lines, "ms per step", marks=marks), "under-bars")

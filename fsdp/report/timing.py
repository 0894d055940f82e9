"""Where each rank's time goes: bars by rank, their numbers, and the course over the steps."""

from __future__ import annotations

from fsdp.report.bars import bars, chosen
from fsdp.report.curves import Marks, chart
from fsdp.report.series import Series
from fsdp.report.tables import seconds, table
from fsdp.report.watch_records import SHOWN, STEP_PHASES, WAITING, Timing

WORDS = {
    WAITING: "communication exposed", "data": "waiting for data", "reduce": "norm and loss", "record": "records",
    "evaluate": "evaluation", "save": "saves",
}  # fmt: skip
OF_A_STEP = (*STEP_PHASES, WAITING)
"""Always shown, so that a colour means the same in every run."""
WORTH_SHOWING = 0.001
"""What comes between steps (saves, evaluations) is left out where it is a smaller share of the time."""
ABOUT = (
    "Mean time of a step on each rank. Communication exposed is what a rank waits in collectives, for the network or for "
    "the last rank to arrive; a rank that hardly waits while the others do is the one they wait for."
)


def time_by_rank(timing: Timing, marks: Marks) -> str:
    """Nothing where the watch wrote no times."""
    if not timing.ranks:
        return ""
    phases = [name for name in SHOWN if name in OF_A_STEP or _share(timing, name) >= WORTH_SHOWING]
    ranks = chosen(list(timing.ranks), sorted(timing.ranks, key=lambda rank: timing.ranks[rank][WAITING]))
    shown = {f"rank {rank}": {name: timing.ranks[rank][name] for name in phases} for rank in ranks}
    heads = ["rank", "step", *(WORDS.get(name, name) for name in phases)]
    rows = [
        [rank, seconds(sum(timing.ranks[rank].values())), *(_said(timing.ranks[rank][p]) for p in phases)]
        for rank in ranks
    ]
    return (
        bars(shown, phases, seconds, WORDS) + table(heads, rows, numeric=heads[1:]) + _course(timing, marks)
    )


def _said(value: float) -> str:
    return seconds(value) if value > 0 else "0"


def _share(timing: Timing, name: str) -> float:
    total = sum(sum(one.values()) for one in timing.ranks.values())
    return sum(one[name] for one in timing.ranks.values()) / total if total else 0.0


def _course(timing: Timing, marks: Marks) -> str:
    """Mean of all ranks, without what comes between steps; one point is no course."""
    if max(len(series) for series in timing.course.values()) < 2:
        return ""
    shown = {name: timing.course[name] for name in SHOWN if name in OF_A_STEP}
    lines = {WORDS.get(name, name): Series(one.steps, one.values * 1e3) for name, one in shown.items()}
    return f'<div class="under-bars">{chart("Over the steps, mean of the ranks", lines, "ms a step", marks=marks)}</div>'

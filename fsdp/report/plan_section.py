"""What python -m fsdp.plan predicted, beside what the run measured (fsdp/run/planned.py, at the end of each
start).
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp.report.run_data import RunStory
from fsdp.report.tables import seconds, table

ABOUT = "What the plan in the configuration predicted, and what came. Above zero: the run took more."
PREDICTIONS: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    # as people say it, the configuration's field, the record's, and where neither stands the series' median
    ("peak memory of rank 0", "plan.predicted_peak_gib", "peak_gib", "", lambda value: f"{value:.3g} GiB"),
    ("step, the median", "plan.predicted_step_s", "step_s", "step_time_s", seconds),
)


def planned(story: RunStory) -> str:
    """Nothing where the run was not planned. A run that is not over yet has no peak of its own to compare."""
    rows = []
    for name, field, measured, otherwise, say in PREDICTIONS:
        expected = story.config.get(field) or 0.0
        if not expected > 0:
            continue
        came = story.planned.get(measured)
        if came is None and otherwise in story.series:
            came = story.series[otherwise].median
        rows.append(
            [name, say(expected), *(["", ""] if came is None else [say(came), f"{came / expected - 1:+.1%}"])]
        )
    heads = ("", "planned", "measured", "difference")
    return table(heads, rows, numeric=heads[1:]) if rows else ""

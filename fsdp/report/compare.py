"""Two runs: which of their settings and which of their numbers differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp.report.run_data import RunStory
from fsdp.report.tables import Raw, seconds
from fsdp.report.timing import WORDS
from fsdp.report.watch_records import WAITING

MANY = 10
NOISE = 0.02
"""A smaller share is no verdict between two runs of the same thing."""


@dataclass(frozen=True)
class Figure:
    """A number that stands for a whole run. `better` is -1 where less is better, 0 where neither is."""

    name: str
    of: Callable[[RunStory], float | None]
    say: Callable[[float], str]
    better: int = 0


def last(name: str) -> Callable[[RunStory], float | None]:
    return lambda story: story.series[name].last if name in story.series else None


def best(name: str, sign: int) -> Callable[[RunStory], float | None]:
    def of(story: RunStory) -> float | None:
        values = story.series[name].finite.values if name in story.series else ()
        return None if not len(values) else float(max(values) if sign > 0 else min(values))

    return of


def median(name: str) -> Callable[[RunStory], float | None]:
    return lambda story: story.series[name].median if name in story.series else None


def phase(name: str) -> Callable[[RunStory], float | None]:
    return lambda story: story.watched.timing.mean(name)


FIGURES = (
    Figure("last step", lambda story: float(story.last_step), lambda v: f"{v:,.0f}"),
    Figure("last loss", last("loss"), lambda v: f"{v:.4f}", -1),
    Figure("lowest loss", best("loss", -1), lambda v: f"{v:.4f}", -1),
    Figure("last held-out loss", last("eval_loss"), lambda v: f"{v:.4f}", -1),
    Figure("lowest held-out loss", best("eval_loss", -1), lambda v: f"{v:.4f}", -1),
    Figure("last held-out accuracy", last("eval_accuracy"), lambda v: f"{v:.2%}", 1),
    Figure("median step", median("step_time_s"), seconds, -1),
    Figure("median wait for data", median("data_wait_s"), seconds),
    *(
        Figure(f"a step's {WORDS.get(name, name)}", phase(name), seconds)
        for name in ("forward", "backward", WAITING, "optimizer")
    ),
    Figure("median a second", median("per_s"), lambda v: f"{v:,.0f}", 1),
    Figure("peak memory", best("max_mem_gib", 1), lambda v: f"{v:.2f} GiB", -1),
    Figure("starts", lambda story: float(len(story.starts)), lambda v: f"{v:.0f}"),
)


def figures(one: RunStory, two: RunStory) -> list[list[object]]:
    """Rows of name, one's, two's, and how two's lies to one's."""
    rows: list[list[object]] = []
    for figure in FIGURES:
        a, b = figure.of(one), figure.of(two)
        if a is not None or b is not None:
            rows.append([figure.name, _said(figure, a), _said(figure, b), _difference(figure, a, b)])
    return rows


def _said(figure: Figure, value: float | None) -> str:
    return "" if value is None else figure.say(value) if value == value else "not a number"


def _difference(figure: Figure, a: float | None, b: float | None) -> object:
    if a is None or b is None or not (a == a and b == b) or a == b:
        return "" if a is None or b is None else "the same"
    text = f"{(b - a) / abs(a):+.1%}" if a else f"{b - a:+.4g}"
    if a > 0 and b / a >= MANY:
        text = f"{b / a:.3g} times"
    good = figure.better * (b - a) if abs(b - a) > NOISE * abs(a) else 0
    kind = "better" if good > 0 else "worse" if good < 0 else ""
    return Raw(f'<span class="{kind}">{text}{" " + kind if kind else ""}</span>')


ELSEWHERE = ("run.dir", "checkpoint.dir")
"""Two runs always differ in these."""


def settings(stories: Sequence[RunStory]) -> list[list[Any]]:
    """Fields in which the runs differ, with each one's value."""
    names = dict.fromkeys(name for story in stories for name in story.config)
    rows = [
        [name, *(shown(story.config.get(name, "")) for story in stories)]
        for name in names
        if name not in ELSEWHERE
    ]
    return [row for row in rows if len({str(value) for value in row[1:]}) > 1]


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "empty" if value == "" else str(value)

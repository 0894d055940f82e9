"""The plans of a search as one offline HTML page: memory against time, the frontier, memory by kind, flags.

A plan is on the frontier if no other plan takes less memory and less time. Formats only: the numbers are
estimate.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fsdp.base.bars import bars
from fsdp.base.html import chip, code, document, header, joined, render, section
from fsdp.base.palette import kind_colour
from fsdp.base.units import byte_size, seconds
from fsdp.plan.estimate import Plan, gib
from fsdp.plan.report import flags_of

MILLION, THOUSAND = 10**6, 10**3
MOST_BARS = 12
PLOT = (
    "Each point is a plan: down is faster, left is smaller. The line joins the frontier: no other plan is "
    "both faster and smaller. A hollow point does not fit. A point shows its flags under the pointer; a "
    "click marks its row."
)
MEMORY = "The peak of a step by kind, of the plans on the frontier that fit; the line is the device's memory."


@dataclass(frozen=True)
class Point:
    """A plan and its place in the table, from 1."""

    number: int
    plan: Plan
    on_frontier: bool

    @property
    def time(self) -> float:
        return time_of(self.plan)


def time_of(plan: Plan) -> float:
    """Seconds that all ranks together take for a million tokens, or a thousand samples."""
    amount = MILLION if plan.tokens_per_sample else THOUSAND
    return amount / (plan.samples_s * (plan.tokens_per_sample or 1))


def frontier(plans: Sequence[Plan]) -> list[Plan]:
    """From the smallest to the fastest. Of equal plans the first."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda one: (one.needed, time_of(one))):
        if not found or time_of(plan) < time_of(found[-1]):
            found.append(plan)
    return found


def page(plans: Sequence[Plan], lines: Sequence[str], flags: Sequence[str]) -> str:
    """`lines`: what the search was for; `flags`: those that were given."""
    best = frontier([plan for plan in plans if plan.fits] or plans)
    points = [Point(nth, plan, plan in best) for nth, plan in enumerate(plans, start=1)]
    unit = "a million tokens" if plans[0].tokens_per_sample else "a thousand samples"
    body = [
        header("plan: memory and time", lines=lines, flags=flags),
        section("Memory against time", _plot(points, unit), PLOT),
        section("Memory by kind", _bars(points), MEMORY),
        section("Plans", _table(points, unit), _common_line(points)),
    ]
    return document("plan", joined(body))


# ---------------------------------------------------------------- the plot


def _plot(points: Sequence[Point], unit: str) -> Markup:
    limit = points[0].plan.rates.memory / (1 + points[0].plan.margin)
    right = max(limit, *(point.plan.needed for point in points)) * 1.04
    top = max(point.time for point in points) * 1.06
    line = sorted((point for point in points if point.on_frontier), key=lambda point: point.plan.needed)

    def x(size: float) -> float:
        return size / right * 100

    def y(time: float) -> float:
        return 100 - time / top * 100

    return render(
        "plan/templates/frontier.html",
        unit=f"seconds for {unit}",
        points=[
            {
                "left": f"{x(point.plan.needed):.2f}",
                "top": f"{y(point.time):.2f}",
                "kind": _kind(point),
                "number": point.number,
                "title": f"{gib(point.plan.needed):.1f} GiB, {seconds(point.time)}: {flags_of(point.plan)}",
            }
            for point in points
        ],
        line=" ".join(f"{x(p.plan.needed) * 10:.1f},{y(p.time) * 10:.1f}" for p in line),
        limit=f"{x(limit) * 10:.1f}",
        xs=[(f"{x(value * 2**30):.2f}", f"{value:g}") for value in _ticks(right / 2**30)],
        ys=[(f"{y(value):.2f}", f"{value:g}") for value in _ticks(top)],
    )


def _kind(point: Point) -> str:
    if not point.plan.fits:
        return "misfit"
    return "frontier" if point.on_frontier else "fits"


def _ticks(end: float) -> list[float]:
    """Four to eight round numbers from 0 on."""
    step = 10.0**-6
    while end / step > 8:
        step *= 2 if str(f"{step:e}")[0] in "15" else 2.5
    return [float(f"{step * n:.6g}") for n in range(int(end / step) + 1)]


# ---------------------------------------------------------------- bars and table


def _bars(points: Sequence[Point]) -> Markup:
    """Memory beside the kinds is `outside`: what the allocator caches, the driver, the process."""
    chosen = [point for point in points if point.on_frontier and point.plan.fits][:MOST_BARS]
    if not chosen:
        return Markup("")
    rows = {}
    for point in chosen:
        held = {kind: size for kind, size in point.plan.memory.kinds.items() if size > 0}
        rows[f"plan {point.number}"] = {**held, "outside": max(0.0, point.plan.needed - sum(held.values()))}
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row if kind != "outside"))
    labels = {"whole_gradients": "whole gradients", "outside": "allocator, driver, process"}
    limit = chosen[0].plan.rates.memory
    return bars(rows, [*kinds, "outside"], byte_size, labels, colour_of=kind_colour, limit=limit)


def _table(points: Sequence[Point], unit: str) -> Markup:
    common = _common(points)
    rate = "tokens" if points[0].plan.tokens_per_sample else "samples"
    heads = ("", "flags", "peak", f"time for {unit}", "step", f"{rate}/s/GPU", "MFU", "bound by")
    rows = [
        {
            "number": point.number,
            "state": _state(point),
            "flags": [flag for flag in _flags(point.plan) if flag not in common],
            "cells": [
                f"{gib(point.plan.needed):.1f} GiB",
                seconds(point.time),
                seconds(point.plan.step.seconds),
                f"{point.plan.tokens_s:,.0f}",
                f"{point.plan.mfu:.1%}",
                point.plan.step.bound_by,
            ],
        }
        for point in points
    ]
    return render("plan/templates/plans.html", heads=heads, rows=rows)


def _flags(plan: Plan) -> list[str]:
    return [f"--{flag.strip()}" for flag in flags_of(plan).split("--") if flag]


def _common(points: Sequence[Point]) -> set[str]:
    """Flags of all plans; none of a single plan."""
    every = [set(_flags(point.plan)) for point in points]
    return set.intersection(*every) if len(every) > 1 else set()


def _common_line(points: Sequence[Point]) -> Markup:
    common = _common(points)
    shown = [code(flag) for flag in _flags(points[0].plan) if flag in common]
    return joined(["All have", *shown], " ") if shown else Markup("")


def _state(point: Point) -> Markup:
    if not point.plan.fits:
        return chip("too large", "stopped")
    return chip("frontier", "finished") if point.on_frontier else Markup("")

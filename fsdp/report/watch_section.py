"""What the watch recorded: failures and their stacks, late ranks, gradient spikes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from markupsafe import Markup

from fsdp.base.html import chip, details, joined, pre, section, table
from fsdp.base.text import listed
from fsdp.report.watch_records import LateRecord, Spike, VerdictRecord, WatchData

MOST = 24
FEW_SAMPLES = 12


def failures(watched: WatchData, of: str) -> Markup:
    about = "Each with the ranks involved and what to do."
    return section(f"Failures{of}", _verdicts(watched.verdicts), about)


def late_ranks(watched: WatchData, of: str) -> Markup:
    about = "Measured by when a rank arrives at collectives, not by how long they take."
    return section(f"Late ranks{of}", _late(watched.late), about)


def spikes(watched: WatchData, of: str) -> Markup:
    about = "Steps whose gradient norm is far above the usual, with samples of their batch."
    return section(f"Gradient spikes{of}", _spikes(watched.spikes), about)


def date(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _verdicts(verdicts: Sequence[VerdictRecord]) -> Markup:
    if not verdicts:
        return Markup("")
    rows = []
    for one in verdicts[-MOST:]:
        ranks = ", ".join(map(str, one.ranks[:16])) + (f" on {', '.join(one.nodes[:4])}" if one.nodes else "")
        what = joined([part for part in (one.what, one.others) if part], "<br>")
        stacks = f"watch/{one.folder}/" if one.folder else ""
        rows.append([date(one.time), _kind(one), ranks, f"{one.step:,}", what, one.hint, stacks])
    heads = ("time", "kind", "ranks", "step", "description", "what to do", "stacks in")
    found = table(heads, rows, numeric=("step",))
    return joined([found, *(_stacks(one) for one in verdicts if one.stacks)])


def _kind(verdict: VerdictRecord) -> Markup:
    failed = verdict.ended or verdict.kind in ("died", "fault", "exception")
    return chip(verdict.kind, "failed" if failed else "stopped")


def _stacks(verdict: VerdictRecord) -> Markup:
    of = f"rank {verdict.ranks[0]}" if verdict.ranks else "the other ranks"
    return details(f"Stacks of {of}, {verdict.kind} at step {verdict.step:,}", pre(verdict.stacks))


def _late(late: Sequence[LateRecord]) -> Markup:
    if not late:
        return Markup("")
    rows = [
        [one.rank, one.node, f"{one.percent:.0f}%", f"{one.since_step:,}", one.over or "the end of the run"]
        for one in late[-MOST:]
    ]
    return table(("rank", "node", "late by", "since step", "until"), rows, numeric=("late by", "since step"))


def _spikes(found: Sequence[Spike]) -> Markup:
    """The highest, in the order of their steps; NaN counts as the highest."""
    if not found:
        return Markup("")
    highest = sorted(found, key=lambda one: one.grad_norm if one.grad_norm == one.grad_norm else float("inf"))
    rows = [
        [f"{one.step:,}", f"{one.grad_norm:.4g}", f"{one.usual:.4g}", listed(one.samples, FEW_SAMPLES)]
        for one in sorted(highest[-MOST:], key=lambda one: one.step)
    ]
    heads = ("step", "gradient norm", "usual", "samples")
    return table(heads, rows, numeric=heads[:3])

"""What the watch said: what stopped the run and where, who was late, which steps' gradients leapt."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence

from fsdp.report.tables import Raw, cell, chip, section, table
from fsdp.report.watch_records import LateRecord, Spike, VerdictRecord, WatchData

MOST = 24
FEW_SAMPLES = 12


def stopped(watched: WatchData, of: str) -> str:
    about = "Each with the rank that did not come, and what to do."
    return section(f"What stopped it{of}", _verdicts(watched.verdicts), about)


def odd(watched: WatchData, of: str) -> str:
    """What did not stop it."""
    late = "By when a rank arrives at collectives, not by how long they take."
    spikes = "Steps far above the usual, with samples of their batch."
    return section(f"Late ranks{of}", _late(watched.late), late) + section(
        f"Spikes of the gradient{of}", _spikes(watched.spikes), spikes
    )


def moment(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")


def _verdicts(verdicts: Sequence[VerdictRecord]) -> str:
    if not verdicts:
        return ""
    rows = []
    for one in verdicts[-MOST:]:
        who = ", ".join(map(str, one.ranks[:16])) + (f" on {', '.join(one.nodes[:4])}" if one.nodes else "")
        what = Raw("<br>".join(cell(part) for part in (one.what, one.others) if part))
        kept = f"watch/{one.folder}/" if one.folder else ""
        rows.append([moment(one.time), _kind(one), who, f"{one.step:,}", what, one.hint, kept])
    heads = ("when", "kind", "ranks", "step", "what", "what to do", "stacks in")
    return table(heads, rows, numeric=("step",)) + "".join(_stacks(one) for one in verdicts if one.stacks)


def _kind(verdict: VerdictRecord) -> Raw:
    return chip(
        verdict.kind,
        "failed" if verdict.ended or verdict.kind in ("died", "fault", "exception") else "stopped",
    )


def _stacks(verdict: VerdictRecord) -> str:
    of = f"rank {verdict.ranks[0]}" if verdict.ranks else "the other ranks"
    title = f"Stacks of {of}, {verdict.kind} at step {verdict.step:,}"
    return (
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(verdict.stacks)}</pre></details>"
    )


def _late(late: Sequence[LateRecord]) -> str:
    if not late:
        return ""
    rows = [
        [one.rank, one.node, f"{one.percent:.0f}%", f"{one.since_step:,}", one.over or "to the end"]
        for one in late[-MOST:]
    ]
    return table(("rank", "node", "late by", "since step", "until"), rows, numeric=("late by", "since step"))


def _spikes(spikes: Sequence[Spike]) -> str:
    """The highest, in the order of the steps; what is no number is higher than all."""
    if not spikes:
        return ""
    highest = sorted(
        spikes, key=lambda one: one.grad_norm if one.grad_norm == one.grad_norm else float("inf")
    )[-MOST:]
    rows = [
        [f"{one.step:,}", f"{one.grad_norm:.4g}", f"{one.usual:.4g}", _few(one.samples)]
        for one in sorted(highest, key=lambda one: one.step)
    ]
    return table(
        ("step", "gradient norm", "usual", "samples"), rows, numeric=("step", "gradient norm", "usual")
    )


def _few(samples: Sequence[int]) -> str:
    more = f" and {len(samples) - FEW_SAMPLES} more" if len(samples) > FEW_SAMPLES else ""
    return ", ".join(map(str, samples[:FEW_SAMPLES])) + more

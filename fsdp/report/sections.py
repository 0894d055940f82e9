"""The sections of the page, in their order: outcome, differences, failures, curves, time, late ranks, spikes,
memory, samples, checkpoints, starts, configuration.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup, escape

from fsdp.base.text import counted, listed
from fsdp.base.units import byte_size, seconds
from fsdp.config import changed_flags, shown_value
from fsdp.report import comparison
from fsdp.report.bars import bars, shown_ranks
from fsdp.report.chart import chart
from fsdp.report.comparison import loss_text
from fsdp.report.html import (
    chip,
    details,
    div,
    document,
    header,
    joined,
    paragraph,
    pre,
    render,
    section,
    span,
    table,
    tiles,
)
from fsdp.report.palette import colour, kind_colour
from fsdp.report.run_data import RunData, Start
from fsdp.report.series import Series
from fsdp.report.watch_records import SHOWN, STEP_PHASES, WAITING, VerdictRecord

MOST_CHARTS, MOST_FOLDED = 12, 100
"""Charts shown, and those folded after them: drawing 20,000 took 17 s."""
MOST_ROWS = 24
PHASE_LABELS = {
    WAITING: "exposed communication", "data": "waiting for data", "reduce": "norm and loss",
    "record": "records", "evaluate": "evaluation", "save": "saves",
}  # fmt: skip
CHARTS: tuple[tuple[str, str, bool, tuple[tuple[str, str], ...]], ...] = (
    # title, unit, smoothed, (series, its label)
    ("Loss", "", True, (("loss", "training"), ("eval_loss", "held out"))),
    ("Held-out accuracy", "%", False, (("eval_accuracy", "accuracy"),)),
    ("Throughput", "per second", True, (("per_s", "all ranks"),)),
    ("Step time", "s", False, (("step_time_s", "step"), ("data_wait_s", "waiting for data"))),
    ("MFU", "%", False, (("mfu", "of the device's peak"),)),
    ("Gradient norm", "", True, (("grad_norm", "norm"),)),
    ("Learning rate", "", False, (("lr", "rate"),)),
    ("Peak memory", "GiB", False, (("max_mem_gib", "rank 0"),)),
)
NOT_CHARTED = {"samples", "tokens", "epoch"}


@dataclass(frozen=True)
class Sample:
    """Texts of the trained language model, by how they were drawn; or the reason why there are none."""

    prompt: str = ""
    texts: Sequence[tuple[str, str]] = field(default=())
    why_not: str = ""
    refused: str = ""
    """The whole error line, if the run's code must be named by --trust-code before it is imported."""


def page(runs: Sequence[RunData], samples: Sequence[Sample] = ()) -> str:
    body = [_head(runs)]
    if len(runs) > 1:
        heads = ["", *(run.name for run in runs), "difference"]
        figures = table(heads, comparison.figures(runs), numeric=heads[1:])
        about = (
            "In brackets the 95% interval of a median over the steps. Better, worse: the two do not overlap."
        )
        fields = table(["setting", *heads[1:-1]], comparison.settings(runs), nothing="none")
        body += [section("Differences", figures, about), section("Different settings", fields)]
    body += [_titled("Failures", run, runs, _verdicts(run.watched.verdicts)) for run in runs]
    body.append(section("Curves", _curves(runs)))
    for run, sample in zip(runs, [*samples, *[Sample()] * len(runs)], strict=False):
        body += [_titled(title, run, runs, content) for title, content in _contents(run, sample)]
    body.append(_configuration(runs))
    title = " and ".join(run.name for run in runs)
    return document(f"{title} · report", joined(body))


def _titled(title: str, run: RunData, runs: Sequence[RunData], content: str) -> Markup:
    return section(f"{title}: {run.name}" if len(runs) > 1 else title, content)


def _contents(run: RunData, sample: Sample) -> Iterator[tuple[str, Markup]]:
    yield "Where the time goes", _time(run)
    late = [
        [one.rank, one.node, f"{one.percent:.0f}%", f"{one.since_step:,}", one.over or "the end of the run"]
        for one in run.watched.late[-MOST_ROWS:]
    ]
    yield "Late ranks", _table(("rank", "node", "late by", "since step", "until"), late)
    yield "Gradient spikes", _spikes(run)
    yield "Memory", _memory(run)
    yield "Samples", _sample(sample)
    yield "Checkpoints", _checkpoints(run)
    yield "Starts", _starts(run)


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    return table(heads, rows) if rows else Markup("")


# ---------------------------------------------------------------- outcome


def _head(runs: Sequence[RunData]) -> Markup:
    if len(runs) == 1:
        return joined([_headline(runs[0], runs[0].name, "header"), tiles(_tiles(runs[0]))])
    heads = [_headline(run, joined([span("", colour(nth)), run.name]), "div") for nth, run in enumerate(runs)]
    return joined([header(" and ".join(run.name for run in runs)), div(joined(heads), "runs")])


def _headline(run: RunData, name: str, element: str) -> Markup:
    names = ("model.name", "model.preset", "data.name")
    facts = [str(run.config[name]) for name in names if run.config.get(name)]
    state, why = chip("never started", "killed"), ""
    if run.starts:
        last = run.starts[-1]
        nodes = f"{len(last.nodes)} nodes" if len(last.nodes) > 1 else "one node"
        facts.append(f"{counted(last.ranks, 'rank')} on {nodes} by {last.launcher}")
        state = chip(last.outcome, last.outcome)
        why = last.why if last.outcome in ("failed", "killed", "stopped") else ""
    flags = changed_flags(run.config)
    return header(name, state, lines=[" · ".join(facts), why], flags=flags, notes=run.notes, name=element)


def _tiles(run: RunData) -> Iterator[tuple[str, object, str]]:
    get, total = run.series.get, run.config.get("train.steps")
    epochs = get("epoch")
    parts = [f"of {total:,}" if total else "", f"epoch {epochs.last:.2f}" if epochs else ""]
    yield "steps", f"{run.last_step:,}", ", ".join(filter(None, parts))
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if series := get(name):
            lowest = min(series.finite.values, default=None)
            yield label, loss_text(series.last), "" if lowest is None else f"lowest {loss_text(lowest)}"
    if series := get("eval_accuracy"):
        yield "held-out accuracy", f"{series.last:.2%}", f"best {max(series.finite.values, default=0.0):.2%}"
    if series := get("step_time_s"):
        waits = get("data_wait_s")
        share = f"{waits.median / series.median:.1%} waiting for data" if waits and series.median > 0 else ""
        yield "median step", seconds(series.median), share
    if series := get("per_s"):
        unit = "tokens" if (tokens := get("tokens")) and tokens.last > 0 else "samples"
        yield f"{unit} per second", f"{series.median:,.0f}", "median"
    if series := get("mfu"):
        yield "MFU", f"{series.median:.1%}", "median"
    if series := get("max_mem_gib"):
        yield "peak memory", f"{max(series.finite.values, default=0.0):.2f} GiB", "rank 0"
    counts = {kind: sum(start.outcome == kind for start in run.starts) for kind in ("failed", "killed")}
    ends = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield "starts", str(len(run.starts)), ends or "no failures"


# ---------------------------------------------------------------- failures, time, memory


def _verdicts(verdicts: Sequence[VerdictRecord]) -> Markup:
    rows, stacks = [], []
    for verdict in verdicts[-MOST_ROWS:]:
        failed = verdict.ended or verdict.kind in ("died", "fault", "exception")
        nodes = f" on {listed(verdict.nodes, 4)}" if verdict.nodes else ""
        rows.append(
            [
                _date(datetime.datetime.fromtimestamp(verdict.time, datetime.UTC).isoformat()),
                chip(verdict.kind, "failed" if failed else "stopped"),
                f"{listed(verdict.ranks, 16)}{nodes}",
                f"{verdict.step:,}",
                joined(filter(None, (verdict.what, verdict.others)), "<br>"),
                verdict.hint,
                f"watch/{verdict.folder}/" if verdict.folder else "",
            ]
        )
        if verdict.stacks:
            who = f"rank {verdict.ranks[0]}" if verdict.ranks else "the other ranks"
            title = f"Stacks of {who}, {verdict.kind} at step {verdict.step:,}"
            stacks.append(details(title, pre(verdict.stacks)))
    heads = ("time", "kind", "ranks", "step", "description", "what to do", "stacks in")
    return joined([_table(heads, rows), *stacks])


def _time(run: RunData) -> Markup:
    by_rank, course = run.watched.by_rank, run.watched.course
    if not by_rank:
        return Markup("")
    # a step's phases always, so that a colour means the same in every run; others from a thousandth on
    total = sum(sum(times.values()) for times in by_rank.values())
    share = {phase: sum(times[phase] for times in by_rank.values()) / (total or 1) for phase in SHOWN}
    phases = [phase for phase in SHOWN if phase in STEP_PHASES or share[phase] >= 0.001]
    ranks = shown_ranks(list(by_rank), sorted(by_rank, key=lambda rank: by_rank[rank][WAITING]))
    shown = {f"rank {rank}": {phase: by_rank[rank][phase] for phase in phases} for rank in ranks}
    about = paragraph(
        "Mean step on each rank. Exposed communication: waiting in collectives, for the network or a slower "
        "rank. The rank with much less of it than the others is the one they wait for.",
        "about",
    )
    lines = {PHASE_LABELS.get(phase, phase): course[phase].scaled(1e3) for phase in STEP_PHASES}
    over_steps = chart("Over the steps, mean of the ranks", lines, "ms per step", restarts=_restarts(run))
    if len(course[WAITING]) < 2:
        over_steps = Markup("")
    return joined([about, bars(shown, phases, seconds, PHASE_LABELS), div(over_steps, "under-bars")])


def _spikes(run: RunData) -> Markup:
    """The highest, in the order of their steps; NaN counts as the highest."""
    size = {
        spike: spike.grad_norm if spike.grad_norm == spike.grad_norm else float("inf")
        for spike in run.watched.spikes
    }
    highest = sorted(sorted(size, key=size.__getitem__)[-MOST_ROWS:], key=lambda spike: spike.step)
    rows = [
        [f"{spike.step:,}", f"{spike.grad_norm:.4g}", f"{spike.usual:.4g}", listed(spike.samples, 12)]
        for spike in highest
    ]
    return _table(("step", "gradient norm", "usual", "samples"), rows)


def _memory(run: RunData) -> Markup:
    """Of a profiled run: each rank's tensors at their peak, by kind."""
    if not run.peaks:
        return Markup("")
    totals = {rank: sum(kinds.values()) for rank, kinds in run.peaks.items()}
    ranks = shown_ranks(list(totals), sorted(totals, key=lambda rank: -totals[rank]))
    kinds = dict.fromkeys(kind for rank in ranks for kind in run.peaks[rank])
    shown = {f"rank {rank}": run.peaks[rank] for rank in ranks}
    return bars(shown, list(kinds), byte_size, colour_of=kind_colour)


def _sample(sample: Sample) -> Markup:
    if sample.why_not:
        return paragraph(sample.why_not, "none")
    size = len(sample.prompt)
    texts = [
        Markup('<figure class="text"><figcaption>{}</figcaption><pre><b>{}</b>{}</pre></figure>').format(
            kind, text[:size], text[size:]
        )
        for kind, text in sample.texts
    ]
    return div(joined(texts), "texts") if texts else Markup("")


# ---------------------------------------------------------------- curves


def _restarts(run: RunData) -> list[int]:
    return [start.from_step for start in run.starts if start.from_step]


def _curves(runs: Sequence[RunData]) -> Markup:
    charted = {name for *_, series in CHARTS for name, _ in series} | NOT_CHARTED
    others = dict.fromkeys(name for run in runs for name in run.series if name not in charted)
    drawn = [*CHARTS, *((name, "", False, ((name, name),)) for name in others)][
        : MOST_CHARTS + MOST_FOLDED + len(CHARTS)
    ]
    charts = [made for spec in drawn if (made := _chart(runs, *spec))]
    shown, folded = charts[:MOST_CHARTS], charts[MOST_CHARTS : MOST_CHARTS + MOST_FOLDED]
    if not shown:
        return paragraph("no step was recorded", "none")
    dashed = "Dashed line: the run was resumed at this step." if len(runs) == 1 and _restarts(runs[0]) else ""
    parts = [paragraph(dashed, "about") if dashed else "", div(joined(shown), "curves")]
    if folded:
        left_out = len(others) + len(shown) - len(drawn)
        note = f"; {left_out:,} more are in metrics.jsonl" if len(drawn) < len(CHARTS) + len(others) else ""
        parts.append(details(f"{counted(len(folded), 'further curve')}{note}", div(joined(folded), "curves")))
    return joined(parts)


def _chart(
    runs: Sequence[RunData], title: str, unit: str, smooth: bool, series: Sequence[tuple[str, str]]
) -> Markup:
    lines: dict[str, Series] = {}
    for name, label in series:
        for run in runs:
            parts = [run.name] if len(runs) > 1 else []
            parts += [label] if len(series) > 1 or len(runs) == 1 else []
            if name in run.series:
                lines[", ".join(parts)] = run.series[name]
    if unit == "%":
        lines = {label: one.scaled(100) for label, one in lines.items()}
    elif unit == "s" and lines and max(one.median for one in lines.values()) < 1:
        lines, unit = {label: one.scaled(1e3) for label, one in lines.items()}, "ms"
    return chart(title, lines, unit, restarts=_restarts(runs[0]) if len(runs) == 1 else (), smooth=smooth)


# ---------------------------------------------------------------- checkpoints, starts, configuration


def _checkpoints(run: RunData) -> Markup:
    rows: list[list[object]] = []
    for listing in run.checkpoints:
        manifest, save = listing.manifest, run.saves.get(listing.step)
        times = (seconds(save.write_s), seconds(save.stall_s)) if save else ("", "")
        size = writers = epoch = ""
        if manifest is not None:
            size = byte_size(sum(count for count, _ in manifest.files.values()))
            writers = f"{counted(manifest.ranks, 'rank')}, {manifest.mesh}"
            epoch = f", epoch {manifest.metrics['epoch']:.2f}" if "epoch" in manifest.metrics else ""
        state = chip("complete", "finished") if manifest is not None else chip("incomplete", "failed")
        reason = f"{manifest.reason}{epoch}" if manifest is not None else listing.detail
        rows.append([f"{listing.step:,}", size, *times, writers, state, reason])
    heads = ("step", "size", "write time", "training stalled", "saved by", "state", "reason")
    return table(heads, rows, numeric=heads[:4], nothing="no checkpoint")


def _starts(run: RunData) -> Markup:
    heads = ["time", "launcher", "ranks", "from step", "to step", "outcome", "reason", "changed fields"]
    rows = [_start(start) for start in run.starts]
    if not any(start.changed for start in run.starts):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return joined(
        [_timeline(run), table(heads, rows, numeric=("from step", "to step"), nothing="never started")]
    )


def _start(start: Start) -> list[object]:
    nodes = listed(start.nodes)
    return [
        _date(start.time),
        start.launcher,
        f"{start.ranks} on {nodes}" if nodes else str(start.ranks),
        f"{start.from_step:,}",
        "" if start.to_step is None else f"{start.to_step:,}",
        chip(start.outcome, start.outcome),
        start.why,
        joined(map(escape, start.changed), "<br>"),
    ]


def _date(text: str) -> str:
    """ISO 8601 with a space in place of T."""
    return text.replace("T", " ").replace("+00:00", " UTC") if len(text) > 18 else text


def _timeline(run: RunData) -> Markup:
    """Each start as a bar over its steps."""
    end = max([run.last_step, *(start.to_step or start.from_step for start in run.starts)], default=0)
    if len(run.starts) < 2 or not end:
        return Markup("")
    ends = [following.from_step for _, following in pairwise(run.starts)] + [run.last_step]
    reached = [
        step if start.to_step is None else start.to_step for start, step in zip(run.starts, ends, strict=True)
    ]
    bars = [
        {
            "kind": start.outcome,
            "left": f"{start.from_step / end * 100:.2f}",
            "width": f"{max(0.4, (last - start.from_step) / end * 100):.2f}",
            "title": f"start {start.number}: steps {start.from_step:,} to {last:,}, {start.outcome}",
        }
        for start, last in zip(run.starts, reached, strict=True)
    ]
    return render("timeline.html", bars=bars[:MOST_ROWS], end=f"{end:,}")


def _configuration(runs: Sequence[RunData]) -> Markup:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [[name, *(shown_value(run.config.get(name, "")) for run in runs)] for name in names]
    if not rows:
        return Markup("")
    changed = {name for run in runs for name in run.changed}
    heads = ("setting", *(("value",) if len(runs) == 1 else [run.name for run in runs]))
    short = table(heads, [row for row in rows if row[0] in changed], nothing="Every field has its default.")
    every = details(f"All {len(rows)} fields", table(heads, rows))
    return section("Configuration", joined([short, every]), "Fields that differ from their default.")

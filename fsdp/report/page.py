"""The page of one run, of two runs side by side (two_runs.py), or of more as a table (sweep.py).

Order: outcome, failures, curves, time, late ranks, spikes, plan, memory, profile, samples, checkpoints,
starts, configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path

from markupsafe import Markup

from fsdp.base.html import (
    chip,
    details,
    div,
    document,
    header,
    joined,
    paragraph,
    render,
    section,
    span,
    table,
    tiles,
)
from fsdp.base.palette import colour
from fsdp.base.text import counted, listed
from fsdp.base.units import byte_size, seconds
from fsdp.config import changed_flags, shown_value
from fsdp.memory import profile_page
from fsdp.report import sweep, two_runs
from fsdp.report.compare import loss_text
from fsdp.report.curves import Marks, chart
from fsdp.report.plan_section import ABOUT as PLAN
from fsdp.report.plan_section import planned
from fsdp.report.profile_files import ABOUT as PROFILE
from fsdp.report.profile_files import profile_body
from fsdp.report.profile_section import memory_by_rank
from fsdp.report.run_data import RunData, Start
from fsdp.report.sample_section import SampleSection
from fsdp.report.series import Series
from fsdp.report.timing import ABOUT as TIME
from fsdp.report.timing import time_by_rank
from fsdp.report.watch_section import failures, late_ranks, spikes

KNOWN = {
    "loss", "eval_loss", "eval_accuracy", "per_s", "step_time_s", "data_wait_s", "grad_norm", "lr",
    "max_mem_gib", "mfu", "samples", "tokens", "epoch",
}  # fmt: skip
MOST_CHARTS = 12
MOST_FOLDED = 100
"""Of the charts after MOST_CHARTS."""
THINNED = 720
MEMORY = (
    "Peak of the profiled steps on each rank, by kind; the rank with the highest peak over time; then the "
    "peak of each phase."
)
SCRIPTS = ("report/templates/page.js", profile_page.SCRIPT)
MOST_SIDE_BY_SIDE = 2


def page(
    runs: Sequence[RunData],
    samples: Sequence[SampleSection] = (),
    *,
    folder: Path | None = None,
    refresh_s: int = 0,
) -> str:
    """`folder`: where the page is written, for its links; None if it is not a file. `refresh_s`: the browser
    loads it again; 0 for a page that stays.
    """
    if len(runs) > MOST_SIDE_BY_SIDE:
        title, body = f"{len(runs)} runs", sweep.sections(runs, [state_of(run) for run in runs])
    else:
        title, body = " and ".join(run.name for run in runs), _body(runs, samples, folder)
    return document(f"{title} · report", body, scripts=SCRIPTS, refresh_s=refresh_s)


def _body(runs: Sequence[RunData], samples: Sequence[SampleSection], folder: Path | None) -> Markup:
    body = [_header(runs), *([two_runs.sections(runs)] if len(runs) > 1 else [])]
    body += [failures(run.watched, _of(run, runs)) for run in runs]
    body += [section("Curves", _curves(runs), _about_curves(runs))]
    for run, sample in zip(runs, [*samples, *[SampleSection()] * len(runs)], strict=False):
        body += _sections(run, sample, _of(run, runs), folder)
    body.append(_configuration(runs))
    return joined(body)


def _sections(run: RunData, sample: SampleSection, of: str, folder: Path | None) -> Iterator[Markup]:
    yield section(f"Where the time goes{of}", time_by_rank(run.watched.timing, _marks(run)), TIME)
    yield late_ranks(run.watched, of)
    yield spikes(run.watched, of)
    yield section(f"Planned and measured{of}", planned(run), PLAN)
    yield section(f"Memory{of}", memory_by_rank(run.accounts), MEMORY)
    yield section(f"Time of the profiled steps{of}", profile_body(run.profile, folder), PROFILE)
    yield _samples(sample, of)
    yield section(f"Checkpoints{of}", _checkpoints(run))
    yield section(f"Starts{of}", _starts(run))


def _of(run: RunData, runs: Sequence[RunData]) -> str:
    return f": {run.name}" if len(runs) > 1 else ""


def _marks(run: RunData) -> Marks:
    return Marks([start.from_step for start in run.starts if start.from_step])


# ---------------------------------------------------------------- outcome


def _header(runs: Sequence[RunData]) -> Markup:
    if len(runs) == 1:
        return joined([_headline(runs[0], runs[0].name, "header"), _tiles(runs[0])])
    title = header(" and ".join(run.name for run in runs))
    heads = [_headline(run, joined([span("", colour(nth)), run.name]), "div") for nth, run in enumerate(runs)]
    return joined([title, div(joined(heads), "runs")])


def _headline(run: RunData, name: str, element: str) -> Markup:
    last = run.starts[-1] if run.starts else None
    why = last.why if last and last.outcome in ("failed", "killed", "stopped") else ""
    return header(
        name,
        state_of(run),
        lines=[_line(run), why],
        flags=changed_flags(run.config),
        notes=run.notes,
        name=element,
    )


def state_of(run: RunData) -> Markup:
    last = run.starts[-1] if run.starts else None
    return chip(last.outcome, last.outcome) if last else chip("never started", "killed")


def _line(run: RunData) -> str:
    get = run.config.get
    model = " ".join(str(get(name, "")) for name in ("model.name", "model.preset")).strip()
    parts = [model, str(get("data.name", "")), *([_where(run.starts[-1])] if run.starts else [])]
    return " · ".join(part for part in parts if part)


def _where(start: Start) -> str:
    nodes = f"{len(start.nodes)} nodes" if len(start.nodes) > 1 else "one node"
    return f"{counted(start.ranks, 'rank')} on {nodes} by {start.launcher}"


Tile = tuple[str, object, str]


def _tiles(run: RunData) -> Markup:
    total = run.config.get("train.steps") or 0
    steps: Tile = ("steps", f"{run.last_step:,}", _of_the_run(run, total))
    starts: Tile = ("starts", str(len(run.starts)), _failed_starts(run))
    return tiles([steps, *_quality_tiles(run), *_speed_tiles(run), starts])


def _of_the_run(run: RunData, total: int) -> str:
    epochs = run.series.get("epoch")
    parts = [f"of {total:,}" if total else "", f"epoch {epochs.last:.2f}" if epochs else ""]
    return ", ".join(filter(None, parts))


def _quality_tiles(run: RunData) -> Iterator[Tile]:
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if series := run.series.get(name):
            finite = series.finite
            under = f"lowest {loss_text(float(finite.lowest.min()))}" if len(finite) else ""
            yield label, loss_text(series.last), under
    if series := run.series.get("eval_accuracy"):
        best = f"best {series.finite.highest.max():.2%}" if len(series.finite) else ""
        yield "held-out accuracy", f"{series.last:.2%}", best


def _speed_tiles(run: RunData) -> Iterator[Tile]:
    get = run.series.get
    if series := get("step_time_s"):
        waits = get("data_wait_s")
        share = f"{waits.median / series.median:.1%} waiting for data" if waits and series.median > 0 else ""
        yield "median step", seconds(series.median), share
    if series := get("per_s"):
        yield f"{_unit(run)} per second", f"{series.median:,.0f}", "median"
    if series := get("mfu"):
        yield "MFU", f"{series.median:.1%}", "median"
    if series := get("max_mem_gib"):
        peak = f"{series.finite.highest.max():.2f} GiB" if len(series.finite) else "?"
        yield "peak memory", peak, "rank 0"


def _failed_starts(run: RunData) -> str:
    counts = {kind: sum(start.outcome == kind for start in run.starts) for kind in ("failed", "killed")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no failures"


def _unit(run: RunData) -> str:
    return "tokens" if (tokens := run.series.get("tokens")) and tokens.last > 0 else "samples"


# ---------------------------------------------------------------- curves


def _about_curves(runs: Sequence[RunData]) -> str:
    longest = max((len(series) for run in runs for series in run.series.values()), default=0)
    sentences = []
    if any(start.from_step for run in runs for start in run.starts):
        sentences.append("Dashed line: the run was resumed at this step.")
    if longest > THINNED:
        sentences.append("Shaded: the lowest and highest values of the steps that one point stands for.")
    return " ".join(sentences)


def _curves(runs: Sequence[RunData]) -> Markup:
    several = len(runs) > 1
    marks = Marks() if several else _marks(runs[0])

    def lines(*names: tuple[str, str]) -> dict[str, Series]:
        return {
            (f"{run.name}{', ' + label if len(names) > 1 else ''}" if several else label): run.series[name]
            for name, label in names
            for run in runs
            if name in run.series
        }

    def draw(title: str, unit: str, *names: tuple[str, str], smooth: bool = False) -> Markup:
        scaled, scaled_unit = _scaled(lines(*names), unit)
        return chart(title, scaled, scaled_unit, marks=marks, smooth=smooth)

    charts = [
        draw("Loss", "", ("loss", "training"), ("eval_loss", "held out"), smooth=True),
        draw("Held-out accuracy", "%", ("eval_accuracy", "accuracy")),
        draw("Throughput", f"{_unit(runs[0])} per second", ("per_s", "all ranks"), smooth=True),
        draw("Step time", "s", ("step_time_s", "step"), ("data_wait_s", "waiting for data")),
        draw("MFU", "%", ("mfu", "of the device's peak")),
        draw("Gradient norm", "", ("grad_norm", "norm"), smooth=True),
        draw("Learning rate", "", ("lr", "rate")),
        draw("Peak memory", "GiB", ("max_mem_gib", "rank 0")),
    ]
    others = dict.fromkeys(name for run in runs for name in run.series if name not in KNOWN)
    waiting = iter(others)
    drawn = filter(None, chain(charts, (draw(name, "", (name, name)) for name in waiting)))
    shown, folded = list(islice(drawn, MOST_CHARTS)), list(islice(drawn, MOST_FOLDED))
    if not shown:
        return paragraph("no step was recorded", "none")
    return joined([div(joined(shown), "curves"), _further(folded, left_out=sum(1 for _ in waiting))])


def _further(folded: Sequence[Markup], left_out: int) -> Markup:
    """Folded, and a note where there are too many for a page: drawing 20,000 took 17 s."""
    if not folded:
        return Markup("")
    note = f"; {left_out:,} more are in metrics.jsonl" if left_out else ""
    return details(f"{counted(len(folded), 'further curve')}{note}", div(joined(folded), "curves"))


def _scaled(lines: dict[str, Series], unit: str) -> tuple[dict[str, Series], str]:
    """Shares in percent; short times in milliseconds."""
    factor = 100.0 if unit == "%" else 1.0
    if unit == "s" and lines and max(series.median for series in lines.values()) < 1:
        factor, unit = 1e3, "ms"
    if factor == 1:
        return lines, unit
    return {name: one.scaled(factor) for name, one in lines.items()}, unit


# ---------------------------------------------------------------- samples, checkpoints, starts


def _samples(sample: SampleSection, of: str) -> Markup:
    if sample.why_not and of:
        return Markup("")
    return section(f"Samples{of}", paragraph(sample.why_not, "none") if sample.why_not else sample.body)


def _checkpoints(run: RunData) -> Markup:
    rows: list[list[object]] = []
    for found in run.checkpoints:
        manifest, save = found.manifest, run.saves.get(found.step)
        times = (seconds(save.write_s), seconds(save.stall_s)) if save else ("", "")
        if manifest is None:
            rows.append([f"{found.step:,}", "", *times, "", chip("incomplete", "failed"), found.detail])
            continue
        total = byte_size(sum(count for count, _ in manifest.files.values()))
        writers = f"{counted(manifest.ranks, 'rank')}, {manifest.mesh}"
        state = chip("complete", "finished")
        epoch = f", epoch {manifest.metrics['epoch']:.2f}" if "epoch" in manifest.metrics else ""
        rows.append([f"{found.step:,}", total, *times, writers, state, manifest.reason + epoch])
    heads = ("step", "size", "write time", "training stalled", "saved by", "state", "reason")
    return table(heads, rows, numeric=heads[:4], nothing="no checkpoint")


def _starts(run: RunData) -> Markup:
    heads = ["time", "launcher", "ranks", "from step", "to step", "outcome", "reason", "changed fields"]
    rows = [_start(start) for start in run.starts]
    if not any(start.changed for start in run.starts):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    starts = table(heads, rows, numeric=("from step", "to step"), nothing="never started")
    return joined([_timeline(run), starts])


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
        joined(start.changed, "<br>"),
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
    bars = [
        _bar(start, following if start.to_step is None else start.to_step, end)
        for start, following in zip(run.starts, ends, strict=True)
    ]
    return render("report/templates/timeline.html", bars=bars[:24], end=f"{end:,}")


def _bar(start: Start, reached: int, end: int) -> dict[str, str]:
    return {
        "kind": start.outcome,
        "left": f"{start.from_step / end * 100:.2f}",
        "width": f"{max(0.4, (reached - start.from_step) / end * 100):.2f}",
        "title": f"start {start.number}: steps {start.from_step:,} to {reached:,}, {start.outcome}",
    }


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

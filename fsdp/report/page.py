"""The page's sections, in their order: outcome, differences of two runs, failures, curves, time by rank,
memory, samples, checkpoints, starts, configuration.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup

from fsdp.base.text import byte_size, counted, listed, seconds
from fsdp.config import FIELDS, changed_flags, shown_value
from fsdp.report.chart import chart
from fsdp.report.html import bars, colour, document, part, section
from fsdp.report.run_data import TIMED_PHASES, WAITING, RunData, Series

MOST_CHARTS, MOST_FOLDED = 12, 100
"""Charts shown, and those folded after them: drawing 20,000 took 17 s."""
MOST_ROWS = 24
SHOWN_FLAGS = 12
MOST_BARS = 16
"""Ranks that are shown: those that the others wait for, or with the most memory."""
PHASE_LABELS = {
    WAITING: "exposed communication",
    "data": "waiting for data",
    "reduce": "norm and loss",
    "record": "records",
    "evaluate": "evaluation",
    "save": "saves",
}
ChartSpec = tuple[str, str, bool, tuple[tuple[str, str], ...]]
CHARTS: tuple[ChartSpec, ...] = (
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
    texts: Sequence[tuple[str, str]] = ()
    reason: str = ""


def page(runs: Sequence[RunData], samples: Sequence[Sample] = ()) -> str:
    body = [_heads(runs)]
    if len(runs) > 1:
        body += _differences(runs)
    body += [_titled("Failures", run, runs, _faults(run)) for run in runs]
    body.append(section("Curves", _curves(runs)))
    for run, sample in zip(runs, [*samples, *[Sample()] * len(runs)], strict=False):
        body += [_titled(title, run, runs, content) for title, content in _contents(run, sample)]
    body.append(_configuration(runs))
    return document(f"{' and '.join(run.name for run in runs)} · report", Markup("").join(body))


def _titled(title: str, run: RunData, runs: Sequence[RunData], content: str) -> Markup:
    return section(f"{title}: {run.name}" if len(runs) > 1 else title, content)


def _contents(run: RunData, sample: Sample) -> Iterator[tuple[str, Markup]]:
    yield "Where the time goes", _time(run)
    yield "Memory", _memory(run)
    yield "Samples", _sample(sample)
    yield "Checkpoints", _checkpoints(run)
    yield "Starts", _starts(run)


def _chip(text: str, kind: str) -> Markup:
    """A coloured label; `kind` is a class of page.css: finished, failed, stopped, killed, running."""
    return part("element", "span", text, f"chip {kind}")


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


# ---------------------------------------------------------------- outcome


def _heads(runs: Sequence[RunData]) -> Markup:
    if len(runs) == 1:
        tiles = list(_tiles(runs[0]))
        columns = max(5, len(tiles) if len(tiles) <= 8 else -(-len(tiles) // 2))
        return _headline(runs[0], runs[0].name, "header") + part("tiles", tiles, columns)
    heads = Markup("").join(
        _headline(run, part("element", "span", "", colour(nth)) + run.name, "div")
        for nth, run in enumerate(runs)
    )
    title = part("header", "header", " and ".join(run.name for run in runs))
    return title + part("element", "div", heads, "runs")


def _headline(run: RunData, name: str, element: str) -> Markup:
    names = ("model.name", "model.preset", "data.name")
    facts = [str(run.config[name]) for name in names if run.config.get(name)]
    state, why = _chip("never started", "killed"), ""
    if run.starts:
        last = run.starts[-1]
        nodes = f"{len(last.nodes)} nodes" if len(last.nodes) > 1 else "one node"
        facts.append(f"{counted(last.ranks, 'rank')} on {nodes} by {last.launcher}")
        state = _chip(last.outcome, last.outcome)
        why = last.why if last.outcome in ("failed", "killed", "stopped") else ""
    flags, lines = changed_flags(run.config), [" · ".join(facts), why]
    more = flags[SHOWN_FLAGS:]
    return part("header", element, name, state, lines, flags[:SHOWN_FLAGS], more, run.notes)


def _tiles(run: RunData) -> Iterator[tuple[str, object, str]]:
    """(label, value, the small text below it)"""
    get, total = run.series.get, run.config.get("train.steps")
    epochs = get("epoch")
    facts = [f"of {total:,}" if total else "", f"epoch {epochs.last:.2f}" if epochs else ""]
    yield "steps", f"{run.last_step:,}", ", ".join(filter(None, facts))
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if series := get(name):
            yield label, _loss(series.last), f"lowest {_loss(series.lowest)}"
    if series := get("eval_accuracy"):
        yield "held-out accuracy", f"{series.last:.2%}", f"best {series.highest:.2%}"
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
        yield "peak memory", f"{series.highest:.2f} GiB", "rank 0"
    counts = {kind: sum(start.outcome == kind for start in run.starts) for kind in ("failed", "killed")}
    ends = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield "starts", str(len(run.starts)), ends or "no failures"


# ---------------------------------------------------------------- two runs


FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    # label, series, its statistic, text
    ("last loss", "loss", "last", _loss),
    ("lowest loss", "loss", "lowest", _loss),
    ("last held-out loss", "eval_loss", "last", _loss),
    ("lowest held-out loss", "eval_loss", "lowest", _loss),
    ("last held-out accuracy", "eval_accuracy", "last", "{:.2%}".format),
    ("median step", "step_time_s", "median", seconds),
    ("median wait for data", "data_wait_s", "median", seconds),
    ("median per second", "per_s", "median", "{:,.0f}".format),
    ("memory of rank 0", "max_mem_gib", "median", "{:.2f} GiB".format),
)


def _differences(runs: Sequence[RunData]) -> Iterator[Markup]:
    heads = ["", *(run.name for run in runs), "difference"]
    steps = [run.last_step for run in runs]
    rows = [["last step", *map("{:,}".format, steps), _change(*steps)]]
    for label, name, statistic, text in FIGURES:
        values = [getattr(run.series[name], statistic) for run in runs if name in run.series]
        if len(values) == len(runs):
            rows.append([label, *map(text, values), _change(*values)])
    yield section("Differences", part("table", heads, rows, numeric=heads[1:]))


def _change(first: float, second: float) -> str:
    if not (isfinite(first) and isfinite(second)):
        return ""
    if first == second:
        return "the same"
    return f"{(second - first) / abs(first):+.1%}" if first else f"{second - first:+.4g}"


# ---------------------------------------------------------------- failures, time, memory, samples


def _faults(run: RunData) -> Markup:
    rows, stacks = [], []
    for fault in run.faults[-MOST_ROWS:]:
        failed = fault.ended or fault.kind in ("died", "fault", "exception")
        nodes = f" on {listed(fault.nodes, 4)}" if fault.nodes else ""
        rows.append(
            (
                _date(datetime.datetime.fromtimestamp(fault.time, datetime.UTC).isoformat()),
                _chip(fault.kind, "failed" if failed else "stopped"),
                f"{listed(fault.ranks, 16)}{nodes}",
                f"{fault.step:,}",
                Markup("<br>").join(filter(None, (fault.what, fault.others))),
                fault.hint,
                f"watch/{fault.folder}/" if fault.folder else "",
            )
        )
        if fault.stacks:
            rank = f"rank {fault.ranks[0]}" if fault.ranks else "the other ranks"
            title = f"Stacks of {rank}, {fault.kind} at step {fault.step:,}"
            stacks.append(part("details", title, part("element", "pre", fault.stacks)))
    heads = ("time", "kind", "ranks", "step", "description", "what to do", "stacks in")
    return Markup("").join([part("table", heads, rows), *stacks]) if rows else Markup("")


def _time(run: RunData) -> Markup:
    if not run.phases:
        return Markup("")
    colours = {
        phase: colour(nth)
        for nth, phase in enumerate(TIMED_PHASES)
        if any(times[phase] for times in run.phases.values())
    }
    order = sorted(run.phases, key=lambda rank: run.phases[rank][WAITING])
    about = (
        "Mean step on each rank. Exposed communication: waiting in collectives, for the network or a slower "
        "rank. The rank with much less of it than the others is the one they wait for."
    )
    shown = {f"rank {rank}": run.phases[rank] for rank in sorted(order[:MOST_BARS])}
    return part("element", "p", about, "about") + bars(shown, colours, seconds, PHASE_LABELS)


def _memory(run: RunData) -> Markup:
    """Of a profiled run: each rank's tensors at their peak, by kind."""
    if not run.peaks:
        return Markup("")
    order = sorted(run.peaks, key=lambda rank: -sum(run.peaks[rank].values()))
    kinds = dict.fromkeys(kind for peak in run.peaks.values() for kind in peak)
    colours = {kind: colour(nth) for nth, kind in enumerate(kinds)}
    return bars(
        {f"rank {rank}": run.peaks[rank] for rank in sorted(order[:MOST_BARS])}, colours, byte_size, {}
    )


def _sample(sample: Sample) -> Markup:
    if sample.reason:
        return part("element", "p", sample.reason, "none")
    figure = Markup('<figure class="text"><figcaption>{}</figcaption><pre><b>{}</b>{}</pre></figure>')
    size = len(sample.prompt)
    texts = Markup("").join(figure.format(kind, text[:size], text[size:]) for kind, text in sample.texts)
    return part("element", "div", texts, "texts") if texts else Markup("")


# ---------------------------------------------------------------- curves


def _curves(runs: Sequence[RunData]) -> Markup:
    charted = {name for *_, series in CHARTS for name, _ in series} | NOT_CHARTED
    others = dict.fromkeys(name for run in runs for name in run.series if name not in charted)
    known = (spec for spec in CHARTS if any(name in run.series for run in runs for name, _ in spec[3]))
    specs: list[ChartSpec] = [*known, *((name, "", False, ((name, name),)) for name in others)]
    left_out = len(specs) - MOST_CHARTS - MOST_FOLDED
    specs = specs[: MOST_CHARTS + MOST_FOLDED]
    charts = [made for spec in specs if (made := _chart(runs, *spec))]
    if not charts:
        return part("element", "p", "no step was recorded", "none")
    about = "Dashed line: the run was resumed at this step." if len(runs) == 1 and runs[0].restarts else ""
    body = part("element", "p", about, "about") if about else Markup("")
    body += part("element", "div", Markup("").join(charts[:MOST_CHARTS]), "curves")
    if folded := charts[MOST_CHARTS:]:
        note = f"; {left_out:,} more are in metrics.jsonl" if left_out > 0 else ""
        further = part("element", "div", Markup("").join(folded), "curves")
        body += part("details", f"{counted(len(folded), 'further curve')}{note}", further)
    return body


def _chart(
    runs: Sequence[RunData], title: str, unit: str, smooth: bool, series: Sequence[tuple[str, str]]
) -> Markup:
    lines: dict[str, Series] = {}
    for name, label in series:
        for run in runs:
            words = [run.name] if len(runs) > 1 else []
            words += [label] if len(series) > 1 or len(runs) == 1 else []
            if name in run.series:
                lines[", ".join(words)] = run.series[name]
    factor = 1.0
    if unit == "%":
        factor = 100.0
    elif unit == "s" and lines and max(line.median for line in lines.values()) < 1:
        factor, unit = 1e3, "ms"
    lines = {label: line.scaled(factor) for label, line in lines.items()}
    return chart(title, lines, unit, restarts=runs[0].restarts if len(runs) == 1 else (), smooth=smooth)


# ---------------------------------------------------------------- checkpoints, starts, configuration


def _checkpoints(run: RunData) -> Markup:
    rows: list[list[object]] = []
    for listing in run.checkpoints:
        manifest, save = listing.manifest, run.saves.get(listing.step)
        written, stalled = (seconds(save[name]) if save else "" for name in ("write_s", "stall_s"))
        if manifest is None:
            state, reason, size, writers = _chip("incomplete", "failed"), listing.detail, "", ""
        else:
            epoch = f", epoch {manifest.metrics['epoch']:.2f}" if "epoch" in manifest.metrics else ""
            state, reason = _chip("complete", "finished"), f"{manifest.reason}{epoch}"
            size = byte_size(sum(count for count, _ in manifest.files.values()))
            writers = f"{counted(manifest.ranks, 'rank')}, {manifest.mesh}"
        rows.append([f"{listing.step:,}", size, written, stalled, writers, state, reason])
    heads = ("step", "size", "write time", "training stalled", "saved by", "state", "reason")
    return part("table", heads, rows, numeric=heads[:4], nothing="no checkpoint")


def _starts(run: RunData) -> Markup:
    heads = ["time", "launcher", "ranks", "from step", "to step", "outcome", "reason", "changed fields"]
    rows: list[list[object]] = [
        [
            _date(start.time),
            start.launcher,
            f"{start.ranks} on {listed(start.nodes)}" if start.nodes else str(start.ranks),
            f"{start.from_step:,}",
            "" if start.to_step is None else f"{start.to_step:,}",
            _chip(start.outcome, start.outcome),
            start.why,
            Markup("<br>").join(start.changed),
        ]
        for start in run.starts
    ]
    if not any(start.changed for start in run.starts):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    numeric = ("from step", "to step")
    return part("table", heads, rows, numeric=numeric, nothing="never started")


def _date(text: str) -> str:
    """2026-11-20 12:00:00 UTC, with a space in place of T."""
    return text.replace("T", " ").replace("+00:00", " UTC") if len(text) > 18 else text


def _configuration(runs: Sequence[RunData]) -> Markup:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [[name, *(shown_value(run.config.get(name, "")) for run in runs)] for name in names]
    if not rows:
        return Markup("")
    defaults = {name: spec.default for name, spec in FIELDS.items()}
    changed = [
        row for row in rows if any(run.config.get(row[0]) not in (None, defaults.get(row[0])) for run in runs)
    ]
    heads = ("setting", *(("value",) if len(runs) == 1 else [run.name for run in runs]))
    short = part("table", heads, changed, nothing="Every field has its default.")
    every = part("details", f"All {len(rows)} fields", part("table", heads, rows))
    return section("Configuration", short + every, "Fields that differ from their default.")

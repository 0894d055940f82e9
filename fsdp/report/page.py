"""The page's sections, in their order: outcome, differences of two runs, failures, curves, time by rank,
memory, samples, checkpoints, starts, configuration.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup

from fsdp.base.text import byte_size, counted, listed, seconds
from fsdp.config import FIELDS, changed_flags, shown_value
from fsdp.report.chart import bars, chart, colour, document, part, section
from fsdp.report.run_data import EXPOSED, RunData, Series

MOST_CHARTS, MOST_FOLDED = 12, 100
"""Charts shown, and those folded after them: drawing 20,000 took 17 s."""
MOST_ROWS = 24
MOST_BARS = 16
"""Ranks that are shown: those that the others wait for, or with the most memory."""
ChartSpec = tuple[str, str, tuple[tuple[str, str], ...]]
CHARTS: tuple[ChartSpec, ...] = (
    # title, unit, (series, its label)
    ("Loss", "", (("loss", "training"), ("eval_loss", "held out"))),
    ("Held-out accuracy", "%", (("eval_accuracy", "accuracy"),)),
    ("Held-out perplexity", "", (("eval_perplexity", "perplexity"),)),
    ("Throughput", "per second", (("per_s", "all ranks, trained on"), ("positions_per_s", "positions"))),
    ("Padding", "%", (("padding", "of the positions"),)),
    ("Step time", "s", (("step_time_s", "step"), ("data_wait_s", "waiting for data"))),
    ("MFU", "%", (("mfu", "of the device's peak"),)),
    ("Gradient norm", "", (("grad_norm", "norm"),)),
    ("Learning rate", "", (("lr", "rate"),)),
    ("Tokens of the busiest expert", "times the mean", (("expert_load", "largest of all layers"),)),
    ("Peak memory", "GiB", (("max_mem_gib", "rank 0"),)),
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
        body.append(_differences(runs))
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
    yield "Held-out answers", _answers(run)
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
    lines = [" · ".join(facts), why]
    return part("header", element, name, state, lines, changed_flags(run.config), run.notes)


FIGURES: tuple[tuple[str, str, tuple[str, ...], Callable[[float], str]], ...] = (
    # label, series, its statistics, text
    ("training loss", "loss", ("last", "min"), _loss),
    ("held-out loss", "eval_loss", ("last", "min"), _loss),
    ("held-out perplexity", "eval_perplexity", ("last", "min"), _loss),
    ("held-out accuracy", "eval_accuracy", ("last", "max"), "{:.2%}".format),
    ("step", "step_time_s", ("median",), seconds),
    ("waiting for data", "data_wait_s", ("median",), seconds),
    ("throughput", "per_s", ("median",), "{:,.0f}/s".format),
    ("positions", "positions_per_s", ("median",), "{:,.0f}/s".format),
    ("padding", "padding", ("median",), "{:.1%}".format),
    ("MFU", "mfu", ("median",), "{:.1%}".format),
    ("memory of rank 0", "max_mem_gib", ("max",), "{:.2f} GiB".format),
)


def _tiles(run: RunData) -> Iterator[tuple[str, object, str]]:
    """(label, value, the small text below it)"""
    total, epochs = run.config.get("train.steps"), run.series.get("epoch")
    facts = [f"of {total:,}" if total else "", f"epoch {epochs.figure('last'):.2f}" if epochs else ""]
    yield "steps", f"{run.last_step:,}", ", ".join(filter(None, facts))
    for label, name, (first, *more), text in FIGURES:
        if series := run.series.get(name):
            under = [f"{statistic} {text(series.figure(statistic))}" for statistic in more]
            yield label, text(series.figure(first)), ", ".join(under) or first
    counts = {kind: sum(start.outcome == kind for start in run.starts) for kind in ("failed", "killed")}
    ends = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield "starts", str(len(run.starts)), ends or "no failures"


def _differences(runs: Sequence[RunData]) -> Markup:
    heads = ["", *(run.name for run in runs), "difference"]
    steps = [run.last_step for run in runs]
    rows = [["last step", *map("{:,}".format, steps), _change(*steps)]]
    for label, name, statistics, text in FIGURES:
        for statistic in statistics if all(name in run.series for run in runs) else ():
            values = [run.series[name].figure(statistic) for run in runs]
            rows.append([f"{label}, {statistic}", *map(text, values), _change(*values)])
    return section("Differences", part("table", heads, rows, numeric=heads[1:]))


def _change(first: float, second: float) -> str:
    if not (isfinite(first) and isfinite(second)):
        return ""
    if first == second:
        return "the same"
    return f"{(second - first) / abs(first):+.1%}" if first else f"{second - first:+.4g}"


# ---------------------------------------------------------------- failures, time, memory, samples


def _faults(run: RunData) -> Markup:
    rows, stacks = [], Markup("")
    for fault in run.faults[-MOST_ROWS:]:
        failed = fault.ended or fault.kind in ("died", "fault", "exception")
        time = datetime.datetime.fromtimestamp(fault.time, datetime.UTC).isoformat()
        nodes = f" on {listed(fault.nodes, 4)}" if fault.nodes else ""
        what = Markup("<br>").join(filter(None, (fault.what, fault.others)))
        kind = _chip(fault.kind, "failed" if failed else "stopped")
        row = (_date(time), kind, f"{listed(fault.ranks, 16)}{nodes}", f"{fault.step:,}", what, fault.hint)
        rows.append((*row, f"watch/{fault.folder}/" if fault.folder else ""))
        if fault.stacks:
            title = f"Stacks of {fault.kind} at step {fault.step:,}"
            stacks += part("details", title, part("element", "pre", fault.stacks))
    heads = ("time", "kind", "ranks", "step", "description", "what to do", "stacks in")
    return part("table", heads, rows) + stacks if rows else Markup("")


def _time(run: RunData) -> Markup:
    about = (
        "Mean step on each rank. Exposed communication: waiting in collectives, for the network or a slower "
        "rank. The rank with much less of it than the others is the one they wait for."
    )
    order = sorted(run.phases, key=lambda rank: run.phases[rank][EXPOSED])
    shown = {f"rank {rank}": run.phases[rank] for rank in sorted(order[:MOST_BARS])}
    return part("element", "p", about, "about") + bars(shown, seconds) if shown else Markup("")


def _memory(run: RunData) -> Markup:
    """Of a profiled run: each rank's tensors at their peak, by kind."""
    order = sorted(run.peaks, key=lambda rank: -sum(run.peaks[rank].values()))
    shown = {f"rank {rank}": run.peaks[rank] for rank in sorted(order[:MOST_BARS])}
    return bars(shown, byte_size) if shown else Markup("")


def _answers(run: RunData) -> Markup:
    """Of the last evaluation; those of earlier ones folded."""
    tables = [
        (step, part("table", [*rows[0]], [[*row.values()] for row in rows]))
        for step, rows in itertools.islice(run.answers.items(), MOST_ROWS)
    ]
    earlier = Markup("").join(part("details", f"At step {step:,}", table) for step, table in tables[1:])
    return tables[0][1] + earlier if tables else Markup("")


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
    specs: list[ChartSpec] = [*CHARTS, *((name, "", ((name, name),)) for name in others)]
    drawn = (made for spec in specs if (made := _chart(runs, *spec)))
    charts = list(itertools.islice(drawn, MOST_CHARTS + MOST_FOLDED))
    if not charts:
        return part("element", "p", "no step was recorded", "none")
    about = "Dashed line: the run was resumed at this step." if len(runs) == 1 and runs[0].restarts else ""
    body = part("element", "p", about, "about") if about else Markup("")
    body += part("element", "div", Markup("").join(charts[:MOST_CHARTS]), "curves")
    if folded := charts[MOST_CHARTS:]:
        further = part("element", "div", Markup("").join(folded), "curves")
        body += part("details", f"{counted(len(folded), 'further curve')}; all are in metrics.jsonl", further)
    return body


def _chart(runs: Sequence[RunData], title: str, unit: str, series: Sequence[tuple[str, str]]) -> Markup:
    lines: dict[str, Series] = {}
    for name, label in series:
        for run in runs:
            words = [run.name] if len(runs) > 1 else []
            words += [label] if len(series) > 1 or len(runs) == 1 else []
            if name in run.series:
                lines[", ".join(words)] = run.series[name]
    if unit == "%":
        lines = {label: Series(line.steps, 100 * line.values) for label, line in lines.items()}
    return chart(title, lines, unit, runs[0].restarts if len(runs) == 1 else ())


# ---------------------------------------------------------------- checkpoints, starts, configuration


def _checkpoints(run: RunData) -> Markup:
    rows: list[list[object]] = []
    for listing in run.checkpoints:
        if (manifest := listing.manifest) is None:
            rows.append([f"{listing.step:,}", "", "", _chip("incomplete", "failed"), listing.detail])
        else:
            size = byte_size(sum(count for count, _ in manifest.files.values()))
            writers = f"{counted(manifest.ranks, 'rank')}, {manifest.mesh}"
            state = _chip("complete", "finished")
            rows.append([f"{listing.step:,}", size, writers, state, manifest.reason])
    heads = ("step", "size", "saved by", "state", "reason")
    return part("table", heads, rows, numeric=heads[:2], nothing="no checkpoint")


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

"""The page of one run, or of two over each other. What makes it a file that opens offline is document.py's.

Order: what became of it, what stopped it, curves, where the time and the memory go, plan, samples,
checkpoints, starts, configuration.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from fsdp.report import compare
from fsdp.report.curves import Marks, chart
from fsdp.report.html_document import SCRIPT, document
from fsdp.report.plan_section import ABOUT as PLAN
from fsdp.report.plan_section import planned
from fsdp.report.profile_section import memory_by_rank
from fsdp.report.run_data import RunStory, Start
from fsdp.report.sample_section import SampleSection
from fsdp.report.series import Series
from fsdp.report.tables import Raw, cell, chip, seconds, section, size, table, tiles
from fsdp.report.timing import ABOUT as TIME
from fsdp.report.timing import time_by_rank
from fsdp.report.watch_section import odd, stopped

KNOWN = {
    "loss", "eval_loss", "eval_accuracy", "per_s", "step_time_s", "data_wait_s", "grad_norm", "lr", "max_mem_gib", "mfu",
    "samples", "tokens",
}  # fmt: skip
MOST_CHARTS = 12
MEMORY = (
    "The highest moment of the profiled steps on each rank, by what held it; and the highest of each phase."
)


def page(stories: Sequence[RunStory], samples: Sequence[SampleSection] = ()) -> str:
    names = " and ".join(story.name for story in stories)
    body = [_head(stories), *([_differences(stories)] if len(stories) > 1 else [])]
    body += [stopped(story.watched, _of(story, stories)) for story in stories]
    body += [section("Curves", _curves(stories), _about_curves(stories))]
    for story, said in zip(stories, [*samples, *[SampleSection()] * len(stories)], strict=False):
        of = _of(story, stories)
        body += [section(f"Where the time goes{of}", time_by_rank(story.watched.timing, _marks(story)), TIME)]
        body += [odd(story.watched, of)]
        body += [section(f"Planned and measured{of}", planned(story), PLAN)]
        body += [section(f"Memory{of}", memory_by_rank(story.accounts), MEMORY)]
        body += [_samples(of, said), section(f"Checkpoints{of}", _checkpoints(story))]
        body += [section(f"Starts{of}", _starts(story))]
    body.append(_configuration(stories))
    return document(f"{names} · report", "".join(body), SCRIPT)


def _of(story: RunStory, stories: Sequence[RunStory]) -> str:
    return f": {story.name}" if len(stories) > 1 else ""


def _marks(story: RunStory) -> Marks:
    return Marks([start.from_step for start in story.starts if start.from_step])


# ---------------------------------------------------------------- what became of it


def _head(stories: Sequence[RunStory]) -> str:
    if len(stories) > 1:
        heads = "".join(
            f'<div class="run"><h2><i class="c{nth}"></i>{html.escape(story.name)} {_state(story)}</h2>'
            f"{_line(story)}{_notes(story)}</div>"
            for nth, story in enumerate(stories)
        )
        names = " and ".join(html.escape(story.name) for story in stories)
        return f'<header><h1>{names}</h1><div class="runs">{heads}</div></header>'
    (story,) = stories
    return f"<header><h1>{html.escape(story.name)} {_state(story)}</h1>{_line(story)}{_notes(story)}</header>{_tiles(story)}"


def _state(story: RunStory) -> Raw:
    return chip(story.outcome, story.outcome) if story.starts else chip("never started", "killed")


def _line(story: RunStory) -> str:
    get = story.config.get
    model = " ".join(str(get(name, "")) for name in ("model.name", "model.preset")).strip()
    parts = [model, str(get("data.name", "")), *([_where(story.starts[-1])] if story.starts else [])]
    text = " · ".join(html.escape(part) for part in parts if part)
    ended = story.starts[-1] if story.starts else None
    why = (
        f"<br>{html.escape(ended.why)}" if ended and ended.outcome in ("failed", "killed", "stopped") else ""
    )
    return f'<p class="about">{text}{why}</p>'


def _where(start: Start) -> str:
    nodes = f"{len(start.nodes)} nodes" if len(start.nodes) > 1 else "one node"
    return f"{start.ranks} rank{'s' * (start.ranks != 1)} on {nodes} by {start.launcher}"


def _notes(story: RunStory) -> str:
    return "".join(f'<p class="note">{html.escape(note)}</p>' for note in story.notes)


def _tiles(story: RunStory) -> str:
    get = story.series.get
    shown: list[tuple[str, object, str]] = []
    total = story.config.get("train.steps") or 0
    shown.append(("steps", f"{story.last_step:,}", f"of {total:,}" if total else ""))
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if series := get(name):
            lowest = series.finite
            under = f"lowest {_loss(float(lowest.values.min()))}" if len(lowest) else ""
            shown.append((label, _loss(series.last), under))
    if series := get("eval_accuracy"):
        shown.append(
            (
                "held-out accuracy",
                f"{series.last:.2%}",
                f"best {series.finite.values.max():.2%}" if len(series.finite) else "",
            )
        )
    if series := get("step_time_s"):
        waits = get("data_wait_s")
        waiting = (
            f"{waits.median / series.median:.1%} of it waiting for data"
            if waits and series.median > 0
            else ""
        )
        shown.append(("median step", seconds(series.median), waiting))
    if series := get("per_s"):
        shown.append((f"{_unit(story)} a second", f"{series.median:,.0f}", "median"))
    if series := get("mfu"):
        shown.append(("MFU", f"{series.median:.1%}", "median"))
    if series := get("max_mem_gib"):
        shown.append(
            ("peak memory", f"{series.finite.values.max():.2f} GiB" if len(series.finite) else "?", "rank 0")
        )
    shown.append(("starts", str(len(story.starts)), _fell(story)))
    return tiles(shown)


def _fell(story: RunStory) -> str:
    counts = {kind: sum(start.outcome == kind for start in story.starts) for kind in ("failed", "killed")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none fell"


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def _unit(story: RunStory) -> str:
    return "tokens" if (tokens := story.series.get("tokens")) and tokens.last > 0 else "samples"


# ---------------------------------------------------------------- curves


def _about_curves(stories: Sequence[RunStory]) -> str:
    thinned = max((len(s) for story in stories for s in story.series.values()), default=0) > 720
    words = []
    if any(start.from_step for story in stories for start in story.starts):
        words.append("A dashed line is a start that went on from there.")
    if thinned:
        words.append(
            "Shaded is what lies between the lowest and the highest of the steps that a point stands for."
        )
    return " ".join(words)


def _curves(stories: Sequence[RunStory]) -> str:
    several = len(stories) > 1
    marks = Marks() if several else _marks(stories[0])

    def of(*wanted: tuple[str, str]) -> dict[str, Series]:
        return {
            (f"{story.name}{', ' + label if len(wanted) > 1 else ''}" if several else label): story.series[
                name
            ]
            for name, label in wanted
            for story in stories
            if name in story.series
        }

    def draw(title: str, unit: str, *wanted: tuple[str, str], smooth: bool = False) -> str:
        lines, factor_unit = _scaled(of(*wanted), unit)
        return chart(title, lines, factor_unit, marks=marks, smooth=smooth)

    charts = [
        draw("Loss", "", ("loss", "training"), ("eval_loss", "held out"), smooth=True),
        draw("Held-out accuracy", "%", ("eval_accuracy", "accuracy")),
        draw("Throughput", f"{_unit(stories[0])} a second", ("per_s", "all ranks"), smooth=True),
        draw("Step time", "s", ("step_time_s", "step"), ("data_wait_s", "waiting for data")),
        draw("MFU", "%", ("mfu", "of the device's peak")),
        draw("Gradient norm", "", ("grad_norm", "norm"), smooth=True),
        draw("Learning rate", "", ("lr", "rate")),
        draw("Peak memory", "GiB", ("max_mem_gib", "rank 0")),
    ]
    others = dict.fromkeys(name for story in stories for name in story.series if name not in KNOWN)
    charts += [draw(name, "", (name, name)) for name in others]
    drawn = [one for one in charts if one][:MOST_CHARTS]
    return (
        f'<div class="curves">{"".join(drawn)}</div>' if drawn else '<p class="none">no step was recorded</p>'
    )


def _scaled(lines: dict[str, Series], unit: str) -> tuple[dict[str, Series], str]:
    """Shares as per cent; short times in milliseconds."""
    factor = 100.0 if unit == "%" else 1.0
    if unit == "s" and lines and max(series.median for series in lines.values()) < 1:
        factor, unit = 1e3, "ms"
    return (
        {name: Series(s.steps, s.values * factor) for name, s in lines.items()} if factor != 1 else lines
    ), unit


# ---------------------------------------------------------------- the rest


def _differences(stories: Sequence[RunStory]) -> str:
    heads = ["", *(story.name for story in stories), "difference"]
    numbers = table(heads, compare.figures(*stories), numeric=heads[1:])
    fields = table(
        ["setting", *heads[1:-1]], compare.settings(stories), nothing="The two have the same configuration."
    )
    return section("What came out", numbers) + section("What was set differently", fields)


def _samples(of: str, said: SampleSection) -> str:
    if said.why_not and of:
        return ""
    if said.why_not:
        return section(f"Samples{of}", f'<p class="none">{html.escape(said.why_not)}</p>')
    return section(f"Samples{of}", said.body)


def _checkpoints(story: RunStory) -> str:
    rows: list[list[object]] = []
    for found in story.checkpoints:
        about, save = found.manifest, story.saves.get(found.step)
        took = (seconds(save.write_s), seconds(save.stall_s)) if save else ("", "")
        if about is None:
            rows.append([f"{found.step:,}", "", *took, "", chip("not whole", "failed"), found.detail])
        else:
            total = sum(count for count, _ in about.files.values())
            where = f"{about.ranks} rank{'s' * (about.ranks != 1)}, {about.mesh}"
            rows.append(
                [f"{found.step:,}", size(total), *took, where, chip("whole", "finished"), about.reason]
            )
    heads = ("step", "size", "written in", "held steps up", "by", "state", "why")
    return table(heads, rows, numeric=heads[:4], nothing="no checkpoint")


def _starts(story: RunStory) -> str:
    rows = []
    for start in story.starts:
        nodes = ", ".join(start.nodes[:8]) + (
            f" and {len(start.nodes) - 8} more" if len(start.nodes) > 8 else ""
        )
        to = "" if start.to_step is None else f"{start.to_step:,}"
        changed = Raw("<br>".join(cell(line) for line in start.changed))
        where = f"{start.ranks} on {nodes}" if nodes else str(start.ranks)
        rows.append(
            [
                _moment(start.time),
                start.launcher,
                where,
                f"{start.from_step:,}",
                to,
                chip(start.outcome, start.outcome),
                start.why,
                changed,
            ]
        )
    heads = ["when", "launcher", "ranks", "from step", "to step", "end", "why", "changed"]
    if not any(start.changed for start in story.starts):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return _timeline(story) + table(heads, rows, numeric=("from step", "to step"), nothing="never started")


def _moment(text: str) -> str:
    """ISO's own form, with a space where people expect one."""
    return text.replace("T", " ").replace("+00:00", " UTC") if len(text) > 18 else text


def _timeline(story: RunStory) -> str:
    """Each start as a bar over the steps that it made."""
    end = max([story.last_step, *(start.to_step or start.from_step for start in story.starts)], default=0)
    if len(story.starts) < 2 or not end:
        return ""
    bars = []
    for start, following in zip(story.starts, [*story.starts[1:], None], strict=True):
        reached = (
            start.to_step
            if start.to_step is not None
            else following.from_step
            if following
            else story.last_step
        )
        left, width = start.from_step / end * 100, max(0.4, (reached - start.from_step) / end * 100)
        title = html.escape(
            f"start {start.number}: steps {start.from_step:,} to {reached:,}, {start.outcome}"
        )
        bars.append(
            f'<i class="{start.outcome}" style="left:{left:.2f}%;width:{width:.2f}%" title="{title}"></i>'
        )
    rows = "".join(f"<div>{bar}</div>" for bar in bars[:24])
    foot = f"<p><span>step 0</span><span>{end:,}</span></p>"
    return f'<div class="timeline" role="img" aria-label="the starts over the steps">{rows}{foot}</div>'


def _configuration(stories: Sequence[RunStory]) -> str:
    names = dict.fromkeys(name for story in stories for name in story.config)
    rows = [[name, *(compare.shown(story.config.get(name, "")) for story in stories)] for name in names]
    changed = {name for story in stories for name in story.changed}
    heads = ("setting", *(("value",) if len(stories) == 1 else [story.name for story in stories]))
    short = table(heads, [row for row in rows if row[0] in changed], nothing="Every field has its default.")
    whole = (
        f"<details><summary>All {len(rows)} fields</summary>{table(heads, rows)}</details>" if rows else ""
    )
    return section("Configuration", short + whole, "Where it is not the default.") if rows else ""

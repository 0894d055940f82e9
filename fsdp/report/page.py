"""The page itself: HTML with its style inside, light and dark, on a phone and in print, with nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp.report.curves import chart
from fsdp.report.read import RunStory

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(stories: Sequence[RunStory]) -> str:
    names = " and ".join(story.name for story in stories)
    body = [f"<h1>{html.escape(names)}</h1>", *(_numbers(story) for story in stories), "<h2>Curves</h2>", _curves(stories)]
    for story in stories:
        title = f" of {html.escape(story.name)}" if len(stories) > 1 else ""
        body += [f"<h2>Starts{title}</h2>", _starts(story), f"<h2>Checkpoints{title}</h2>", _checkpoints(story)]
    body.append(_configuration(stories))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(names)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _numbers(story: RunStory) -> str:
    shown = [("steps", f"{story.last_step:,}")]
    for name, label in (("loss", "loss"), ("eval_loss", "held-out loss"), ("eval_accuracy", "held-out accuracy")):
        if story.series.get(name):
            last = story.series[name][-1][1]
            shown.append((label, f"{last:.2%}" if "accuracy" in name else f"{last:.4f}"))
    times = sorted(value for _, value in story.series.get("step_time_s", []))
    if times:
        shown.append(("median step", f"{times[len(times) // 2] * 1e3:.1f} ms"))
    shown.append(("starts", str(sum(event.get("event") == "start" for event in story.history))))
    return "<dl>" + "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in shown) + "</dl>"


def _curves(stories: Sequence[RunStory]) -> str:
    def of(name: str, label: str) -> dict[str, Any]:
        several = len(stories) > 1
        return {
            f"{story.name} {label}" if several else label: story.series[name] for story in stories if story.series.get(name)
        }

    charts = [
        chart("loss", {**of("loss", "training"), **of("eval_loss", "held out")}),
        chart("held-out accuracy", of("eval_accuracy", "accuracy")),
        chart("throughput", of("per_s", "samples or tokens"), "a second"),
        chart("step time", {**of("step_time_s", "step"), **of("data_wait_s", "of it waiting for data")}, "s"),
        chart("gradient norm", of("grad_norm", "norm")),
        chart("learning rate", of("lr", "rate")),
        chart("peak memory", of("max_mem_gib", "rank 0"), "GiB"),
    ]
    return f'<div class="curves">{"".join(charts)}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    if not cells:
        return "<p>none</p>"
    return f'<div class="wide"><table><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr>{cells}</table></div>'


def _starts(story: RunStory) -> str:
    rows: list[list[object]] = []
    for event in story.history:
        if event.get("event") == "start":
            nodes = ", ".join(event.get("nodes", []))
            rows.append(
                [
                    event["time"],
                    event["launcher"],
                    f"{event['ranks']} on {nodes}",
                    event["from_step"],
                    "",
                    "killed, or still running",
                ]
            )
            rows[-1].append("; ".join(event.get("changed", [])))
        elif event.get("event") == "end" and rows:
            rows[-1][4], rows[-1][5] = event.get("step", ""), event.get("why", "")
    return _table(("when", "launcher", "ranks", "from step", "to step", "why it ended", "changed"), rows)


def _checkpoints(story: RunStory) -> str:
    rows: list[list[object]] = []
    for found in story.checkpoints:
        about = found.manifest
        if about is None:
            rows.append([found.step, "", "", "", f"not whole: {found.detail}"])
        else:
            size = sum(size for size, _ in about.files.values()) / 2**20
            rows.append([found.step, f"{size:.1f} MiB", about.ranks, about.mesh, about.reason])
    return _table(("step", "size", "ranks", "mesh", "why"), rows)


def _configuration(stories: Sequence[RunStory]) -> str:
    names = sorted({name for story in stories for name in story.config})
    rows = [[name, *(story.config.get(name, "") for story in stories)] for name in names]
    heads = ("field", *(html.escape(story.name) for story in stories))
    changed = sorted({name for story in stories for name in story.changed})
    short = [[name, *(story.config.get(name, "") for story in stories)] for name in changed]
    return (
        "<h2>Configuration, where it is not the default</h2>"
        + _table(heads, short)
        + f"<details><summary>all of it</summary>{_table(heads, rows)}</details>"
    )

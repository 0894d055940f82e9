"""The page after memory ran out, as text and as HTML: the same facts and advice in both. Only words; oom.py
beside it knows.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp.memory.account import human
from fsdp.memory.oom_advice import Advice, Suggestion


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """What was seen when it failed, in bytes."""

    rank: int
    ranks: int
    host: str
    device: str
    phase: str
    step: int
    said: str
    kinds: Mapping[str, int]
    held: int
    asked: int
    process: Mapping[str, int]
    allocator: Mapping[str, int]
    limits: Mapping[str, int]

    def where(self) -> str:
        step = f" of step {self.step}" if self.step else ""
        return f"rank {self.rank} of {self.ranks} ({self.host}, {self.device}) ran out of memory in {self.phase}{step}"


Rows = Sequence[tuple[str, ...]]


def text(facts: OomFacts, advice: Advice | None, note: str) -> str:
    lines = [f"{facts.where()}.", f"torch said: {facts.said}"]
    for title, rows in _sections(facts, advice):
        lines += ["", title]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    if note:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def html_page(facts: OomFacts, advice: Advice | None, note: str) -> str:
    body = [f"<h1>{html.escape(facts.where())}</h1>", f"<p>torch said: {html.escape(facts.said)}</p>"]
    for title, rows in _sections(facts, advice):
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        body.append(f'<h2>{html.escape(title)}</h2><div class="wide"><table>{cells}</table></div>')
    if note:
        body.append(f"<p>{html.escape(note)}</p>")
    style = Path(__file__).with_name("profile_page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(facts.where())}</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _sections(facts: OomFacts, advice: Advice | None) -> list[tuple[str, Rows]]:
    sections: list[tuple[str, Rows]] = [("what held how much when it failed", _held(facts))]
    around = [*_around(facts)]
    if around:
        sections.append(("around it", around))
    if advice is not None:
        title = f"what the fullest moment of a step needs here, reckoned: short by {human(advice.short)}"
        sections.append((title, _needs(advice)))
        if advice.first is not None:
            sections.append(
                ("turn this first" if advice.enough else _not_enough(advice), [_row("", advice.first)])
            )
        others = [_row(str(at), one) for at, one in enumerate(advice.others, start=1)]
        if others:
            sections.append(("each of these alone, what costs least first", others))
    return sections


def _held(facts: OomFacts) -> Rows:
    """activations is what was held and belongs to no model, optimizer or FSDP group: buffers under way too."""
    there = sorted(((size, kind) for kind, size in facts.kinds.items() if size), reverse=True)
    named = {"activations": "activations and buffers under way"}
    rows = [(named.get(kind, kind), human(size)) for size, kind in there]
    return [
        *rows,
        ("in all", human(facts.held)),
        ("asked for besides", human(facts.asked) if facts.asked else "not said"),
    ]


def _around(facts: OomFacts) -> Rows:
    rows = []
    if facts.allocator:
        a = facts.allocator
        rows = [
            ("allocator holds, unused", human(a["reserved"] - a["allocated"])),
            ("device, free of all", f"{human(a['free'])} of {human(a['total'])}"),
        ]
    elif facts.process:
        rows = [(f"process {name.replace('_', ' ')}", human(size)) for name, size in facts.process.items()]
    return [*rows, *((f"limit: {name}", human(size)) for name, size in facts.limits.items())]


def _needs(advice: Advice) -> Rows:
    rows = [
        (kind, human(size)) for kind, size in sorted(advice.needs.items(), key=lambda item: -item[1]) if size
    ]
    return [*rows, ("in all", human(sum(advice.needs.values())))]


def _not_enough(advice: Advice) -> str:
    return f"all that flags can do falls short of {human(advice.short)}: this, and more ranks"


def _row(number: str, one: Suggestion) -> tuple[str, str, str, str]:
    return number, one.flags, f"gives back {human(one.bytes)}", one.cost

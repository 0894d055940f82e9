"""The out-of-memory page as text and as HTML, with the same facts and advice. oom.py gathers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp.base.html import document, render
from fsdp.base.units import byte_size
from fsdp.memory.oom_advice import Advice, Suggestion


@dataclass(frozen=True, kw_only=True)
class OomFacts:
    """Measured when the allocation failed, in bytes."""

    rank: int
    ranks: int
    host: str
    device: str
    phase: str
    step: int
    error: str
    """The message of torch's error."""
    kinds: Mapping[str, int]
    held: int
    requested: int
    process: Mapping[str, int]
    allocator: Mapping[str, int]
    limits: Mapping[str, int]

    def where(self) -> str:
        step = f" of step {self.step}" if self.step else ""
        place = f"rank {self.rank} of {self.ranks} ({self.host}, {self.device})"
        return f"{place} ran out of memory in {self.phase}{step}"


Rows = Sequence[tuple[str, ...]]


def text(facts: OomFacts, advice: Advice | None, note: str) -> str:
    lines = [f"{facts.where()}.", f"torch's error: {facts.error}"]
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
    body = render(
        "memory/templates/oom.html",
        title=facts.where(),
        error=f"torch's error: {facts.error}",
        sections=_sections(facts, advice),
        note=note,
    )
    return document(facts.where(), body, style="memory/templates/memory.css")


def _sections(facts: OomFacts, advice: Advice | None) -> list[tuple[str, Rows]]:
    sections: list[tuple[str, Rows]] = [("Memory by kind when the allocation failed", _held(facts))]
    around = [*_around(facts)]
    if around:
        sections.append(("Process, device and limits", around))
    if advice is not None:
        title = f"Estimated peak of a step on this rank; missing {byte_size(advice.missing)}"
        sections.append((title, _needs(advice)))
        if advice.first is not None:
            heading = "Change this first" if advice.enough else _not_enough(advice)
            sections.append((heading, [_row("", advice.first)]))
        others = [_row(str(at), one) for at, one in enumerate(advice.others, start=1)]
        if others:
            sections.append(("Each of these alone, in the order of their cost", others))
    return sections


def _held(facts: OomFacts) -> Rows:
    """`activations` is memory that no model, optimizer or FSDP group owns, buffers of collectives too."""
    there = sorted(((size, kind) for kind, size in facts.kinds.items() if size), reverse=True)
    named = {"activations": "activations and communication buffers"}
    rows = [(named.get(kind, kind), byte_size(size)) for size, kind in there]
    return [
        *rows,
        ("total", byte_size(facts.held)),
        ("requested in addition", byte_size(facts.requested) if facts.requested else "unknown"),
    ]


def _around(facts: OomFacts) -> Rows:
    rows = []
    if facts.allocator:
        a = facts.allocator
        rows = [
            ("reserved by the allocator, unused", byte_size(a["reserved"] - a["allocated"])),
            ("free on the device", f"{byte_size(a['free'])} of {byte_size(a['total'])}"),
        ]
    elif facts.process:
        rows = [
            (f"process {name.replace('_', ' ')}", byte_size(size)) for name, size in facts.process.items()
        ]
    return [*rows, *((f"limit: {name}", byte_size(size)) for name, size in facts.limits.items())]


def _needs(advice: Advice) -> Rows:
    rows = [
        (kind, byte_size(size))
        for kind, size in sorted(advice.needs.items(), key=lambda item: -item[1])
        if size
    ]
    return [*rows, ("total", byte_size(sum(advice.needs.values())))]


def _not_enough(advice: Advice) -> str:
    return f"All flags together free less than {byte_size(advice.missing)}: change this and use more ranks"


def _row(number: str, one: Suggestion) -> tuple[str, str, str, str]:
    return number, one.flags, f"frees {byte_size(one.bytes)}", one.cost

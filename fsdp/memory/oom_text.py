"""The explanation of an out-of-memory error as text; oom_report.py gathers its facts and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp.base.text import columns
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
    for title, rows in [*_amounts(facts, advice), *_advised(advice)]:
        lines += ["", title, *(f"  {line}" for line in columns(rows))]
    if note:
        lines += ["", note]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the tables


def _amounts(facts: OomFacts, advice: Advice | None) -> list[tuple[str, Rows]]:
    sections: list[tuple[str, Rows]] = [("Memory by kind when the allocation failed", _held(facts))]
    around = [*_around(facts)]
    if around:
        sections.append(("Process, device and limits", around))
    if advice is not None:
        title = f"Estimated peak of a step on this rank; missing {byte_size(advice.missing)}"
        sections.append((title, _needs(advice)))
    return sections


def _advised(advice: Advice | None) -> list[tuple[str, Rows]]:
    """At the text's end: what is read first on a terminal."""
    sections: list[tuple[str, Rows]] = []
    if advice is not None and advice.first is not None:
        missing = f"All flags together free less than {byte_size(advice.missing)}"
        heading = "Change this first" if advice.enough else f"{missing}: change this and use more ranks"
        sections.append((heading, [_row("", advice.first)]))
    if advice is not None and advice.others:
        others = [_row(str(at), one) for at, one in enumerate(advice.others, start=1)]
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


def _row(number: str, one: Suggestion) -> tuple[str, str, str, str]:
    return number, one.flags, f"frees {byte_size(one.bytes)}", one.cost

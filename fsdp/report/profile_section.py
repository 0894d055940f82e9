"""Memory of a profiled run by kind, phase and rank, from fsdp/memory/profile.py's files in RUN/profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fsdp.base.bars import bars, shown_ranks
from fsdp.base.html import details, div, joined, table
from fsdp.base.palette import kind_colour
from fsdp.base.phases import PHASES
from fsdp.base.units import byte_size
from fsdp.memory.profile_page import ends_table, timeline_figure
from fsdp.report.file_notes import Notes, integer, number
from fsdp.report.own_files import read_of_ranks

MOST_POINTS, MOST_MARKS = 2000, 4000


def read_accounts(folder: Path, notes: Notes) -> dict[int, Mapping[str, Any]]:
    """Rank → its account; a file that cannot be read or has another format is left out."""
    return read_of_ranks(folder, "memory.json", notes, _account)


def _account(record: Mapping[str, Any]) -> Mapping[str, Any]:
    if record["format"] != 1:
        raise ValueError("another format")
    return {
        "peak": _peak(record["peak"]),
        "phases": {str(phase): _peak(peak) for phase, peak in record.get("phases", {}).items()},
        "timeline": _timeline(record.get("timeline") or {}),
        "ends": [_end(end) for end in record.get("ends") or ()],
    }


def _peak(record: Mapping[str, Any]) -> dict[str, Any]:
    """One moment: bytes in all, and by kind."""
    kinds = {str(kind): number(count) for kind, count in record["kinds"].items()}
    return {"bytes": abs(number(record["bytes"])), "kinds": kinds}


def _timeline(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if nothing can be drawn: fewer than two moments, or no time between them."""
    times = [number(t) for t in record.get("t_s") or ()]
    kinds = {str(kind): [abs(number(v)) for v in values] for kind, values in record.get("kinds", {}).items()}
    phases = [(number(t), str(phase), integer(step)) for t, phase, step in record.get("marks") or ()]
    origin = min([*times, *(t for t, _, _ in phases)], default=0.0)
    times = [t - origin for t in times]
    marks = [[t - origin, phase, step] for t, phase, step in phases]
    if len(times) < 2 or max(times) <= 0 or not kinds:
        return None
    if times != sorted(times) or any(len(values) != len(times) for values in kinds.values()):
        raise ValueError("its moments are not in order, or a kind does not have all of them")
    begins = [t - origin for t, _, _ in phases]
    if begins != sorted(begins) or len(times) > MOST_POINTS or len(marks) > MOST_MARKS:
        raise ValueError("its phases are not in order, or too many")
    return {
        "t_s": times,
        "kinds": kinds,
        "marks": [mark for mark, at in zip(marks, begins, strict=True) if at <= times[-1]],
    }


def _end(record: Mapping[str, Any]) -> dict[str, Any]:
    """Memory at the end of one phase of one step."""
    kinds = {kind: number(record["kinds"].get(kind, 0)) for kind in map(str, record["kinds"])}
    beyond = record.get("beyond")
    return {
        "phase": str(record["phase"]),
        "step": integer(record["step"]),
        "kinds": kinds,
        "beyond": None if beyond is None else number(beyond),
    }


def memory_by_rank(accounts: Mapping[int, Mapping[str, Any]]) -> Markup:
    """A bar per rank with its peak by kind; the rank with the highest over time; the peak of each phase."""
    if not accounts:
        return Markup("")
    highest = sorted(accounts, key=lambda rank: -accounts[rank]["peak"]["bytes"])
    ranks = shown_ranks(list(accounts), highest)
    kinds = _kinds([accounts[rank]["peak"] for rank in ranks])
    peaks = {f"rank {rank}": accounts[rank]["peak"]["kinds"] for rank in ranks}
    drawn = bars(peaks, kinds, byte_size, colour_of=kind_colour)
    return joined([drawn, _over_time(highest[0], accounts[highest[0]]), _phases(accounts, ranks)])


def _over_time(rank: int, account: Mapping[str, Any]) -> Markup:
    """The profile's own figure, drawn from its numbers; no text of the run directory's pages is used."""
    timeline, ends = account["timeline"], account["ends"]
    kinds = [tuple(end["kinds"]) for end in ends]
    figure = div(timeline_figure(timeline), "under-bars") if timeline else Markup("")
    alike = ends and all(one == kinds[0] for one in kinds)
    rows = details(f"Rank {rank} at the end of each phase", ends_table(ends)) if alike else Markup("")
    return joined([figure, rows])


def memory_of_runs(accounts: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Markup:
    """A bar per run, of its rank with the highest peak: one scale, one colour a kind."""
    highest = {
        name: max(ranks.items(), key=lambda one: one[1]["peak"]["bytes"])
        for name, ranks in accounts.items()
        if ranks
    }
    if len(highest) < 2:
        return Markup("")
    peaks = {f"{name}, rank {rank}": account["peak"] for name, (rank, account) in highest.items()}
    kinds = _kinds(list(peaks.values()))
    shown = {name: peak["kinds"] for name, peak in peaks.items()}
    return bars(shown, kinds, byte_size, colour_of=kind_colour)


def _kinds(peaks: Sequence[Mapping[str, Any]]) -> list[str]:
    totals: dict[str, float] = {}
    for peak in peaks:
        for kind, count in peak["kinds"].items():
            totals[kind] = totals.get(kind, 0) + count
    return sorted((kind for kind in totals if totals[kind] > 0), key=lambda kind: -totals[kind])


def _phases(accounts: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> Markup:
    """Per phase, the rank with the highest peak and its largest kinds."""
    rows = []
    for phase in PHASES:
        peaks = {rank: accounts[rank]["phases"][phase] for rank in ranks if phase in accounts[rank]["phases"]}
        if not peaks:
            continue
        rank, fullest = max(peaks.items(), key=lambda pair: pair[1]["bytes"])
        parts = sorted(fullest["kinds"].items(), key=lambda pair: -pair[1])[:4]
        largest = ", ".join(f"{kind} {byte_size(count)}" for kind, count in parts if count > 0)
        rows.append([phase, byte_size(fullest["bytes"]), rank, largest])
    heads = ("phase", "peak", "rank", "largest kinds")
    return table(heads, rows, numeric=("peak", "rank")) if rows else Markup("")

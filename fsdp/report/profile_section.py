"""Memory of a profiled run by kind, phase and rank, from fsdp/memory/profile.py's files in RUN/profile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fsdp.base.html import joined, table
from fsdp.base.phases import PHASES
from fsdp.base.units import byte_size
from fsdp.report.bars import bars, shown_ranks
from fsdp.report.file_notes import UNREADABLE, Notes, number


def read_accounts(folder: Path, notes: Notes) -> dict[int, Mapping[str, Any]]:
    """Rank → its account; a file that cannot be read or has another format is left out."""
    found: dict[int, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("rank*_memory.json")):
        name = re.fullmatch(r"rank(\d+)_memory\.json", file.name, re.ASCII)
        if not name or not file.is_file():
            continue
        try:
            account = json.loads(file.read_text(encoding="utf-8"))
            if account["format"] != 1:
                raise ValueError("another format")
            phases = {str(phase): _peak(peak) for phase, peak in account.get("phases", {}).items()}
            found[int(name[1])] = {"peak": _peak(account["peak"]), "phases": phases}
        except (OSError, *UNREADABLE) as error:
            notes.add(f"left out: profile/{file.name}, which could not be read ({type(error).__name__})")
    return dict(sorted(found.items()))


def _peak(record: Mapping[str, Any]) -> dict[str, Any]:
    """One moment: bytes in all, and by kind."""
    kinds = {str(kind): number(count) for kind, count in record["kinds"].items()}
    return {"bytes": abs(number(record["bytes"])), "kinds": kinds}


def memory_by_rank(accounts: Mapping[int, Mapping[str, Any]]) -> Markup:
    """A bar per rank with its peak by kind; then a table with the peak of each phase."""
    if not accounts:
        return Markup("")
    highest = sorted(accounts, key=lambda rank: -accounts[rank]["peak"]["bytes"])
    ranks = shown_ranks(list(accounts), highest)
    kinds = _kinds([accounts[rank]["peak"] for rank in ranks])
    peaks = {f"rank {rank}": accounts[rank]["peak"]["kinds"] for rank in ranks}
    return joined([bars(peaks, kinds, byte_size), _phases(accounts, ranks)])


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
    return bars({name: peak["kinds"] for name, peak in peaks.items()}, kinds, byte_size)


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

"""Where a profiled run's memory went: fsdp/memory/profile.py's accounts under RUN/profile, by kind, phase and
rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.phases import PHASES
from fsdp.report.bars import bars, chosen
from fsdp.report.file_notes import ODD, Notes, number
from fsdp.report.tables import size, table


def read_accounts(folder: Path, notes: Notes) -> dict[int, Mapping[str, Any]]:
    """Rank → its account; a file that cannot be read or is of another format is left out."""
    found: dict[int, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("rank*_memory.json")):
        name = re.fullmatch(r"rank(\d+)_memory\.json", file.name, re.ASCII)
        if not name or not file.is_file():
            continue
        try:
            account = json.loads(file.read_text(encoding="utf-8"))
            if account["format"] != 1:
                raise ValueError("another format")
            phases = {str(phase): _held(held) for phase, held in account.get("phases", {}).items()}
            found[int(name[1])] = {"peak": _held(account["peak"]), "phases": phases}
        except (OSError, *ODD) as error:
            notes.say(f"left out: profile/{file.name}, which could not be read ({type(error).__name__})")
    return dict(sorted(found.items()))


def _held(said: Mapping[str, Any]) -> dict[str, Any]:
    """One moment: bytes in all, and by kind."""
    kinds = {str(kind): number(count) for kind, count in said["kinds"].items()}
    return {"bytes": abs(number(said["bytes"])), "kinds": kinds}


def memory_by_rank(accounts: Mapping[int, Mapping[str, Any]]) -> str:
    """A bar a rank, its peak by kind; then each phase's highest moment."""
    if not accounts:
        return ""
    ranks = chosen(list(accounts), sorted(accounts, key=lambda rank: -accounts[rank]["peak"]["bytes"]))
    kinds = _kinds([accounts[rank]["peak"] for rank in ranks])
    return bars({f"rank {rank}": accounts[rank]["peak"]["kinds"] for rank in ranks}, kinds, size) + _phases(
        accounts, ranks
    )


def _kinds(peaks: Sequence[Mapping[str, Any]]) -> list[str]:
    totals: dict[str, float] = {}
    for peak in peaks:
        for kind, count in peak["kinds"].items():
            totals[kind] = totals.get(kind, 0) + count
    return sorted((kind for kind in totals if totals[kind] > 0), key=lambda kind: -totals[kind])


def _phases(accounts: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Phase by phase, what the fullest rank held and of which kinds."""
    rows = []
    for phase in PHASES:
        peaks = {rank: accounts[rank]["phases"][phase] for rank in ranks if phase in accounts[rank]["phases"]}
        if not peaks:
            continue
        rank, fullest = max(peaks.items(), key=lambda pair: pair[1]["bytes"])
        parts = sorted(fullest["kinds"].items(), key=lambda pair: -pair[1])[:4]
        words = ", ".join(f"{kind} {size(count)}" for kind, count in parts if count > 0)
        rows.append([phase, size(fullest["bytes"]), rank, words])
    return table(("phase", "highest", "rank", "of it"), rows, numeric=("highest", "rank")) if rows else ""

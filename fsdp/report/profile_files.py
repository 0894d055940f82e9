"""The time profile of a run: seconds of a profiled step by rank, the longest operations, links to its files.

Read from RUN/profile, whose files may be anyone's: links are not followed, text is shown as text, and no page
of the run directory is linked, since a browser would run its scripts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fsdp.base.bars import bars, shown_ranks
from fsdp.base.html import details, joined, link, paragraph, pre
from fsdp.base.units import byte_size, seconds
from fsdp.report.file_notes import Notes, number
from fsdp.report.own_files import is_own, own_text, read_of_ranks

PARTS = ("compute", "communication", "data", "host")
LABELS = {"communication": "exposed communication", "data": "waiting for data"}
LINKED = re.compile(
    r"(rank\d{1,6}_(trace\.json\.gz|memory_snapshot\.pickle|operators\.txt|memory\.json|steps\.json"
    r"|startup\.json)|summary\.json)",
    re.ASCII,
)
MOST_LINKS = 24
LONGEST = 20_000
ABOUT = (
    "Mean of the profiled steps. A trace is for ui.perfetto.dev or chrome://tracing; the profiler "
    "itself makes these steps longer."
)


@dataclass(frozen=True)
class TimeProfile:
    """Rank → seconds of a step by part; the operations of the first rank; files to link, with their bytes."""

    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    operators: str = ""
    files: Sequence[tuple[Path, int]] = ()


def read_time_profile(folder: Path, notes: Notes) -> TimeProfile:
    ranks = read_of_ranks(folder, "steps.json", notes, _mean_step)
    return TimeProfile(ranks, own_text(folder / "rank0_operators.txt", LONGEST), _linked(folder))


def _mean_step(record: Mapping[str, Any]) -> dict[str, float]:
    return {part: abs(number(record["mean"][part])) for part in PARTS}


def _linked(folder: Path) -> list[tuple[Path, int]]:
    found = [file for file in folder.glob("*") if LINKED.fullmatch(file.name) and is_own(file)]
    return [(file, file.stat().st_size) for file in sorted(found)[:MOST_LINKS]]


def profile_body(profile: TimeProfile, page_folder: Path | None) -> Markup:
    """`page_folder`: where the page lies, for its relative links; None for a page that is not a file."""
    slowest = sorted(profile.ranks, key=lambda rank: -sum(profile.ranks[rank].values()))
    ranks = shown_ranks(list(profile.ranks), slowest)
    shown = {f"rank {rank}": profile.ranks[rank] for rank in ranks}
    parts = bars(shown, PARTS, seconds, LABELS) if shown else Markup("")
    longest = details("The longest operations of rank 0", pre(profile.operators))
    links = _links(profile.files, page_folder) if page_folder else Markup("")
    return joined([parts, longest if profile.operators else "", links])


def _links(files: Sequence[tuple[Path, int]], page_folder: Path) -> Markup:
    links = [
        joined([link(file.name, quote(os.path.relpath(file, page_folder))), f" {byte_size(size)}"])
        for file, size in files
    ]
    return paragraph(joined(links, " · "), "files") if links else Markup("")

"""NCCL's transport in a run, from logs that NCCL_DEBUG=INFO has left in RUN/logs/nccl*.log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fsdp.dist import nccl_log
from fsdp.report.file_notes import Notes
from fsdp.report.own_files import is_own

MOST_FILES, MOST_LINES, LONGEST = 64, 50_000, 4096
"""Read of a run's logs: one rank's tells how it reaches the others. A longer line is read as several."""


def note_transport(run: Path, notes: Notes) -> None:
    """What is odd in the logs becomes a note at the page's head."""
    files = [file for file in sorted((run / "logs").glob("nccl*.log")) if is_own(file)][:MOST_FILES]
    if not files:
        return
    found = nccl_log.read_log(islice(_lines(files, notes), MOST_LINES))
    nodes = 1 + bool(found.total("NET/"))
    for one in nccl_log.verdicts(found, nodes=nodes):
        if one.hint:
            notes.add(f"NCCL: {one.what}. HINT: {one.hint}")


def _lines(files: list[Path], notes: Notes) -> Iterator[str]:
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="replace") as stream:
                while line := stream.readline(LONGEST):
                    yield line
        except OSError as error:
            notes.add(f"{file.name} cannot be read ({error.strerror})")

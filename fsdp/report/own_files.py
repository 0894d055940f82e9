"""Reads files of a run directory that may be anyone's: links are not followed, damage becomes a note."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fsdp.base.regular_file import regular_text
from fsdp.report.file_notes import UNREADABLE, Notes
from fsdp.rundir.line_files import read_lines

Found = TypeVar("Found")
MOST_OF_A_RANK = 64 << 20
"""Bytes of a file of numbers that a rank writes, which has some kilobytes."""


def is_own(file: Path) -> bool:
    """A regular file in a folder of the run directory, neither of them a link."""
    try:
        return not file.parent.is_symlink() and not file.is_symlink() and file.is_file()
    except OSError:
        return False


def own_text(file: Path, most: int) -> str:
    """The first characters of a file; empty for a link, or a file that cannot be read."""
    try:
        if not is_own(file):
            return ""
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(most).rstrip()
    except OSError:
        return ""


def noted_lines(file: Path, notes: Notes) -> Iterator[dict[str, Any] | None]:
    """The lines of a line file; a note if it cannot be read to its end."""
    try:
        yield from read_lines(file)
    except OSError as error:
        notes.add(f"{file.name} could not be read ({error.strerror})")


def read_of_ranks(folder: Path, name: str, notes: Notes, read: Callable[[Any], Found]) -> dict[int, Found]:
    """Rank → what `read` makes of the JSON in its file rankN_NAME; a file that it cannot read is left out."""
    found: dict[int, Found] = {}
    for file in sorted(folder.glob(f"rank*_{name}")):
        rank = re.fullmatch(rf"rank(\d{{1,6}})_{re.escape(name)}", file.name, re.ASCII)
        if not rank or not is_own(file):
            continue
        try:
            found[int(rank[1])] = read(json.loads(regular_text(file, MOST_OF_A_RANK)))
        except (OSError, *UNREADABLE) as error:
            notes.add(f"left out: profile/{file.name}, which could not be read ({type(error).__name__})")
    return dict(sorted(found.items()))

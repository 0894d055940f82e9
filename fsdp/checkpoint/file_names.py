"""Names of the entries of a checkpoint folder.

step-00000100                 a checkpoint, if it has a manifest (an object store adds the attempt's name)
step-00000100.tmp-1f2e3d4c    written by that attempt, or left by it
step-00000100.broken-…        set aside, with the reason
step-00000100.gone-1f2e3d4c   in deletion
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

MANIFEST = "manifest.json"
METADATA = ".metadata"

_FORM = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?(?:\.(tmp|broken|gone)-(.+))?", re.ASCII)

Kind = Literal["final", "tmp", "broken", "gone"]


@dataclass(frozen=True)
class FolderName:
    step: int
    kind: Kind
    attempt: str
    """The attempt for tmp and gone, the reason for broken."""


def final(step: int, attempt: str = "") -> str:
    return f"step-{step:08d}" + (f"-{attempt}" if attempt else "")


def staging(step: int, attempt: str) -> str:
    return f"{final(step)}.tmp-{attempt}"


def parse(text: str) -> FolderName | None:
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    step, own, kind, rest = match.groups()
    return FolderName(int(step), cast(Kind, kind or "final"), rest or own or "")


def step_of(text: str) -> int:
    """-1 for the name of something else."""
    name = parse(text)
    return -1 if name is None else name.step


def data_file(rank: int) -> str:
    """DCP's own name for the first file of a rank."""
    return f"__{rank}_0.distcp"

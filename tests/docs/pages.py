"""The pages for people, and what they contain: links, anchors, commands, flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))

FOLDERS = ("fsdp", "launch", "slurm", "recipes", "bench", "tests", "docs")
"""Those whose files the pages name, and that commands need."""
JOB_SCRIPT = "sbatch"
"""The suffixes of job scripts, with | between them."""
PROGRAMS = r"(?:python|torchrun|sbatch|make|pytest|LAUNCHER=(?:srun|ray)|TORCH_DISTRIBUTED_DEBUG=DETAIL)"
IN_BLOCK = re.compile(rf"^    +({PROGRAMS} .*)$", re.MULTILINE)
IN_TEXT = re.compile(rf"`({PROGRAMS} [^`\n]*)`")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> Iterator[str]:
    """Commands of indented blocks and of `code`, without their comments."""
    text = text_of(page)
    for found in [*IN_BLOCK.findall(text), *IN_TEXT.findall(text)]:
        yield re.sub(r"\s+#\s.*$", "", found).strip()


def all_commands() -> dict[str, Path]:
    """Each printed command, with a page that prints it. The change log names commands of the past."""
    return {command: page for page in PAGES if page.stem != "CHANGELOG" for command in commands(page)}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of links and pictures within the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page)))
    return [target for target in found if not re.match(r"[a-z]+:", target)]

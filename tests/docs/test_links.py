"""Links between pages, and the names of files, flags and pages that text mentions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fsdp import config as configuration
from fsdp.config.write import REMOVED
from tests.docs.pages import FOLDERS, JOB_SCRIPT, PAGES, ROOT, anchors, links, text_of

WORDS = 900
FILE = re.compile(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w/.-]*\w\.(?:py|md|toml|sh|{JOB_SCRIPT}|env|svg))")
SOURCES = [f"*.{suffix}" for suffix in ("py", "sh", "env", "toml", *JOB_SCRIPT.split("|"))]
TOOLS_OWN = {"plan", "parity", "data.args", "model.args"}
"""Sections of flags outside the configuration of a run; arguments of a person's own factories."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(place), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_the_text_exist(page: Path) -> None:
    assert [
        name for name in FILE.findall(text_of(page)) if "NAME" not in name and not (ROOT / name).exists()
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_text_exist(page: Path) -> None:
    named = set(re.findall(r"--([a-z]+\.[a-z_0-9]+)(?![a-z_0-9*])", text_of(page)))
    gone = REMOVED.keys() if page.name == "CHANGELOG.md" else set[str]()
    unknown = {
        name
        for name in named - configuration.FIELDS.keys() - gone
        if name not in TOOLS_OWN and name.partition(".")[0] not in TOOLS_OWN
    }
    assert unknown == set()


def test_sources_mention_pages_that_exist() -> None:
    files = subprocess.run(
        ["git", "grep", "-lE", r"docs/[a-z_]+\.md", "--", *SOURCES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wrong = [
        f"{file}: {name}"
        for file in files
        for name in re.findall(r"(?<!torchtitan )\bdocs/[a-z_]+\.md", text_of(ROOT / file))
        if not (ROOT / name).exists()
    ]
    assert wrong == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, queue = set[Path](), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        queue += [(page.parent / target.partition("#")[0]).resolve() for target in links(page)]
    assert set(PAGES) <= seen


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").split()) <= WORDS

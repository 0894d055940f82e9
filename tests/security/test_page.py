"""docs/security.md names the tests that hold its lines, and each exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"tests/[\w/]+", page)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()] == []

"""docs/security.md names a test for each statement, and each test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def functions(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_each_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    file, named = "", 0
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", page):
        file = path or file
        if path or name:
            assert (ROOT / file).is_file(), file
        if name:
            named += 1
            assert name in functions(ROOT / file), f"{file}::{name}"
    assert named > 20

"""The planner's rows on docs/strategies.md are those that python -m bench.strategies prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import strategies
from tests.support.marks import quick_are

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
CASES = [
    (name, strategy) for name in strategies.SUBJECTS for strategy in strategies.STRATEGIES if name != "70b"
]
CASES.append(("70b", "ZeRO-3"))  # its other cells take a minute each: python -m bench.strategies


def printed(name: str, strategy: str) -> str:
    subject = strategies.SUBJECTS[name]
    table = [
        [cell.strip() for cell in line.split("|")] for line in PAGE.splitlines() if line.startswith("| ")
    ]
    head = next(cells for cells in table if f"{subject.title} on {subject.gpus} × H100" in cells)
    column = head.index(f"{subject.title} on {subject.gpus} × H100")
    return next(cells[column] for cells in table[table.index(head) :] if cells[1] == strategy)


def figures(cell: str) -> list[float]:
    return [float(word) for word in cell.split() if word[0].isdigit()]


@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy"), quick_are([], CASES, [("124m", "ZeRO-3")]))
def test_a_cell_of_the_page_is_the_planners(name: str, strategy: str) -> None:
    now = strategies.cell(strategies.SUBJECTS[name], strategy)
    page = printed(name, strategy)
    assert ("no" in page) is ("no" in now)
    # as tests/plan/test_recipes.py: other versions of torch keep and launch a little more or less
    for value, expected, rel, least in zip(
        figures(page), figures(now), (0.02, 0.05), (0.1, 0.001), strict=True
    ):
        assert value == pytest.approx(expected, rel=rel, abs=least)

"""The planner's rows on docs/strategies.md are those that python -m bench.strategies prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import strategies
from tests.support.marks import quick_are

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
CASES = [(name, strategy) for name in strategies.SUBJECTS for strategy in strategies.STRATEGIES]


def printed(name: str, strategy: str) -> list[str]:
    subject = strategies.SUBJECTS[name]
    part = PAGE[PAGE.index(f"### {subject.title} on {subject.gpus} × H100") :]
    line = next(line for line in part.splitlines() if line.startswith(f"| {strategy} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("name", "strategy"), quick_are([], CASES, [("124m", "ZeRO-3")]))
def test_a_row_of_the_page_is_the_planners(
    name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # rates measured here are not the table's
    now = strategies.row(strategies.SUBJECTS[name], strategy)
    said = printed(name, strategy)
    assert [said[0], said[1], said[3]] == [now[0], now[1], now[3]]
    # as tests/plan/test_recipes.py: other versions of torch keep and launch a little more or less
    assert float(said[2]) == pytest.approx(float(now[2]), rel=0.02, abs=0.1)
    assert float(said[4]) == pytest.approx(float(now[4]), rel=0.05, abs=0.001)


def test_an_unknown_model_is_answered_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert strategies.main(["7t"]) == 2
    assert "7t is not a model here: 124m, wide, 7b, 13b, 70b" in capsys.readouterr().err

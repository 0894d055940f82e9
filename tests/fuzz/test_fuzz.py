"""Generated inputs, the same at every run: a result or one error, no traceback, nothing changed outside."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed (pip install -r requirements.txt)")

from tests.fuzz.__main__ import fuzz, main
from tests.fuzz.targets import FULL, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    assert fuzz(target, tmp_path, target.examples) >= min(target.examples, 10)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    fuzz(target, tmp_path, FULL * target.examples, seed=1)


def test_the_command_counts_the_inputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.fuzz.__main__.ROUND", 20)
    assert main(["--only", "manifest", "--seconds", "0.1", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 3, ")
    assert "seeds 3 to " in out


def test_an_unknown_target_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"no target's name contains 'nothing'\. HINT: one of flags, recipe"):
        main(["--only", "nothing"])

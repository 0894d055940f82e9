"""docs/tutorials.md: 107 rows, and each command runs.

Rows of train.py run here on the pool's ranks with the flags as printed. Rows that test_commands.py types, and
those that it lists with a test, are left to it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_commands import LONG, NOT_RUN, RUN
from tests.support import needs
from tests.support.runs import on_a_rank
from tests.support.world import run_world

PAGE = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.*) \| (.*) \| (?:`(.*)`|—) \| (.*) \|$", re.MULTILINE)
ROWS = [found for found in ROW.findall(PAGE) if found[0] != "what"]
COMMANDS = list(dict.fromkeys(command for _, _, command, _ in ROWS if command))
TRAIN = re.compile(r"(?:torchrun --nproc_per_node=(\d)|python) train\.py (.*)")


def is_elsewhere(command: str) -> bool:
    return command in (*RUN, *LONG) or any(re.match(pattern, command) for pattern in NOT_RUN)


HERE = [command for command in COMMANDS if not is_elsewhere(command)]


def test_every_row_has_a_command_or_a_reason() -> None:
    assert len(ROWS) == 107
    assert [what for what, _, command, here in ROWS if not command and here == "works"] == []
    assert [what for what, tutorial, _, here in ROWS if not tutorial or not here] == []
    assert "missing" not in PAGE
    assert [command for command in HERE if TRAIN.fullmatch(command) is None] == []


def test_the_tests_that_rows_name_exist() -> None:
    named = re.findall(r"tests/[\w/.]*\w", " ".join(here for *_, here in ROWS))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorials") / "RUN"
    words = ["--run.dir", str(folder), "--config", str(ROOT / "recipes/text.toml"), "--train.steps", "2"]
    assert run_world(2, on_a_rank, [*words, "--watch.enabled", "false"]) == [None, None]
    return folder


def filled(command: str, run: Path, folder: Path) -> list[str]:
    """The words of a command, with the places that the page leaves to its reader."""
    text = re.sub(r"\bRUN\b", str(run), command)
    text = re.sub(r" scratch\b", f" {folder}/scratch", text).replace(" runs/", f" {folder}/runs/")
    words = shlex.split(text.replace("recipes/", f"{ROOT}/recipes/"))
    words += [] if "--run.dir" in words else ["--run.dir", f"{folder}/run"]
    words += ["--train.eval_samples", "8"]  # all held-out text would take most of the time
    watched = any(word.startswith("--watch.") for word in words)
    return words if watched else [*words, "--watch.enabled", "false"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("command", HERE)
def test_the_command_runs(command: str, run: Path, tmp_path: Path) -> None:
    found = TRAIN.fullmatch(command)
    assert found is not None
    ranks = int(found[1] or 1)
    if "float8" in command:
        needs.check("torchao")
    (tmp_path / "scratch").mkdir()
    words = filled(found[2], run, tmp_path)
    assert run_world(ranks, on_a_rank, words) == [None] * ranks

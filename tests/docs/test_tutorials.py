"""docs/tutorials.md: 107 rows, and each command runs.

Rows of train.py are typed here as printed, with torchrun's ranks. Rows that test_commands.py types, and those
that it lists with a test, are left to it.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from launch.node import free_port
from tests.docs.conftest import typed
from tests.docs.pages import ROOT
from tests.docs.test_commands import LONG, NOT_RUN, RUN
from tests.support import needs

PAGE = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.*) \| (.*) \| (?:`(.*)`|—) \| (.*) \|$", re.MULTILINE)
ROWS = [found for found in ROW.findall(PAGE) if found[0] != "what"]
COMMANDS = list(dict.fromkeys(command for _, _, command, _ in ROWS if command))
TRAIN = re.compile(r"(?:torchrun --nproc_per_node=(\d)|python) train\.py (.*)")


def is_elsewhere(command: str) -> bool:
    return command in (*RUN, *LONG) or any(re.match(pattern, command) for pattern in NOT_RUN)


HERE = [command for command in COMMANDS if not is_elsewhere(command)]
ON_RAY = [command for command in COMMANDS if command.startswith("python train.py --backend ray --ray.num")]


def test_every_row_has_a_command_or_a_reason() -> None:
    assert len(ROWS) == 107
    assert [what for what, _, command, here in ROWS if not command and here == "works"] == []
    assert [what for what, tutorial, _, here in ROWS if not tutorial or not here] == []
    assert "missing" not in PAGE
    assert [command for command in HERE if TRAIN.fullmatch(command) is None] == []


def test_the_tests_that_rows_name_exist() -> None:
    named = re.findall(r"tests/[\w/.]*\w", " ".join(here for *_, here in ROWS))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "command", [*HERE, *(pytest.param(row, marks=pytest.mark.ray) for row in ON_RAY)], ids=str
)
def test_the_command_runs(command: str, place: Path, run: Path) -> None:
    if "float8" in command:
        needs.check("torchao")
    (place / "scratch").mkdir(exist_ok=True)
    done = typed(command, place)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_several_nodes_by_torchrun(place: Path) -> None:
    (first,) = (command for command in COMMANDS if "--nnodes=2" in command)
    first = first.replace("HOST", "127.0.0.1").replace("29500", str(free_port(secrets.randbits(32))))
    first = first.replace("torchrun", "python -m torch.distributed.run")
    first += " --train.steps 4 --run.dir runs/nodes"
    second = first.replace("--node_rank=0", "--node_rank=1")
    done = typed(f"{second} & {first} && wait $!", place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hsdp, replicate 2 × shard 2 = 4 ranks" in done.stderr, done.stderr

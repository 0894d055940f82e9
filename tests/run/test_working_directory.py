"""A folder of checkpoints named relative to the working directory, and a later command typed elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdp.distributed.env import DistEnv
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

RELATIVE = "--checkpoint.dir ck --checkpoint.export false"


def typed_in(env: DistEnv, folder: str, words: list[str]) -> str | None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return on_a_rank(env, words)
    finally:
        os.chdir(before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Stopped after step 2, by a command typed in `one`."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    words = ["--run.dir", str(tmp_path / "run"), *flags(RELATIVE, "--train.steps 4")]
    [said] = run_world(1, typed_in, str(tmp_path / "one"), [*words, "--train.stop_after", "2"])
    assert said is None
    return tmp_path / "run"


def test_its_configuration_continues_the_run_in_another_working_directory(run: Path) -> None:
    words = ["--config", str(run / "config.toml"), "--run.dir", str(run), "--train.stop_after", "0"]
    assert run_world(1, typed_in, str(run.parent / "two"), words) == [None]
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    starts = [event for event in history if event["event"] == "start"]
    assert [start["from_step"] for start in starts] == [0, 2]
    assert starts[1]["changed"] == ["train.stop_after: 2 → 0"]
    assert not list((run.parent / "two").iterdir())
    assert [path.name for path in (run.parent / "one" / "ck").glob("step-*")] != []

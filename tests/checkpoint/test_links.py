"""Links among the checkpoints: one to another disk, and ones that lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.small import build, save_once
from tests.checkpoint.test_crashes import ENV


def restored(run_dir: Path) -> int:
    run = build(ENV, "ddp", str(run_dir))
    found = run.checkpointer.restore(run.state)
    run.checkpointer.close()
    assert found is not None
    return found.step


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The checkpoints of steps 1 and 2."""
    for _ in range(2):
        save_once(ENV, "ddp", str(tmp_path), 1)
    return tmp_path / "checkpoints"


def move_to_another_disk(checkpoint: Path) -> Path:
    target = checkpoint.parent.with_name("mounted") / checkpoint.name
    target.parent.mkdir()
    checkpoint.rename(target)
    checkpoint.symlink_to(target)
    return target.parent


def test_an_older_one_that_is_not_mounted_is_left_alone(place: Path) -> None:
    disk = move_to_another_disk(place / "step-00000001")
    disk.rename(disk.with_name("away"))
    assert restored(place.parent) == 2
    assert (place / "step-00000001").is_symlink()

"""Full and read-only file systems: real ones, mounted in a mount namespace of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.checkpoint import inspect
from fsdp.checkpoint.store import LocalStore

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, sys, torch
from fsdp.distributed.env import from_environment
from fsdp.base.errors import CheckpointError
from tests.checkpoint.small import build
logging.basicConfig(format="%(message)s")
section = dict(word.split("=") for word in sys.argv[2:])
if "keep_last" in section: section["keep_last"] = int(section["keep_last"])
run = build(from_environment({}), "ddp", sys.argv[1], section=section, width=20_000)
try:
    found = run.checkpointer.restore(run.state)
    print("restored", found.step if found else None)
    for _ in range(5):
        run.step()
        run.save(wait="mode" in section)
        print("saved", run.state.step)
    run.checkpointer.close()
except CheckpointError as error:
    run.checkpointer.close()
    print(f"CheckpointError: {error}")
"""


def mounted(mount: str, *words: object, then: str = "true") -> str:
    """Runs the command `mount`, PROGRAM and `then` in a mount namespace; returns the output."""
    space = (
        ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    shell = f'{mount} && "$0" -c "$PROGRAM" "$@" && {then}'
    command = [*space, "sh", "-c", shell, sys.executable, *map(str, words)]
    environ = {**os.environ, "PROGRAM": PROGRAM, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    place = tmp_path / "store" / "checkpoints"
    place.mkdir(parents=True)
    return place


@pytest.mark.slow
def test_a_full_disk_fails_the_new_save_and_keeps_the_old_ones(checkpoints: Path, tmp_path: Path) -> None:
    """Each save is 17 MB: the first fits, the second and third do not, and the third ends the run."""
    kept = tmp_path / "kept"
    mount = f"mount -t tmpfs -o size=24m tmpfs {checkpoints}"
    said = mounted(mount, tmp_path / "run", f"dir={checkpoints}", then=f"cp -a {checkpoints} {kept}")
    assert "CHECKPOINT of step 2 was NOT saved: rank 0: " in said
    assert "ENOSPC, No space left on device. The run continues." in said
    assert "CheckpointError: the save of step 3 failed, as did the one before" in said
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000001"], (
        "and nothing half-written stays in the way"
    )
    found = inspect.listing_of(LocalStore(kept), "step-00000001")
    assert found.manifest is not None
    for file, (size, crc) in found.manifest.files.items():
        inspect.check_file(LocalStore(kept), "step-00000001", file, size, crc)

"""The last of a rank that has failed: it leaves with its own code when its story is told, and tells it where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.watch import cells
from fsdp.watch.cells import MONITOR, SAID, Cells
from fsdp.watch.rank import sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page() -> Iterator[Cells]:
    own = cells.create(f"shardrun-test-{os.getpid()}.cells")
    own.tell({"print": "[rank 2] failed on cpu: it broke"})
    yield own
    own.path.unlink(missing_ok=True)
    own.close()


def farewell(page: Cells) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "fsdp.watch.farewell", str(page.descriptor), str(page.path), "4"]
    return subprocess.run(command, cwd=ROOT, pass_fds=(page.descriptor,), capture_output=True, text=True, timeout=60)


def test_when_it_has_been_told_there_is_nothing_more_to_say(page: Cells) -> None:
    page.numbers[SAID] = 1
    done = farewell(page)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "")


def test_without_a_monitor_it_tells_its_own(page: Cells) -> None:
    over = subprocess.Popen(["true"])
    page.numbers[MONITOR] = over.pid  # a zombie of ours
    done = farewell(page)
    over.wait()
    assert (done.returncode, done.stderr) == (4, "[rank 2] failed on cpu: it broke\n")
    assert not page.path.exists()


def test_names_that_killed_ranks_have_left_are_swept_away() -> None:
    over = subprocess.Popen(["true"])
    over.wait()
    space = Path("/proc/self/ns/pid").stat().st_ino
    dead, ours = (cells.folder() / f"shardrun-{space}-{pid}-test.sock" for pid in (over.pid, os.getpid()))
    for one in (dead, ours):
        one.touch()
    sweep()
    assert not dead.exists()
    assert ours.exists()
    ours.unlink()

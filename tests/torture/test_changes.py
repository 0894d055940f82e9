"""Changes: what a torture waits with."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path

from tests.torture.changes import Changes

LONG_S = 60.0


def test_a_name_that_appears_or_is_renamed_ends_the_wait(tmp_path: Path) -> None:
    with closing(Changes()) as changes:
        changes.watch([tmp_path, tmp_path / "absent"])
        for act in (
            lambda: (tmp_path / "folder").mkdir(),
            lambda: (tmp_path / "folder").rename(tmp_path / "other"),
        ):
            later = threading.Timer(0.05, act)
            began = time.monotonic()
            later.start()
            changes.wait(LONG_S)
            assert time.monotonic() - began < LONG_S / 2
            later.join()


def test_what_came_between_the_watch_and_the_wait_ends_it_once(tmp_path: Path) -> None:
    with closing(Changes()) as changes:
        changes.watch([tmp_path])
        (tmp_path / "one").touch()
        changes.wait(LONG_S)
        began = time.monotonic()
        changes.wait(0.05)
        assert time.monotonic() - began >= 0.05


def test_a_process_that_ends_ends_the_wait() -> None:
    reads, writes = os.pipe()
    with closing(Changes()) as changes:
        os.close(writes)
        began = time.monotonic()
        changes.wait(LONG_S, [reads])
        assert time.monotonic() - began < LONG_S / 2
    os.close(reads)

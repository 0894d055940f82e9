"""The error of a run stays its error where the storage of its lock is away, too."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from fsdp.dist.env import DistEnv
from fsdp.rundir.lock import Locks
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

NOT_FINITE = "--optim.lr 1e30 --train.clip_grad_norm 0 --checkpoint.every_steps 0 --checkpoint.export false"


def with_unreadable_locks(env: DistEnv, words: list[str]) -> str | None:
    """The run's error, where no lock can be read any more when it fails."""

    def away(self: Locks) -> str | None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    before, Locks.lost_now = Locks.lost_now, away  # type: ignore[method-assign]
    try:
        return on_a_rank(env, words)
    finally:
        Locks.lost_now = before  # type: ignore[method-assign]


def test_a_lock_that_cannot_be_read_does_not_replace_the_error(tmp_path: Path) -> None:
    [said] = run_world(1, with_unreadable_locks, ["--run.dir", str(tmp_path / "run"), *flags(NOT_FINITE)])
    assert said is not None
    assert said.startswith("NotFiniteError: ")
    *_, last = map(json.loads, (tmp_path / "run/history.jsonl").read_text().splitlines())
    assert (last["event"], last["how"]) == ("end", "failed")
    assert last["why"].startswith("NotFiniteError: ")
    assert not (tmp_path / "run/CLAIM").exists()

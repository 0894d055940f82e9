"""Seals that fail with --checkpoint.local_dir: on a node's own disk, and of the copy in the shared store.

What was written is deleted, unless it has its final name: then it counts, and older checkpoints stay.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint.store import LocalStore
from tests.checkpoint.small import Run, build
from tests.checkpoint.test_crashes import ENV
from tests.checkpoint.test_local_crashes import copied
from tests.support.processes import eventually


def a_run(folder: Path) -> Run:
    return build(ENV, "ddp", str(folder), section={"local_dir": str(folder / "node"), "keep_last": 1})


def folders(place: Path) -> list[str]:
    return sorted(one.name for one in place.iterdir() if one.is_dir())


def local(folder: Path) -> list[str]:
    (found,) = (folder / "node").iterdir()
    return folders(found)


def save(run: Run) -> None:
    """A step and its save, until the copy has ended."""
    run.step()
    run.save()
    job = run.checkpointer.flight
    assert job is not None
    job.done.wait(30)
    eventually("the copy", lambda: copied(run.checkpointer), 30)


def failing_seal(of: str) -> Callable[[LocalStore, str, str], None]:
    """A seal that fails before the rename, in the store whose path holds `of`."""
    seal = LocalStore.seal

    def fails(self: LocalStore, staged: str, final: str) -> None:
        if of in str(self.root):
            raise OSError(errno.EIO, "Input/output error", str(self.root))
        seal(self, staged, final)

    return fails


def test_a_node_whose_seal_fails_keeps_nothing_of_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path)
    save(run)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "seal", failing_seal(of="/node/"))
        save(run)
        assert run.checkpointer.sealed()[-1].step == 1
        assert "CHECKPOINT of step 2 was NOT saved: rank 0: " in caplog.text
        assert local(tmp_path) == ["step-00000001"]
    save(run)
    run.checkpointer.close()
    assert local(tmp_path) == ["step-00000003"]


def test_a_copy_whose_seal_fails_leaves_nothing_in_the_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path)
    save(run)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "seal", failing_seal(of="/checkpoints"))
        save(run)
        save(run)
        assert "step-00000002 was NOT copied to" in caplog.text
        assert folders(tmp_path / "checkpoints") == ["step-00000001"]
        with pytest.raises(CheckpointError, match="the last checkpoint is on the nodes' own disks alone"):
            run.checkpointer.close()

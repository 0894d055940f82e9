"""Stores that cannot be reached, or in which not everything may be done: a line with a HINT, or a warning."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import restore
from fsdp.checkpoint.store import LocalStore, ObjectStore
from fsdp.distributed.collectives import ObjectGroup
from tests.checkpoint.small import build
from tests.checkpoint.test_crashes import ENV

URL = "memory://no-access/run"


def denied(*_: object) -> None:
    raise PermissionError(errno.EACCES, f"listing {URL}: PermissionError: Access Denied")


def gone(*_: object) -> None:
    raise OSError(errno.ETIMEDOUT, f"listing {URL}: EndpointConnectionError: Could not connect")


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    import fsspec

    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("fails", [denied, gone])
def test_a_checkpoint_to_resume_that_cannot_be_reached_is_one_line(
    fails: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "folders", fails)
    with pytest.raises(CheckpointError, match=rf"^{URL} cannot be read: .*listing {URL}.*HINT: the keys are"):
        restore.find_checkpoint(URL)


def test_a_sealed_checkpoint_whose_ranks_are_disconnected_is_not_called_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ "step 1 was NOT saved", and the next start resumed from it."""
    run = build(ENV, "ddp", str(tmp_path))
    run.checkpointer.restore(run.state)
    gather = ObjectGroup.gather

    def disconnected(self: ObjectGroup, value: Any) -> Any:
        if (tmp_path / "checkpoints" / "step-00000001").exists():
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        return gather(self, value)

    run.step()
    with monkeypatch.context() as patched:
        patched.setattr(ObjectGroup, "gather", disconnected)
        with pytest.raises(CheckpointError, match="step 1 is saved"):
            run.save(wait=True)
    run.checkpointer.close()
    assert "CHECKPOINT of step 1 is saved, but the run ends" in caplog.text
    assert "NOT" not in caplog.text
    again = build(ENV, "ddp", str(tmp_path))
    restored = again.checkpointer.restore(again.state)
    assert restored is not None
    assert restored.step == 1
    again.checkpointer.close()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "df -h {0} and df -i {0} show what is full: free some"),
        (errno.EACCES, "ls -ld {0} shows who may write there"),
        (errno.EIO, "findmnt -T {0} and df -h {0} show the storage"),
    ],
)
def test_a_second_save_that_fails_has_the_hint_of_its_error(
    number: int,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It said "free space or repair the folder" of each of them, and had the folder's name twice."""

    def fails(self: LocalStore, folder: str) -> None:
        raise OSError(number, os.strerror(number), str(self.root / folder))

    monkeypatch.setattr(LocalStore, "begin", fails)
    run = build(ENV, "ddp", str(tmp_path), section={"dir": str(tmp_path / "store")})
    run.checkpointer.restore(run.state)
    for _ in range(2):
        run.step()
        run.save()
    hint = (
        f"{advice.format(tmp_path / 'store')}, then start the same command: it resumes from the newest whole"
    )
    with pytest.raises(CheckpointError, match=rf"^the save of step 2 failed, .* HINT: {hint} checkpoint$"):
        run.save()
    assert f"step-00000001.tmp-{run.checkpointer._attempt}: {errno.errorcode[number]}, " in caplog.text
    assert caplog.text.count("step-00000001.tmp-") == 1
    run.checkpointer.close()
